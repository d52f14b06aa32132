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
positive number is ever exponentiated: the masked half of D is exp(0), set to zero. The system is solved by forward
substitution, which is stable where a power series in A is not (equal keys with beta = 1 make A a triangle of ones).

The backward pass keeps only the inputs: it recomputes the states at the starts of the chunks, then takes the chunks from last
to first. All arithmetic is float32. Shapes: q, k (batch, time, key heads, dk); v (batch, time, value heads, dv); g, beta (batch,
time, value heads). Value head j reads key head j // (value heads / key heads).
"""

from __future__ import annotations

import functools
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
    """The outputs o, chunk by chunk."""

    def step(state: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        o, state = _chunk(state, *xs, config=config)
        return state, o.astype(v.dtype)

    _, o = lax.scan(step, _zero_state(q, v), _chunks(config.chunk, q, k, v, g, beta))
    return _unchunk(o, v.shape)


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
    """dq, dk, dv, dg, dbeta: the states at the chunks' starts, then each chunk's gradient from the last to the first."""
    xs = _chunks(config.chunk, q, k, v, g, beta)

    def advance(state: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        return _chunk(state, *xs, config=config)[1], state

    def step(dstate: Array, xs: tuple[Array, tuple[Array, ...], Array]) -> tuple[Array, tuple[Array, ...]]:
        state, inputs, do = xs
        _, vjp = jax.vjp(functools.partial(_chunk, config=config), state, *inputs)
        dstate, *grads = vjp((do.astype(jnp.float32), dstate))
        return dstate, tuple(grads)

    zero = _zero_state(q, v)
    _, states = lax.scan(advance, zero, xs)
    _, grads = lax.scan(step, zero, (states, xs, _chunks(config.chunk, do)[0]), reverse=True)
    dq, dk, dv, dg, dbeta = (_unchunk(d, a.shape) for d, a in zip(grads, (q, k, v, g, beta), strict=True))
    return dq, dk, dv, dg, dbeta


def _chunk(
    state: Float[Array, "b hk r dk dv"],
    q: Float[Array, "b c hk dk"],
    k: Float[Array, "b c hk dk"],
    v: Float[Array, "b c hv dv"],
    g: Float[Array, "b c hv"],
    beta: Float[Array, "b c hv"],
    *,
    config: _Config,
) -> tuple[Float[Array, "b c hv dv"], Float[Array, "b hk r dk dv"]]:
    """One chunk's outputs in float32 and the state after it; r value heads share a key head."""
    batch, chunk, key_heads, _ = q.shape
    heads, size = v.shape[2:]
    repeats = heads // key_heads
    # Reduced precision of the products would be amplified by the recurrence, so float32 operands get float32 products.
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT
    product = functools.partial(jnp.einsum, precision=precision)

    q, k = (_l2norm(x.astype(jnp.float32), config.l2norm_eps).transpose(0, 2, 1, 3) for x in (q, k))
    v = v.astype(jnp.float32).reshape(batch, chunk, key_heads, repeats, size).transpose(0, 2, 3, 1, 4)
    g, beta = (x.reshape(batch, chunk, key_heads, repeats).transpose(0, 2, 3, 1) for x in (g, beta))

    decay = _pairwise_decay(g)
    since_start = jnp.exp(jnp.cumsum(g, axis=-1))[..., None]
    to_end = decay[..., -1, :, None]

    overlap = product("bhik,bhjk->bhij", k, k)[:, :, None]
    recalled = since_start * product("bhik,bhrkv->bhriv", k, state)
    writes = _solve(jnp.tril(beta[..., None] * decay * overlap, -1), beta[..., None] * (v - recalled))

    scores = decay * product("bhik,bhjk->bhij", q, k)[:, :, None]
    o = since_start * product("bhik,bhrkv->bhriv", q, state) + product("bhrij,bhrjv->bhriv", scores, writes)
    state = since_start[..., -1:, :] * state + product("bhjk,bhrjv->bhrkv", k, to_end * writes)
    return config.scale * o.transpose(0, 3, 1, 2, 4).reshape(batch, chunk, heads, size), state


def _pairwise_decay(g: Float[Array, "*heads c"]) -> Float[Array, "*heads c c"]:
    """Element (i, j) is exp(sum of g_m for j < m <= i), and 0 for j > i: each sum is formed from its own gates."""
    chunk = g.shape[-1]
    steps = lax.iota(jnp.int32, chunk)
    after = steps[:, None] > steps[None, :]
    gates = jnp.where(after, g[..., :, None], 0.0)
    return jnp.where(steps[:, None] >= steps[None, :], jnp.exp(jnp.cumsum(gates, axis=-2)), 0.0)


@jax.custom_vjp
def _solve(lower: Float[Array, "*heads c c"], right: Float[Array, "*heads c v"]) -> Float[Array, "*heads c v"]:
    """x with ``(I + lower) x = right`` for a strictly lower triangular matrix, row after row."""

    def row(i: Array, x: Array) -> Array:
        known = jnp.einsum("...j,...jv->...v", _row(lower, i), x, precision=lax.Precision.HIGHEST)
        return lax.dynamic_update_index_in_dim(x, _row(right, i) - known, i, x.ndim - 2)

    return lax.fori_loop(0, right.shape[-2], row, jnp.zeros_like(right))


def _row(a: Float[Array, "*heads c v"], i: Array) -> Float[Array, "*heads v"]:
    return lax.dynamic_index_in_dim(a, i, a.ndim - 2, keepdims=False)


def _solve_fwd(lower: Array, right: Array) -> tuple[Array, tuple[Array, Array]]:
    x = _solve(lower, right)
    return x, (lower, x)


def _solve_bwd(saved: tuple[Array, Array], dx: Array) -> tuple[Array, Array]:
    # The transposed system is upper triangular: with rows and columns reversed it is lower triangular again.
    lower, x = saved
    dright = _solve(jnp.swapaxes(lower, -1, -2)[..., ::-1, ::-1], dx[..., ::-1, :])[..., ::-1, :]
    return -jnp.einsum("...iv,...jv->...ij", dright, x, precision=lax.Precision.HIGHEST), dright


_solve.defvjp(_solve_fwd, _solve_bwd)


def _l2norm(x: Float[Array, "*rows d"], eps: float | None) -> Float[Array, "*rows d"]:
    return x if eps is None else x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


def _zero_state(q: Float[Array, "b t hk dk"], v: Float[Array, "b t hv dv"]) -> Float[Array, "b hk r dk dv"]:
    batch, _, key_heads, size = q.shape
    return jnp.zeros_like(v, shape=(batch, key_heads, v.shape[2] // key_heads, size, v.shape[3]), dtype=jnp.float32)


def _chunks(chunk: int, *arrays: Float[Array, "b t ..."]) -> tuple[Float[Array, "n b c ..."], ...]:
    """Cuts time into chunks, the last filled with zeros: a step of zeros has no decay and writes nothing."""

    def cut(a: Array) -> Array:
        batch, time = a.shape[:2]
        count = -(-time // chunk)
        a = jnp.pad(a, ((0, 0), (0, count * chunk - time)) + ((0, 0),) * (a.ndim - 2))
        return jnp.moveaxis(a.reshape(batch, count, chunk, *a.shape[2:]), 1, 0)

    return tuple(cut(a) for a in arrays)


def _unchunk(a: Float[Array, "n b c ..."], shape: tuple[int, ...]) -> Float[Array, "b t ..."]:
    count, batch, chunk = a.shape[:3]
    return jnp.moveaxis(a, 0, 1).reshape(batch, count * chunk, *a.shape[3:])[:, : shape[1]]
