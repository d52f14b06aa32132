"""What the tests of the mixture of experts share: arguments, and the same mathematics with every token through every expert."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxarena.ops.moe import MoeResult, SharedExpert
from jaxarena.testing import normal

ALL = (0, 1, 2, 3)


def swiglu(x, gate_up, down):
    gate, up = jnp.split(x @ gate_up, 2, axis=-1)
    return (gate * jax.nn.sigmoid(gate) * up) @ down


def best(value, count):
    """Which of the last axis are the ``count`` largest, equal ones by lower index."""
    return jnp.argsort(jnp.argsort(-value, axis=-1, stable=True), axis=-1) < count


def chosen_experts(scores, *, top_k, scoring, bias, groups):
    value = scores if bias is None else scores + bias
    if groups is not None:
        count, per_token = groups
        grouped = jnp.sort(value.reshape(value.shape[0], count, -1), axis=-1)
        largest = 1 if scoring == "softmax" and bias is None else 2
        is_open = best(jnp.sum(grouped[..., -largest:], axis=-1), per_token)
        value = jnp.where(jnp.repeat(is_open, grouped.shape[-1], axis=1), value, -jnp.inf)
    return best(value, top_k)


def naive(
    x,
    router,
    gate_up,
    down,
    *,
    top_k,
    scoring="softmax",
    bias=None,
    groups=None,
    renormalize=True,
    scale=1.0,
    shared=None,
    residual=None,
):
    """Every token through every expert, weighted by zero where it was not chosen."""
    tokens, experts = x.reshape(-1, x.shape[-1]), router.shape[1]
    logits = tokens @ router
    scores = jax.nn.softmax(logits, axis=-1) if scoring == "softmax" else jax.nn.sigmoid(logits)
    chosen = chosen_experts(scores, top_k=top_k, scoring=scoring, bias=bias, groups=groups)
    weights = jnp.where(chosen, scores, 0.0)
    if renormalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    y = scale * jnp.einsum("ne,end->nd", weights, jax.vmap(swiglu, in_axes=(None, 0, 0))(tokens, gate_up, down))
    if shared is not None:
        rows = swiglu(tokens, shared.gate_up, shared.down)
        y = y + (rows if shared.gate is None else jax.nn.sigmoid(tokens @ shared.gate) * rows)
    y = y.reshape(x.shape) if residual is None else residual + y.reshape(x.shape)
    load = jnp.mean(chosen, axis=0, dtype=scores.dtype) / top_k
    share = scores / jnp.sum(scores, axis=-1, keepdims=True)
    balance = experts * jnp.sum(load * jnp.mean(share, axis=0))
    return MoeResult(y, balance, jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2), load)


def of_arrays(function):
    """``moe`` or ``naive`` with all its arrays by position, as the shared checks take them."""

    def run(x, router, gate_up, down, residual, bias, *shared, **params):
        return function(x, router, gate_up, down, residual=residual, bias=bias, shared=SharedExpert(*shared), **params)

    return run


def jitted(function, **params):
    """One compilation for the whole function: its operations one by one take several times as long."""
    return jax.jit(functools.partial(function, **params))


def arguments(lead, d, experts, f, dtype=jnp.float32, router_dtype=None):
    return [
        normal(0, (*lead, d), dtype),
        normal(1, (d, experts), router_dtype or dtype, scale=d**-0.5),
        normal(2, (experts, d, 2 * f), dtype, scale=d**-0.5),
        normal(3, (experts, f, d), dtype, scale=f**-0.5),
    ]


def all_arguments(lead, d, experts, f, s, dtype=jnp.float32, router_dtype=None, *, gated=True):
    """What :func:`of_arrays` takes: as ``arguments``, residual, bias and the shared expert's weights."""
    shared = [normal(4, (d, 2 * s), dtype, scale=d**-0.5), normal(5, (s, d), dtype, scale=s**-0.5)]
    if gated:
        shared.append(normal(6, (d, 1), dtype, scale=d**-0.5))
    residual, bias = normal(7, (*lead, d), dtype), normal(8, (experts,), scale=0.3)
    return [*arguments(lead, d, experts, f, dtype, router_dtype), residual, bias, *shared]
