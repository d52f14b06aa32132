"""The gated delta rule: a linear attention whose state forgets by a gate and is corrected by the error of what it recalls.

For each value head, with a state S of shape (dk, dv) that starts at zero, every step t decays, looks at its error, and writes:

    S <- exp(g_t) S
    S <- S + k_t beta_t (v_t - S^T k_t)^T
    o_t = scale * S^T q_t

(Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.) It is computed a chunk of C steps
at a time. Let u_i be what step i writes, so that S after step i is a decayed sum of k_j u_j^T. With the pairwise decays
D_ij = exp(sum of g_m for j < m <= i), zero for j > i, the decay d_i = exp(sum of g_m for m <= i) since the chunk began, and the
state S at its start, the writes solve a unit lower triangular system (the WY form of Yang et al., "Parallelizing Linear
Transformers with the Delta Rule over Sequence Length", 2024):

    (I + A) U = diag(beta) (V - diag(d) K S),    A_ij = beta_i D_ij (k_i . k_j) for j < i
    O = scale (diag(d) Q S + (D * Q K^T) U)
    S_next = d_C S + sum over j of D_Cj k_j u_j^T

Two choices keep it right for every gate from 0 to -inf. The sums of gates in D are each formed from the gates they contain:
the difference of two cumulative sums would lose the small gates that follow a large one, and is NaN at -inf. And no
positive number is ever exponentiated: the masked half of D is exp(0), set to zero. I + A is inverted by halves, which is forward
substitution on blocks and stable where a power series in A is not (equal keys with beta = 1 make A a triangle of ones).

Only the states need the chunks one after another, so they alone are scanned; the rest is products batched over all chunks. The
backward pass keeps only the inputs. It computes the states again and, with do scaled, P = D * Q K^T and E = V - diag(d) K S, scans
the states' gradients from the last chunk to the first (to_end is the last row of D, S' the state after the chunk):

    dU = P^T do + diag(to_end) K dS'       dR = (I + A)^-T dU        (R = diag(beta) E, the right-hand side)
    dS = d_C dS' + (diag(d) Q)^T do - (diag(d) K)^T diag(beta) dR

From these, for all chunks at once: dV = diag(beta) dR, dA = -dR U^T below the diagonal, dP = do U^T, and by the product rule the
rest. The gradient of a sum of gates is that of its exponential times the exponential; each gate collects from the sums it is in.

All arithmetic is float32. Shapes: q, k (batch, time, key heads, dk); v (batch, time, value heads, dv); g, beta (batch,
time, value heads). Value head j reads key head j // (value heads / key heads).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxarena.ops.checks import (
    check_finite,
    check_float,
    check_ndim,
    check_nonnegative,
    check_positive_int,
    check_same_dtype,
    check_same_shape,
    check_shape,
    vary_together,
)
from jaxarena.ops.interface import launch

__all__ = ["gated_delta_rule"]

_OP = "gated_delta_rule"


def gated_delta_rule(
    q: Float[Array, "b t hk dk"],
    k: Float[Array, "b t hk dk"],
    v: Float[Array, "b t hv dv"],
    g: Float[Array, "b t hv"],
    beta: Float[Array, "b t hv"],
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    l2norm_eps: float = 1e-6,
    chunk_size: int = 64,
) -> Float[Array, "b t hv dv"]:
    """Runs the gated delta rule over each sequence, from a state of zeros.

    Args:
      q: queries, (batch, time, key heads, dk), bfloat16 or float32.
      k: keys, as ``q``.
      v: values, (batch, time, value heads, dv), in the dtype of ``q``; the value heads are a multiple of the key heads.
      g: log of the decay, (batch, time, value heads), float32, at most 0; -inf forgets everything before the step.
      beta: write strength, (batch, time, value heads), float32, usually in [0, 1].
      scale: multiplies the result; ``dk ** -0.5`` if None.
      qk_l2norm: replace every row x of ``q`` and ``k`` by ``x * rsqrt(sum(x**2) + l2norm_eps)``.
      l2norm_eps: see ``qk_l2norm``.
      chunk_size: steps computed together; changes speed, and the result only by rounding.

    Returns:
      (batch, time, value heads, dv) in the dtype of ``v``. The state is float32 throughout.

    Raises:
      TypeError: a dtype is not supported.
      ValueError: shapes do not fit together, or the value heads are no multiple of the key heads.
    """
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_float(_OP, name, array)
        check_ndim(_OP, name, array, "batch time heads size")
        check_same_dtype(_OP, name, array, "q", q)
    check_same_shape(_OP, "k", k, "q", q)
    batch, time, key_heads, size = q.shape
    value_heads = v.shape[2]
    check_shape(_OP, "v", v, (batch, time, value_heads, v.shape[3]), "batch and time of q")
    if min(key_heads, value_heads) < 1 or value_heads % key_heads:
        raise ValueError(f"{_OP}: v must have a multiple of q's heads, got {value_heads} value heads and {key_heads} key heads")
    for name, array in (("g", g), ("beta", beta)):
        check_float(_OP, name, array)
        if array.dtype != jnp.float32:
            raise TypeError(f"{_OP}: {name} must be float32, got {array.dtype}: cast it with {name}.astype(jnp.float32)")
        check_shape(_OP, name, array, (batch, time, value_heads), "batch, time and heads of v")
    check_positive_int(_OP, "chunk_size", chunk_size)
    check_nonnegative(_OP, "l2norm_eps", l2norm_eps)
    scale = size**-0.5 if scale is None else scale
    check_finite(_OP, "scale", scale)
    config = _Config(float(scale), float(l2norm_eps) if qk_l2norm else None, min(chunk_size, max(time, 1)))
    return _gated_delta_rule(*vary_together(q, k, v, g, beta), config)


class _Config(NamedTuple):
    scale: float
    l2norm_eps: float | None  # None: q and k are taken as they are
    chunk: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _gated_delta_rule(q: Array, k: Array, v: Array, g: Array, beta: Array, config: _Config) -> Array:
    return gated_delta_rule_forward(q, k, v, g, beta, config=config)


def _fwd(q: Array, k: Array, v: Array, g: Array, beta: Array, config: _Config) -> tuple[Array, tuple[Array, ...]]:
    return _gated_delta_rule(q, k, v, g, beta, config), (q, k, v, g, beta)


def _bwd(config: _Config, saved: tuple[Array, ...], do: Array) -> tuple[Array, ...]:
    return gated_delta_rule_backward(*saved, do, config=config)


_gated_delta_rule.defvjp(_fwd, _bwd)


@launch("gated_delta_rule_forward", row_ndim=2)
def gated_delta_rule_forward(
    q: Float[Array, "b t hk dk"],
    k: Float[Array, "b t hk dk"],
    v: Float[Array, "b t hv dv"],
    g: Float[Array, "b t hv"],
    beta: Float[Array, "b t hv"],
    *,
    config: _Config,
) -> Float[Array, "b t hv dv"]:
    """The outputs o: all chunks at once but for the states, which are scanned."""
    product = _product_for(q.dtype)
    chunks = _within_chunks(q, k, v, g, beta, config, product)
    states, writes, _ = _scan_states(chunks, product)
    scores = chunks.decay * _to_value_heads(product("...ik,...jk->...ij", chunks.q, chunks.k), v)
    o = chunks.since_start * product("...ik,...kv->...iv", _to_value_heads(chunks.q, v), states)
    o = o + product("...ij,...jv->...iv", scores, writes)
    return _join(config.scale * o, v.shape).astype(v.dtype)


@launch("gated_delta_rule_backward", row_ndim=(2, 2, 2, 0, 0))
def gated_delta_rule_backward(
    q: Float[Array, "b t hk dk"],
    k: Float[Array, "b t hk dk"],
    v: Float[Array, "b t hv dv"],
    g: Float[Array, "b t hv"],
    beta: Float[Array, "b t hv"],
    do: Float[Array, "b t hv dv"],
    *,
    config: _Config,
) -> tuple[Float[Array, "b t hk dk"], Float[Array, "b t hk dk"], Float[Array, "b t hv dv"], Float[Array, "b t hv"], Float[Array, "b t hv"]]:
    """dq, dk, dv, dg, dbeta: the states again, their gradients from the last chunk to the first, then all chunks at once."""
    product = _product_for(q.dtype)
    c = _within_chunks(q, k, v, g, beta, config, product)
    states, writes, errors = _scan_states(c, product)
    q_heads, k_heads = _to_value_heads(c.q, v), _to_value_heads(c.k, v)
    scores = c.decay * _to_value_heads(product("...ik,...jk->...ij", c.q, c.k), v)
    do_chunks = config.scale * _cut(do.astype(jnp.float32), config.chunk)

    dwrites = product("...ij,...iv->...jv", scores, do_chunks)
    dread = product("...ik,...iv->...kv", c.since_start * q_heads, do_chunks)
    dstates, dright = _scan_state_gradients(c, k_heads, dwrites, dread, product)
    derrors = c.beta * dright

    # Through the states: what o reads, what the errors subtract, what the writes leave to the next chunk.
    dq_read = c.since_start * product("...iv,...kv->...ik", do_chunks, states)
    dk_left = c.decay[..., -1, :, None] * product("...jv,...kv->...jk", writes, dstates)
    dk_heads = dk_left - product("...iv,...kv->...ik", c.since_start * derrors, states)

    # Within a chunk: the scores, and the matrix of the system.
    dscores = product("...iv,...jv->...ij", do_chunks, writes)
    dsystem = -_strictly_lower(product("...iv,...jv->...ij", dright, writes))
    dbeta = jnp.sum(dright * errors, axis=-1) + jnp.sum(dsystem * c.overlap, axis=-1)
    doverlap = c.beta * dsystem
    dqk, dkk = _to_key_heads(dscores * c.decay, q), _to_key_heads(doverlap * c.decay, q)
    dq = _to_key_heads(dq_read, q) + product("...ij,...jk->...ik", dqk, c.k)
    dk = _to_key_heads(dk_heads, q) + product("...ij,...ik->...jk", dqk, c.q)
    dk = dk + product("...ij,...jk->...ik", dkk, c.k) + product("...ij,...ik->...jk", dkk, c.k)

    # A decay is an exponential: the gradient of its exponent is its own times the decay.
    dlog_pairs = dscores * scores + doverlap * c.overlap
    dlog_end = jnp.sum(dk_left * k_heads, axis=-1)
    dlog_start = jnp.sum(dq_read * q_heads, axis=-1) - jnp.sum(derrors * (c.v - errors), axis=-1)
    dlog_kept = c.since_start[..., -1, 0] * jnp.sum(dstates * states, axis=(-2, -1))
    dlog_start = dlog_start.at[..., -1].add(dlog_kept)
    dg = _gate_gradient(dlog_pairs, dlog_start[..., None], dlog_end[..., None, :])

    dq, dk = (_l2norm_gradient(x, _join(d, x.shape), config.l2norm_eps) for x, d in ((q, dq), (k, dk)))
    dv = _join(derrors, v.shape)
    dg, dbeta = (_join(d[..., None], (*g.shape, 1))[..., 0] for d in (dg, dbeta))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dg, dbeta


class _Chunks(NamedTuple):
    """What needs no state, in float32, for n chunks of c steps; the last is filled with steps of zeros, which write nothing."""

    q: Float[Array, "n b hk c dk"]
    k: Float[Array, "n b hk c dk"]
    v: Float[Array, "n b hv c dv"]
    beta: Float[Array, "n b hv c 1"]
    decay: Float[Array, "n b hv c c"]  # D
    since_start: Float[Array, "n b hv c 1"]  # d
    overlap: Float[Array, "n b hv c c"]  # A without its factor beta
    inverse: Float[Array, "n b hv c c"]  # of I + A


def _within_chunks(q: Array, k: Array, v: Array, g: Array, beta: Array, config: _Config, product: _Product) -> _Chunks:
    q, k = (_cut(_l2norm(x.astype(jnp.float32), config.l2norm_eps), config.chunk) for x in (q, k))
    g, beta = (_cut(x[..., None], config.chunk) for x in (g, beta))
    decay, since_start = _decays(g[..., 0])
    overlap = _strictly_lower(decay * _to_value_heads(product("...ik,...jk->...ij", k, k), v))
    return _Chunks(q, k, _cut(v.astype(jnp.float32), config.chunk), beta, decay, since_start, overlap, _unit_lower_inverse(beta * overlap))


def _scan_states(c: _Chunks, product: _Product) -> tuple[Array, Array, Array]:
    """The states at the chunks' starts, the writes U, and the errors V - diag(d) K S."""

    def step(state: Array, xs: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array, Array]]:
        k, v, beta, since_start, to_end, inverse = xs
        errors = v - since_start * product("...ik,...kv->...iv", k, state)
        writes = product("...ij,...jv->...iv", inverse, beta * errors)
        left = product("...jk,...jv->...kv", k, to_end * writes)
        return since_start[..., -1:, :] * state + left, (state, writes, errors)

    k = _to_value_heads(c.k, c.v)
    zero = jnp.zeros_like(c.v, shape=(*c.v.shape[1:3], c.k.shape[-1], c.v.shape[-1]))
    return lax.scan(step, zero, (k, c.v, c.beta, c.since_start, c.decay[..., -1, :, None], c.inverse))[1]


