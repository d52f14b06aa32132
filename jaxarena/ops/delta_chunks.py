"""The gated delta rule within chunks of C steps: the algebra that :mod:`jaxarena.ops.gated_delta_rule` states, batched over chunks.

What needs no state is computed for all chunks of a span at once (:class:`Chunks`); only the states, and the gradients of the states,
are scanned from chunk to chunk. With do scaled, P = D * Q K^T and E = V - diag(d) K S, the scan of the gradients goes from the last
chunk to the first (to_end is the last row of D, S' the state after the chunk):

    dU = P^T do + diag(to_end) K dS'       dR = (I + A)^-T dU        (R = diag(beta) E, the right-hand side)
    dS = d_C dS' + (diag(d) Q)^T do - (diag(d) K)^T diag(beta) dR

From these, for all chunks at once: dV = diag(beta) dR, dA = -dR U^T below the diagonal, dP = do U^T, and by the product rule the
rest. The gradient of a sum of gates is that of its exponential times the exponential; each gate collects from the sums it is in.

Axes: n chunks, b batch, hk key heads or hv value heads, c steps of a chunk, dk and dv. All of it is float32.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

__all__ = [
    "Chunks",
    "Gradients",
    "chunk_gradients",
    "chunk_outputs",
    "l2norm",
    "l2norm_gradient",
    "product_for",
    "scan_states",
    "within_chunks",
]

Product = Callable[[str, Array, Array], Array]


def product_for(dtype: jnp.dtype) -> Product:
    """``einsum`` at the precision that operands of ``dtype`` deserve."""
    # Reduced precision of the products would be amplified by the recurrence, so float32 operands get float32 products.
    return functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT)


class Chunks(NamedTuple):
    """What needs no state. Steps of zeros, which fill the last chunk, write nothing and keep the state."""

    q: Float[Array, "n b hk c dk"]
    k: Float[Array, "n b hk c dk"]
    v: Float[Array, "n b hv c dv"]
    beta: Float[Array, "n b hv c 1"]
    decay: Float[Array, "n b hv c c"]  # D
    since_start: Float[Array, "n b hv c 1"]  # d
    overlap: Float[Array, "n b hv c c"]  # A without its factor beta
    inverse: Float[Array, "n b hv c c"]  # of I + A


class Gradients(NamedTuple):
    """The gradients of q and k as the chunks take them (normed), v, g and beta."""

    q: Float[Array, "n b hk c dk"]
    k: Float[Array, "n b hk c dk"]
    v: Float[Array, "n b hv c dv"]
    g: Float[Array, "n b hv c 1"]
    beta: Float[Array, "n b hv c 1"]


def within_chunks(
    q: Float[Array, "n b hk c dk"],
    k: Float[Array, "n b hk c dk"],
    v: Float[Array, "n b hv c dv"],
    g: Float[Array, "n b hv c 1"],
    beta: Float[Array, "n b hv c 1"],
    product: Product,
) -> Chunks:
    decay, since_start = _decays(g[..., 0])
    overlap = _strictly_lower(decay * _repeat_heads(product("...ik,...jk->...ij", k, k), v.shape[2]))
    return Chunks(q, k, v, beta, decay, since_start, overlap, _unit_lower_inverse(beta * overlap))


def chunk_outputs(
    c: Chunks, state: Float[Array, "b hv dk dv"], scale: float, product: Product
) -> tuple[Float[Array, "n b hv c dv"], Float[Array, "b hv dk dv"]]:
    """What every step reads, and the state after the last chunk."""
    heads = c.v.shape[2]
    states, writes, _, state = scan_states(c, state, product)
    scores = c.decay * _repeat_heads(product("...ik,...jk->...ij", c.q, c.k), heads)
    o = c.since_start * product("...ik,...kv->...iv", _repeat_heads(c.q, heads), states)
    return scale * (o + product("...ij,...jv->...iv", scores, writes)), state


def chunk_gradients(
    c: Chunks,
    state: Float[Array, "b hv dk dv"],
    do: Float[Array, "n b hv c dv"],
    dstate: Float[Array, "b hv dk dv"],
    product: Product,
) -> tuple[Gradients, Float[Array, "b hv dk dv"]]:
    """The gradients, given that of what the steps read (scaled) and that of the state after the last chunk; last, that of ``state``."""
    heads = c.v.shape[2]
    states, writes, errors, _ = scan_states(c, state, product)
    q_heads, k_heads = _repeat_heads(c.q, heads), _repeat_heads(c.k, heads)
    scores = c.decay * _repeat_heads(product("...ik,...jk->...ij", c.q, c.k), heads)

    dwrites = product("...ij,...iv->...jv", scores, do)
    dread = product("...ik,...iv->...kv", c.since_start * q_heads, do)
    dstates, dright, dstate = _scan_state_gradients(c, k_heads, dwrites, dread, dstate, product)
    derrors = c.beta * dright

    # Through the states: what o reads, what the errors subtract, what the writes leave to the next chunk.
    dq_read = c.since_start * product("...iv,...kv->...ik", do, states)
    dk_left = c.decay[..., -1, :, None] * product("...jv,...kv->...jk", writes, dstates)
    dk_heads = dk_left - product("...iv,...kv->...ik", c.since_start * derrors, states)

    # Within a chunk: the scores, and the matrix of the system.
    dscores = product("...iv,...jv->...ij", do, writes)
    dsystem = -_strictly_lower(product("...iv,...jv->...ij", dright, writes))
    dbeta = jnp.sum(dright * errors, axis=-1) + jnp.sum(dsystem * c.overlap, axis=-1)
    doverlap = c.beta * dsystem
    key_heads = c.k.shape[2]
    dqk, dkk = _sum_heads(dscores * c.decay, key_heads), _sum_heads(doverlap * c.decay, key_heads)
    dq = _sum_heads(dq_read, key_heads) + product("...ij,...jk->...ik", dqk, c.k)
    dk = _sum_heads(dk_heads, key_heads) + product("...ij,...ik->...jk", dqk, c.q)
    dk = dk + product("...ij,...jk->...ik", dkk, c.k) + product("...ij,...ik->...jk", dkk, c.k)

    # A decay is an exponential: the gradient of its exponent is its own times the decay.
    dlog_pairs = dscores * scores + doverlap * c.overlap
    dlog_end = jnp.sum(dk_left * k_heads, axis=-1)
    dlog_start = jnp.sum(dq_read * q_heads, axis=-1) - jnp.sum(derrors * (c.v - errors), axis=-1)
    dlog_kept = c.since_start[..., -1, 0] * jnp.sum(dstates * states, axis=(-2, -1))
    dlog_start = dlog_start.at[..., -1].add(dlog_kept)
    dg = _gate_gradient(dlog_pairs, dlog_start[..., None], dlog_end[..., None, :])
    return Gradients(dq, dk, derrors, dg[..., None], dbeta[..., None]), dstate


def scan_states(c: Chunks, state: Float[Array, "b hv dk dv"], product: Product) -> tuple[Array, Array, Array, Array]:
    """The states at the chunks' starts, the writes U, the errors V - diag(d) K S, and the state after the last chunk."""

    def step(state: Array, xs: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array, Array]]:
        k, v, beta, since_start, to_end, inverse = xs
        errors = v - since_start * product("...ik,...kv->...iv", k, state)
        writes = product("...ij,...jv->...iv", inverse, beta * errors)
        left = product("...jk,...jv->...kv", k, to_end * writes)
        return since_start[..., -1:, :] * state + left, (state, writes, errors)

    k = _repeat_heads(c.k, c.v.shape[2])
    state, (states, writes, errors) = lax.scan(step, state, (k, c.v, c.beta, c.since_start, c.decay[..., -1, :, None], c.inverse))
    return states, writes, errors, state


