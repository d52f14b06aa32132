"""Sampling a token from each row of logits: temperature, the k likeliest, the nucleus.

::

    w[i] = exp((x[i] - max x) / temperature)       over the tokens kept: of the top_k likeliest (equal ones by lower index),
                                                   the shortest run from the likeliest down that holds top_p of their sum
    P(i) = w[i] / sum w

(Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020, for the nucleus; options in the order of transformers.) The
cumulative sum is inverted in two levels, each with a random number of its own: u in [0, 1) picks a block of about sqrt(n) of the n tokens
by the blocks' sums, then another picks a token in it. With one level, a number of 23 bits could not reach every token of a large
vocabulary. Only tokens of weight above zero are ever picked.

Row r of the leading axes, counted in row-major order, draws its two numbers from ``jax.random.fold_in(key, r)``. So a row's token depends
on its own logits, its number and the key, not on how many rows there are.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from jaxarena.ops.argmax import argmax
from jaxarena.ops.checks import check_finite, check_float, check_ndim, check_nonnegative, check_positive_int, vary_together
from jaxarena.ops.interface import launch

__all__ = ["sample"]


def sample(
    logits: Float[Array, "*rows v"],
    key: Any,
    *,
    temperature: float | Float[Array, ""] | Float[Array, "*rows"] = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Int[Array, "*rows"]:
    """Draws an index of the last axis for each row, with the probabilities of ``softmax(logits / temperature)`` over the tokens kept.

    Args:
      logits: ``[..., v]``, bfloat16 or float32, ``v`` at least 1. Tokens at -inf are never drawn. Its gradient is zero.
      key: one key, of ``jax.random.key`` or the raw uint32 data of one of JAX's default kind. Under ``jax.shard_map`` give every device a
        key of its own, or rows of the same number draw alike; so too for ``jax.vmap``, mapped over keys.
      temperature: a number, or float32 of shape ``[]`` or ``[...]``, one for each row; finite. 0 gives :func:`jaxarena.ops.argmax`, as a
        number below 0 in an array does.
      top_k: keeps the k likeliest tokens, equal ones by lower index (-0 and +0 are equal); None, or ``v`` and more, keeps all.
      top_p: in (0, 1]: then keeps the fewest of the likeliest tokens whose share of the sum reaches it.

    Returns:
      int32 ``[...]``. Probabilities are right to about 1e-6 of that of a token's block. Where a row has no finite largest logit (it holds a
      NaN or +inf, or is -inf throughout), its argmax.

    Raises:
      TypeError: an array has a dtype that is not supported, ``key`` is no key, or an option is not a number.
      ValueError: a shape does not fit, or an option is out of its range.
    """
    check_float("sample", "logits", logits)
    check_ndim("sample", "logits", logits, "... v")
    rows, v = logits.shape[:-1], logits.shape[-1]
    if v == 0:
        raise ValueError(f"sample: logits must have at least one element along the last axis, got shape {tuple(logits.shape)}")
    data, impl = _key_data(key)
    if top_k is not None:
        check_positive_int("sample", "top_k", top_k)
    if top_p is not None:
        check_finite("sample", "top_p", top_p)
        if not 0 < top_p <= 1:
            raise ValueError(f"sample: top_p must be above 0 and at most 1, got {top_p}")
    if isinstance(temperature, int | float) or not hasattr(temperature, "dtype"):
        check_nonnegative("sample", "temperature", temperature)
        if temperature == 0:
            return argmax(logits)
    elif temperature.dtype != jnp.float32 or temperature.shape not in ((), rows):
        raise ValueError(
            f"sample: temperature must be a number or float32 of shape () or {tuple(rows)} (the rows of logits), "
            f"got {temperature.dtype} of shape {tuple(temperature.shape)}"
        )
    heat = jnp.asarray(temperature, jnp.float32)
    kept = None if top_k is None or top_k >= v else top_k
    nucleus = None if top_p is None or top_p == 1 else float(top_p)
    return _sample(*vary_together(logits, heat, data), impl, kept, nucleus)


def _key_data(key: Any) -> tuple[Array, Any]:
    """The raw data of one key, and the name of its kind."""
    dtype = getattr(key, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        if key.shape:
            raise ValueError(f"sample: key must be one key, got shape {tuple(key.shape)}: map over keys with jax.vmap")
        return jax.random.key_data(key), jax.random.key_impl(key)
    if dtype != jnp.uint32:
        raise TypeError(f"sample: key must be a key of jax.random.key or its uint32 data, got {dtype or type(key).__name__}")
    impl = jax.config.jax_default_prng_impl
    shape = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl))).shape
    if key.shape != shape:
        raise ValueError(f"sample: key must have shape {shape} (the data of one {impl} key), got shape {tuple(key.shape)}")
    return key, impl


@launch("sample", row_ndim=0)
def sample_forward(
    logits: Float[Array, "*rows v"],
    temperature: Float[Array, ""] | Float[Array, "*rows"],
    key: UInt32[Array, " words"],
    *,
    impl: Any,
    top_k: int | None,
    top_p: float | None,
) -> Int[Array, "*rows"]:
    rows, v = logits.shape[:-1], logits.shape[-1]
    if logits.size == 0:
        return jnp.zeros_like(logits, shape=rows, dtype=jnp.int32)
    last = len(rows)
    greedy = lax.argmax(logits, last, jnp.int32)
    top = jnp.max(logits, axis=-1).astype(jnp.float32)
    x, order = logits.astype(jnp.float32), None
    if top_k is not None or top_p is not None:
        # top_k tells -0 from +0.
        x, order = lax.top_k(jnp.where(x == 0, 0, x), v if top_k is None else top_k)
    warm = temperature > 0
    weights = jnp.exp((x - top[..., None]) / jnp.where(warm, temperature, 1)[..., None])
    if top_p is not None:
        sums = lax.cummax(lax.cumsum(weights, last), last)
        before = jnp.pad(sums[..., :-1], [(0, 0)] * last + [(1, 0)])
        weights = jnp.where(before < top_p * sums[..., -1:], weights, 0)
    drawn = _draw(weights, _uniforms(key, impl, math.prod(rows)).reshape(*rows, 2))
    token = drawn if order is None else jnp.take_along_axis(order, drawn[..., None], axis=-1)[..., 0]
    return jnp.where(warm & jnp.isfinite(top), token, greedy)


def _uniforms(key: Array, impl: Any, rows: int) -> Float[Array, "rows 2"]:
    """Two numbers in [0, 1) for each row."""

    def of_row(key: Array, row: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(key, row), (2,), jnp.float32)

    key = jax.random.wrap_key_data(key, impl=impl)
    return jax.vmap(of_row, (None, 0))(key, jnp.arange(rows, dtype=jnp.int32))


def _draw(weights: Float[Array, "*rows n"], uniforms: Float[Array, "*rows 2"]) -> Int[Array, "*rows"]:
    """An index with probability proportional to its weight."""
    n, last = weights.shape[-1], weights.ndim - 1
    size = math.isqrt(n - 1) + 1
    blocks = jnp.pad(weights, [(0, 0)] * last + [(0, -n % size)])
    blocks = blocks.reshape(*weights.shape[:-1], -1, size)
    block = _invert(jnp.sum(blocks, axis=-1), uniforms[..., 0])
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return block * size + _invert(inside, uniforms[..., 1])


def _invert(weights: Float[Array, "*rows n"], u: Float[Array, "*rows"]) -> Int[Array, "*rows"]:
    """The first index of weight above zero up to which the weights sum to more than the share ``u`` of all."""
    # Rounded sums need not grow with every weight: only those that end at a weight above zero count.
    sums = jnp.where(weights > 0, lax.cumsum(weights, weights.ndim - 1), 0)
    return lax.argmax(sums > u[..., None] * jnp.max(sums, axis=-1, keepdims=True), weights.ndim - 1, jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _sample(logits: Array, temperature: Array, key: Array, impl: Any, top_k: int | None, top_p: float | None) -> Array:
    return sample_forward(logits, temperature, key, impl=impl, top_k=top_k, top_p=top_p)


def _sample_fwd(logits: Array, temperature: Array, key: Array, impl: Any, top_k: int | None, top_p: float | None) -> tuple[Array, None]:
    return _sample(logits, temperature, key, impl, top_k, top_p), None


def _sample_bwd(impl: Any, top_k: int | None, top_p: float | None, kept: None, dy: Any) -> tuple[None, None, None]:
    return None, None, None


_sample.defvjp(_sample_fwd, _sample_bwd)
