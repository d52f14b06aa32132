"""A hybrid decoder language model in the shape of Qwen3-Next: gated delta rule layers, every fourth one gated full attention, a
mixture of experts after each.

With N = RMS norm whose weight counts from 1, h the residual stream::

    delta layer:      q, k, v, z = split(N(h) W);  beta, a = split(N(h) W');  q, k, v = short_conv(q, k, v)
                      o = delta_rule(l2norm(q), l2norm(k), v, g = -exp(A_log) softplus(a + dt_bias), sigmoid(beta))
                      h = h + (rms_norm(o) * silu(z)) W_out
    attention layer:  q, gate, k, v = split(N(h) W);  q, k = rotary(N(q), N(k)), on part of each head
                      h = h + (attention(q, k, v) * sigmoid(gate)) W_out
    both, then:       h = h + moe(N(h))

Sources: Yang, Kautz, Hatamizadeh, *Gated Delta Networks* (2024), for the delta layer, its decay parameters and their starting values
(after Mamba-2); Qwen3-Next's published configuration for the order of layers, the gates, QK-norm and partial rotary.

Parameters are a dict of arrays. Those of the layers are stacked by **period** (four layers) and run by ``lax.scan`` over periods, so
tracing and compiling take as long for 48 layers as for 4.

**Generation.** A :class:`Cache` holds what a layer needs of the tokens so far: keys and values, or the last rows before the short
convolution and the delta rule's state. :func:`extend` adds tokens, many (prefill) or one (decode), and gives the logits of what follows::

    cache = hybrid.create_cache(config, batch=1, capacity=512)
    logits, cache = hybrid.extend(params, cache, prompt, config)               # [1, n]
    logits, cache = hybrid.extend(params, cache, token[:, None], config)       # [1, 1], again and again
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxarena import ops

__all__ = ["Cache", "HybridConfig", "create_cache", "extend", "init", "logits", "loss", "parameter_count"]

PERIOD = 4
"""Layers in a period: three of the delta rule, one of attention."""

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class HybridConfig:
    """Sizes of the model. The defaults are the demo's: 2 periods, about 2 million parameters.

    Attributes:
      vocabulary: number of tokens.
      width: of the residual stream.
      layers: a multiple of 4.
      heads, kv_heads, head_size: of the attention layers; ``heads`` a multiple of ``kv_heads``.
      rotary_size: how much of each head is rotated; even.
      rotary_base: the base of the rotary wavelengths.
      delta_key_heads, delta_value_heads, delta_key_size, delta_value_size: of the delta rule; value heads a multiple of key heads.
      conv_taps: length of the short convolution.
      experts, experts_per_token, expert_width: of the mixture of experts.
      shared_width: of the shared expert; 0 for none.
      balance_weight: weight of the balance loss in the loss.
      norm_eps: epsilon of all norms.
      tied: whether the head is the embedding table.
      dtype: of activations and of the weights that products see, ``float32`` or ``bfloat16``; parameters are float32.

    Raises:
      ValueError: names the fields that do not fit each other.
    """

    vocabulary: int = 256
    width: int = 128
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    rotary_size: int = 8
    rotary_base: float = 10_000.0
    delta_key_heads: int = 2
    delta_value_heads: int = 4
    delta_key_size: int = 32
    delta_value_size: int = 32
    conv_taps: int = 4
    experts: int = 8
    experts_per_token: int = 2
    expert_width: int = 64
    shared_width: int = 64
    balance_weight: float = 0.01
    norm_eps: float = 1e-6
    tied: bool = True
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if type(value) is int and value < 1 and not (name == "shared_width" and value == 0):
                raise ValueError(f"HybridConfig: {name} must be positive, got {value}")
        if self.layers % PERIOD:
            raise ValueError(
                f"HybridConfig: layers must be a multiple of {PERIOD} (three delta layers, one of attention), got {self.layers}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"HybridConfig: heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")
        if self.delta_value_heads % self.delta_key_heads:
            raise ValueError(
                "HybridConfig: delta_value_heads must be a multiple of delta_key_heads, "
                f"got {self.delta_value_heads} and {self.delta_key_heads}"
            )
        if self.rotary_size % 2 or self.rotary_size > self.head_size:
            raise ValueError(f"HybridConfig: rotary_size must be even and at most head_size = {self.head_size}, got {self.rotary_size}")
        if self.experts_per_token > self.experts:
            raise ValueError(f"HybridConfig: experts_per_token must be at most experts = {self.experts}, got {self.experts_per_token}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"HybridConfig: dtype must be 'float32' or 'bfloat16', got {self.dtype!r}")

    @property
    def periods(self) -> int:
        return self.layers // PERIOD


def init(key: jax.Array, config: HybridConfig) -> Params:
    """Float32 parameters: normal with variance 1 / fan-in, embeddings with deviation 0.02, norms neutral.

    The delta rule's decays start as in Mamba-2: A uniform in [1, 16], the time step log-uniform in [0.001, 0.1].
    """
    keys = jax.random.split(key, 3)
    layers = jax.vmap(lambda k: _init_period(k, config))(jax.random.split(keys[0], config.periods))
    params: Params = {
        "embedding": 0.02 * jax.random.normal(keys[1], (config.vocabulary, config.width)),
        "periods": layers,
        "norm": jnp.zeros(config.width),
    }
    if not config.tied:
        params["head"] = 0.02 * jax.random.normal(keys[2], (config.vocabulary, config.width))
    return params


def parameter_count(params: Params) -> int:
    """How many numbers ``params`` (arrays or ``jax.ShapeDtypeStruct``) hold."""
    return sum(math.prod(p.shape) for p in jax.tree.leaves(params))


def loss(params: Params, tokens: jax.Array, labels: jax.Array, config: HybridConfig) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The training loss and what it is made of.

    Args:
      params: as :func:`init` made them.
      tokens: int32 [batch, time].
      labels: int32 [batch, time], what each position should predict; -100 to ignore one.

    Returns:
      ``cross_entropy + balance_weight * balance``, float32, and a dict of the two: nats a label, and the balance loss's mean over
      layers (1 when experts share the load evenly).
    """
    h, balance = _forward(params, tokens, config)
    cross_entropy = ops.cross_entropy(h, _head(params, config), labels)
    return cross_entropy + config.balance_weight * balance, {"cross_entropy": cross_entropy, "balance": balance}