def _scan_state_gradients(c: Chunks, k: Array, dwrites: Array, dread: Array, dstate: Array, product: Product) -> tuple[Array, Array, Array]:
    """The gradients of the states after each chunk, of the right-hand sides of the systems, and of the state before the first."""

    def step(dstate: Array, xs: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        k, beta, since_start, to_end, inverse, dwrites, dread = xs
        dwrites = dwrites + to_end * product("...jk,...kv->...jv", k, dstate)
        dright = product("...ij,...iv->...jv", inverse, dwrites)
        recalled = product("...ik,...iv->...kv", k, since_start * beta * dright)
        return since_start[..., -1:, :] * dstate + dread - recalled, (dstate, dright)

    xs = (k, c.beta, c.since_start, c.decay[..., -1, :, None], c.inverse, dwrites, dread)
    dstate, (dstates, dright) = lax.scan(step, dstate, xs, reverse=True)
    return dstates, dright, dstate


def _decays(g: Float[Array, "*heads c"]) -> tuple[Float[Array, "*heads c c"], Float[Array, "*heads c 1"]]:
    """D, whose element (i, j) is exp(sum of g_m for j < m <= i) and 0 for j > i, and d: each sum is formed from its own gates."""
    chunk = g.shape[-1]
    seen = jnp.tril(jnp.broadcast_to(jnp.maximum(g, _LEAST_GATE)[..., None, :], (*g.shape, chunk)))
    after = jnp.tril(jnp.ones_like(g, shape=(chunk, chunk)), -1)
    sums = jnp.einsum("...im,mj->...ij", seen, after, precision=lax.Precision.HIGHEST)
    return jnp.tril(jnp.exp(sums)), jnp.exp(jnp.sum(seen, axis=-1, keepdims=True))


# Its exponential is 0 as that of -inf is, but 0 times it is 0: it can be summed by a product with zeros and ones.
_LEAST_GATE = -1e30


def _gate_gradient(
    pairs: Float[Array, "*heads c c"], start: Float[Array, "*heads c 1"], end: Float[Array, "*heads 1 c"]
) -> Float[Array, "*heads c"]:
    """Gate m is in the sum of pair (i, j) if j < m <= i, in that since the start of i if m <= i, in that to the end of j if j < m."""
    chunk = pairs.shape[-1]
    after = jnp.tril(jnp.ones_like(pairs, shape=(chunk, chunk)), -1)
    spanning = start + jnp.einsum("...ij,mj->...im", pairs, after, precision=lax.Precision.HIGHEST)
    to_end = jnp.einsum("...ij,mj->...im", end, after, precision=lax.Precision.HIGHEST)
    return jnp.sum(jnp.tril(spanning), axis=-2) + to_end[..., 0, :]


def _unit_lower_inverse(lower: Float[Array, "*heads c c"]) -> Float[Array, "*heads c c"]:
    """The inverse of ``I + lower``, for a strictly lower triangular matrix.

    With halves [[P, 0], [L, Q]] it is [[P', 0], [-Q' L P', Q']]: P and Q are inverted side by side, down to blocks of 2.
    """
    size = lower.shape[-1]
    if size <= 2:
        return jnp.eye(size, dtype=lower.dtype) - lower
    half = (size + 1) // 2
    if size % 2:
        lower = jnp.pad(lower, [(0, 0)] * (lower.ndim - 2) + [(0, 1), (0, 1)])
    halves = jnp.stack([lower[..., :half, :half], lower[..., half:, half:]])
    first, second = _unit_lower_inverse(halves)
    below = -_small_product(_small_product(second, lower[..., half:, :half]), first)
    rows = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1), jnp.concatenate([below, second], axis=-1)
    return jnp.concatenate(rows, axis=-2)[..., :size, :size]