def _scan_state_gradients(c: _Chunks, k: Array, dwrites: Array, dread: Array, product: _Product) -> tuple[Array, Array]:
    """The gradients of the states after each chunk, and of the right-hand sides of the systems."""

    def step(dstate: Array, xs: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        k, beta, since_start, to_end, inverse, dwrites, dread = xs
        dwrites = dwrites + to_end * product("...jk,...kv->...jv", k, dstate)
        dright = product("...ij,...iv->...jv", inverse, dwrites)
        recalled = product("...ik,...iv->...kv", k, since_start * beta * dright)
        return since_start[..., -1:, :] * dstate + dread - recalled, (dstate, dright)

    xs = (k, c.beta, c.since_start, c.decay[..., -1, :, None], c.inverse, dwrites, dread)
    return lax.scan(step, jnp.zeros_like(dread, shape=dread.shape[1:]), xs, reverse=True)[1]


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


_Product = Callable[[str, Array, Array], Array]


def _product_for(dtype: jnp.dtype) -> _Product:
    # Reduced precision of the products would be amplified by the recurrence, so float32 operands get float32 products.
    return functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT)


def _strictly_lower(a: Float[Array, "*heads c c"]) -> Float[Array, "*heads c c"]:
    return jnp.tril(a, -1)


def _l2norm(x: Float[Array, "*rows d"], eps: float | None) -> Float[Array, "*rows d"]:
    return x if eps is None else x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