def logits(params: Params, tokens: jax.Array, config: HybridConfig) -> jax.Array:
    """The logits of the token after each, [batch, time, vocabulary] in the model's dtype, of int32 [batch, time]."""
    return ops.project(_forward(params, tokens, config)[0], _head(params, config).T)


def _forward(params: Params, tokens: jax.Array, config: HybridConfig) -> tuple[jax.Array, jax.Array]:
    """The last rows, normed, and the mean of the layers' balance losses."""
    dtype = jnp.dtype(config.dtype)
    h = ops.embed(tokens, params["embedding"].astype(dtype))

    def period(carry: tuple[jax.Array, jax.Array], weights: Params) -> tuple[tuple[jax.Array, jax.Array], None]:
        h, balance = carry
        for name, layer in sorted(weights.items()):
            with jax.named_scope(name):
                mix = _attention_layer if "q_norm" in layer["mixer"] else _delta_layer
                h, _ = mix(layer["mixer"], h, None, config)
                h, layer_balance = _experts(layer["moe"], h, config)
                balance = balance + layer_balance
        return (h, balance), None

    (h, balance), _ = lax.scan(period, (h, jnp.float32(0)), params["periods"])
    return ops.rms_norm(h, params["norm"].astype(dtype), eps=config.norm_eps, offset=1.0), balance / config.layers