def _small_product(a: Float[Array, "*blocks i j"], b: Float[Array, "*blocks j k"]) -> Float[Array, "*blocks i k"]:
    if a.shape[-1] <= 4:  # one fused sum instead of a call for each of many tiny products
        return functools.reduce(operator.add, (a[..., :, j, None] * b[..., None, j, :] for j in range(a.shape[-1])))
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _strictly_lower(a: Float[Array, "*heads c c"]) -> Float[Array, "*heads c c"]:
    return jnp.tril(a, -1)


def l2norm(x: Float[Array, "*rows d"], eps: float | None) -> Float[Array, "*rows d"]:
    """``x * rsqrt(sum(x**2) + eps)``, or ``x`` as it is if ``eps`` is None."""
    return x if eps is None else x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


def l2norm_gradient(x: Float[Array, "*rows d"], dy: Float[Array, "*rows d"], eps: float | None) -> Float[Array, "*rows d"]:
    """The gradient of ``x`` from that of ``l2norm(x, eps)``."""
    if eps is None:
        return dy
    inverse_norm = lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)
    y = x * inverse_norm
    return inverse_norm * (dy - y * jnp.sum(y * dy, axis=-1, keepdims=True))


def _repeat_heads(a: Float[Array, "n b hk ..."], value_heads: int) -> Float[Array, "n b hv ..."]:
    """Repeats each key head (axis 2) for the value heads that read it."""
    return jnp.repeat(a, value_heads // a.shape[2], axis=2)


def _sum_heads(a: Float[Array, "n b hv ..."], key_heads: int) -> Float[Array, "n b hk ..."]:
    """Sums over the value heads that read the same key head."""
    n, batch, value_heads, *rest = a.shape
    a = a.reshape(n, batch, key_heads, value_heads // key_heads, *rest)
    return functools.reduce(operator.add, (a[:, :, :, r] for r in range(a.shape[3])))