def _l2norm_gradient(x: Float[Array, "*rows d"], dy: Float[Array, "*rows d"], eps: float | None) -> Float[Array, "*rows d"]:
    if eps is None:
        return dy
    x = x.astype(jnp.float32)
    inverse_norm = lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)
    y = x * inverse_norm
    return inverse_norm * (dy - y * jnp.sum(y * dy, axis=-1, keepdims=True))


def _to_value_heads(a: Float[Array, "n b hk ..."], v: Array) -> Float[Array, "n b hv ..."]:
    """Repeats each key head for the value heads that read it."""
    return jnp.repeat(a, v.shape[2] // a.shape[2], axis=2)


def _to_key_heads(a: Float[Array, "n b hv ..."], q: Float[Array, "b t hk dk"]) -> Float[Array, "n b hk ..."]:
    """Sums over the value heads that read the same key head."""
    n, batch, value_heads, *rest = a.shape
    key_heads = q.shape[2]
    a = a.reshape(n, batch, key_heads, value_heads // key_heads, *rest)
    return functools.reduce(operator.add, (a[:, :, :, r] for r in range(a.shape[3])))


def _cut(a: Float[Array, "b t h d"], chunk: int) -> Float[Array, "n b h c d"]:
    batch, time, heads, size = a.shape
    count = -(-time // chunk)
    a = jnp.pad(a, ((0, 0), (0, count * chunk - time), (0, 0), (0, 0)))
    return a.reshape(batch, count, chunk, heads, size).transpose(1, 0, 3, 2, 4)


def _join(a: Float[Array, "n b h c d"], shape: tuple[int, ...]) -> Float[Array, "b t h d"]:
    count, batch, heads, chunk, size = a.shape
    return a.transpose(1, 0, 3, 2, 4).reshape(batch, count * chunk, heads, size)[:, : shape[1]]