def _head(params: Params, config: HybridConfig) -> jax.Array:
    return params["embedding" if config.tied else "head"].astype(config.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """What the layers need of the tokens seen so far; a pytree, made by :func:`create_cache`. Donate it to the step that extends it.

    Attributes:
      attention: keys and values, of a layer for each period.
      conv: [periods, 3, batch, taps - 1, channels] in the model's dtype: the rows before the next of each short convolution.
      state: float32 [periods, 3, batch, value heads, key size, value size]: the delta rule's states.
    """

    attention: ops.KVCache
    conv: jax.Array
    state: jax.Array

    @property
    def lengths(self) -> jax.Array:
        """int32 [batch]: how many tokens each sequence has."""
        return self.attention.lengths[0]


def create_cache(config: HybridConfig, batch: int, capacity: int, storage: str | None = None) -> Cache:
    """An empty cache for ``batch`` sequences of up to ``capacity`` tokens, its keys and values in ``storage`` (:class:`ops.KVCache`).

    Raises:
      TypeError, ValueError: a size is not a positive int, or the storage is not supported.
    """
    c = config
    attention = ops.KVCache.create(batch, capacity, c.kv_heads, c.head_size, dtype=c.dtype, storage=storage, layers=c.periods)
    channels = 2 * c.delta_key_heads * c.delta_key_size + c.delta_value_heads * c.delta_value_size
    layers = (c.periods, PERIOD - 1, batch)
    return Cache(
        attention,
        jnp.zeros((*layers, c.conv_taps - 1, channels), c.dtype),
        jnp.zeros((*layers, c.delta_value_heads, c.delta_key_size, c.delta_value_size), jnp.float32),
    )


def extend(params: Params, cache: Cache, tokens: jax.Array, config: HybridConfig) -> tuple[jax.Array, Cache]:
    """Adds tokens to every sequence of a cache.

    Args:
      params: as :func:`init` made them.
      cache: of sequences of one length or several, each with room for the tokens (those without are dropped).
      tokens: int32 [batch, time], the next of each sequence; time at least 1.

    Returns:
      The logits of the token after the last, [batch, vocabulary] in the model's dtype, and the cache.

    Raises:
      TypeError: ``tokens`` is not int32.
      ValueError: ``tokens`` has not the batch of the cache, or no token.
    """
    if tokens.ndim != 2 or tokens.shape[0] != cache.conv.shape[2] or not tokens.shape[1]:
        raise ValueError(f"extend: tokens must have shape ({cache.conv.shape[2]}, time), time at least 1, got {tokens.shape}")
    dtype = jnp.dtype(config.dtype)
    h = ops.embed(tokens, params["embedding"].astype(dtype))

    def period(carry: tuple[jax.Array, Cache], turn: tuple[jax.Array, Params]) -> tuple[tuple[jax.Array, Cache], None]:
        h, cache = carry
        index, weights = turn
        for name, layer in sorted(weights.items()):
            with jax.named_scope(name):
                if "q_norm" in layer["mixer"]:
                    h, attention = _attention_layer(layer["mixer"], h, (cache.attention, index), config)
                    cache = dataclasses.replace(cache, attention=attention)
                else:
                    at = (index, int(name.removeprefix("layer")))
                    h, (conv, state) = _delta_layer(layer["mixer"], h, (cache.conv[at], cache.state[at]), config)
                    # Carried and written in part, so that a donated cache is updated where it lies.
                    cache = dataclasses.replace(cache, conv=cache.conv.at[at].set(conv), state=cache.state.at[at].set(state))
                h, _ = _experts(layer["moe"], h, config)
        return (h, cache), None

    (h, cache), _ = lax.scan(period, (h, cache), (jnp.arange(config.periods), params["periods"]))
    h = ops.rms_norm(h[:, -1:], params["norm"].astype(dtype), eps=config.norm_eps, offset=1.0)
    return ops.project(h, _head(params, config).T)[:, 0], cache


def _delta_layer(
    w: Params, h: jax.Array, before: tuple[jax.Array, jax.Array] | None, config: HybridConfig
) -> tuple[jax.Array, Any]:
    """The residual stream after the layer; with the rows and the state ``before``, also those after, else None."""
    b, t, _ = h.shape
    key_columns = config.delta_key_heads * config.delta_key_size
    value_columns = config.delta_value_heads * config.delta_value_size
    x = ops.rms_norm(h, w["norm"].astype(h.dtype), eps=config.norm_eps, offset=1.0)
    qkv, taps = ops.project(x, w["qkv"].astype(h.dtype)), w["conv"].astype(h.dtype)
    if before is None:
        qkv = ops.short_conv(qkv, taps)
    else:
        qkv, conv = ops.short_conv(qkv, taps, state=before[0], return_state=True)
    z = ops.project(x, w["z"].astype(h.dtype)).reshape(b, t, config.delta_value_heads, config.delta_value_size)
    q, k, v = jnp.split(qkv, [key_columns, 2 * key_columns], axis=-1)
    q = q.reshape(b, t, config.delta_key_heads, config.delta_key_size)
    k = k.reshape(b, t, config.delta_key_heads, config.delta_key_size)
    v = v.reshape(b, t, config.delta_value_heads, config.delta_value_size)
    # The gates are few numbers that decide how far the state reaches: float32 throughout.
    write, a = jnp.split(ops.project(x, w["beta_a"].astype(h.dtype)).astype(jnp.float32), 2, axis=-1)
    g = ops.delta_gate(a, w["a_log"], w["dt_bias"])
    beta, after = jax.nn.sigmoid(write), None
    if before is None:
        o = ops.gated_delta_rule(q, k, v, g, beta, qk_l2norm=True)
    else:
        o, state = ops.gated_delta_rule(q, k, v, g, beta, qk_l2norm=True, initial_state=before[1], return_state=True)
        after = (conv, state)
    o = ops.gate(ops.rms_norm(o, w["out_norm"].astype(h.dtype), eps=config.norm_eps), z, activation="silu")
    return ops.project(o.reshape(b, t, value_columns), w["out"].astype(h.dtype), residual=h), after


def _attention_layer(
    w: Params, h: jax.Array, before: tuple[ops.KVCache, jax.Array] | None, config: HybridConfig
) -> tuple[jax.Array, Any]:
    """The residual stream after the layer; with a cache ``before`` and the number of this layer in it, also the cache after, else None."""
    b, t, _ = h.shape
    columns, kv_columns = config.heads * config.head_size, config.kv_heads * config.head_size
    x = ops.rms_norm(h, w["norm"].astype(h.dtype), eps=config.norm_eps, offset=1.0)
    qgkv = ops.project(x, w["qgkv"].astype(h.dtype))
    q, gate, k, v = jnp.split(qgkv, [columns, 2 * columns, 2 * columns + kv_columns], axis=-1)

    positions = None
    if before is not None:
        cache, layer = before
        positions = cache.lengths[layer][:, None] + jnp.arange(t)

    def heads(y: jax.Array, norm: str) -> jax.Array:
        y = ops.rms_norm(y.reshape(b, t, -1, config.head_size), w[norm].astype(h.dtype), eps=config.norm_eps, offset=1.0)
        return ops.rotary(y, positions=positions, base=config.rotary_base, rotary_dim=config.rotary_size)

    q, k, v = heads(q, "q_norm"), heads(k, "k_norm"), v.reshape(b, t, config.kv_heads, config.head_size)
    o: Any
    after = None
    if before is None:
        o = ops.attention(q, k, v)
    else:
        after = ops.append(cache, k, v, layer=layer)
        o = ops.attend(q, after, layer=layer)
    return ops.project(ops.gate(o.reshape(b, t, columns), gate), w["out"].astype(h.dtype), residual=h), after


def _experts(w: Params, h: jax.Array, config: HybridConfig) -> tuple[jax.Array, jax.Array]:
    x = ops.rms_norm(h, w["norm"].astype(h.dtype), eps=config.norm_eps, offset=1.0)
    shared = None
    if config.shared_width:
        shared = ops.SharedExpert(*(w[name].astype(h.dtype) for name in ("shared_gate_up", "shared_down", "shared_gate")))
    result = ops.moe(
        x,
        w["router"].astype(h.dtype),
        w["gate_up"].astype(h.dtype),
        w["down"].astype(h.dtype),
        top_k=config.experts_per_token,
        shared=shared,
        residual=h,
    )
    return result.y, result.balance_loss


def _init_period(key: jax.Array, config: HybridConfig) -> Params:
    keys = jax.random.split(key, 2 * PERIOD)
    mixers = [_init_delta] * (PERIOD - 1) + [_init_attention]
    return {
        f"layer{i}": {"mixer": mixer(keys[2 * i], config), "moe": _init_experts(keys[2 * i + 1], config)} for i, mixer in enumerate(mixers)
    }


def _normal(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape) * shape[-2] ** -0.5


def _init_delta(key: jax.Array, c: HybridConfig) -> Params:
    keys = jax.random.split(key, 7)
    key_columns, value_columns = c.delta_key_heads * c.delta_key_size, c.delta_value_heads * c.delta_value_size
    step = jnp.exp(jax.random.uniform(keys[5], (c.delta_value_heads,), minval=math.log(1e-3), maxval=math.log(1e-1)))
    return {
        "norm": jnp.zeros(c.width),
        "qkv": _normal(keys[0], c.width, 2 * key_columns + value_columns),
        "z": _normal(keys[1], c.width, value_columns),
        "beta_a": _normal(keys[2], c.width, 2 * c.delta_value_heads),
        "conv": _normal(keys[3], c.conv_taps, 2 * key_columns + value_columns),
        "a_log": jnp.log(jax.random.uniform(keys[4], (c.delta_value_heads,), minval=1.0, maxval=16.0)),
        # softplus(dt_bias) = step
        "dt_bias": step + jnp.log(-jnp.expm1(-step)),
        "out_norm": jnp.ones(c.delta_value_size),
        "out": _normal(keys[6], value_columns, c.width),
    }


def _init_attention(key: jax.Array, c: HybridConfig) -> Params:
    keys = jax.random.split(key, 2)
    columns, kv_columns = c.heads * c.head_size, c.kv_heads * c.head_size
    return {
        "norm": jnp.zeros(c.width),
        "qgkv": _normal(keys[0], c.width, 2 * columns + 2 * kv_columns),
        "q_norm": jnp.zeros(c.head_size),
        "k_norm": jnp.zeros(c.head_size),
        "out": _normal(keys[1], columns, c.width),
    }


def _init_experts(key: jax.Array, c: HybridConfig) -> Params:
    keys = jax.random.split(key, 6)
    params = {
        "norm": jnp.zeros(c.width),
        "router": _normal(keys[0], c.width, c.experts),
        "gate_up": _normal(keys[1], c.experts, c.width, 2 * c.expert_width),
        "down": _normal(keys[2], c.experts, c.expert_width, c.width),
    }
    if c.shared_width:
        params |= {
            "shared_gate_up": _normal(keys[3], c.width, 2 * c.shared_width),
            "shared_down": _normal(keys[4], c.shared_width, c.width),
            "shared_gate": _normal(keys[5], c.width, 1),
        }
    return params
