"""The gated delta rule: a linear attention whose state forgets by a gate and is corrected by the error of what it recalls.

For each value head, with a state S of shape (dk, dv), every step t decays, looks at its error, and writes:

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
positive number is ever exponentiated: the masked half of D is exp(0), set to zero. So a gate of -inf is an exact reset, in values and
gradients, and packed sequences are that: the first gate of every segment but the first is -inf. I + A is inverted by halves, which is
forward substitution on blocks and stable where a power series in A is not (equal keys with beta = 1 make A a triangle of ones).

Only the states need the chunks one after another, so they alone are scanned; the rest is products batched over the chunks
(:mod:`jaxarena.ops.delta_chunks`), a few MiB at a time (:mod:`jaxarena.ops.delta_spans`). The backward pass keeps only the inputs. A
few steps from a carried state, as in decoding, run one by one (:mod:`jaxarena.ops.delta_decode`).

All arithmetic is float32. Shapes: q, k (batch, time, key heads, dk); v (batch, time, value heads, dv); g, beta (batch,
time, value heads); states (batch, value heads, dk, dv). Value head j reads key head j // (value heads / key heads).
"""

from __future__ import annotations

import functools
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxarena.ops.checks import (
    check_choice,
    check_finite,
    check_float,
    check_float32,
    check_int,
    check_ndim,
    check_nonnegative,
    check_positive_int,
    check_same_dtype,
    check_same_shape,
    check_shape,
    vary_together,
)
from jaxarena.ops.delta_decode import MAX_STEPS, delta_rule_decode
from jaxarena.ops.delta_spans import Config, Inputs, gradients, outputs
from jaxarena.ops.interface import launch

__all__ = ["gated_delta_rule"]

_OP = "gated_delta_rule"


class _Options(TypedDict, total=False):
    """The options that do not change what :func:`gated_delta_rule` returns, for its overloads."""

    scale: float | None
    qk_l2norm: bool
    l2norm_eps: float
    chunk_size: int
    initial_state: Array | None
    segment_ids: Array | None


@overload
def gated_delta_rule(
    q: Array, k: Array, v: Array, g: Array | None, beta: Array, *, return_state: Literal[False] = False, **options: Unpack[_Options]
) -> Array: ...


@overload
def gated_delta_rule(
    q: Array, k: Array, v: Array, g: Array | None, beta: Array, *, return_state: Literal[True], **options: Unpack[_Options]
) -> tuple[Array, Array]: ...


def gated_delta_rule(
    q: Float[Array, "b t hk dk"],
    k: Float[Array, "b t hk dk"],
    v: Float[Array, "b t hv dv"],
    g: Float[Array, "b t hv"] | None,
    beta: Float[Array, "b t hv"],
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    l2norm_eps: float = 1e-6,
    chunk_size: int = 64,
    initial_state: Float[Array, "b hv dk dv"] | None = None,
    return_state: bool = False,
    segment_ids: Int[Array, "b t"] | None = None,
) -> Float[Array, "b t hv dv"] | tuple[Float[Array, "b t hv dv"], Float[Array, "b hv dk dv"]]:
    """Runs the gated delta rule over each sequence.

    With a state, given or asked for, up to 16 steps run one by one: each row of the batch then gets the bits it would get alone, and
    under ``jax.jit`` a donated ``initial_state`` is updated in place.

    Args:
      q: queries, (batch, time, key heads, dk), bfloat16 or float32.
      k: keys, as ``q``.
      v: values, (batch, time, value heads, dv), in the dtype of ``q``; the value heads are a multiple of the key heads.
      g: log of the decay, (batch, time, value heads), float32, at most 0; -inf forgets everything before the step. None is a gate of 0:
        the plain delta rule.
      beta: write strength, (batch, time, value heads), float32, usually in [0, 1].
      scale: multiplies the result; ``dk ** -0.5`` if None.
      qk_l2norm: replace every row x of ``q`` and ``k`` by ``x * rsqrt(sum(x**2) + l2norm_eps)``.
      l2norm_eps: see ``qk_l2norm``.
      chunk_size: steps computed together; changes speed, and the result only by rounding.
      initial_state: float32 (batch, value heads, dk, dv), what the sequences go on from; zeros if None.
      return_state: whether to return the state after the last step too, with its gradient.
      segment_ids: int32 (batch, time), for packed sequences: wherever the id changes the state starts from zeros. The initial state is
        the first segment's, the state that is returned the last one's.

    Returns:
      (batch, time, value heads, dv) in the dtype of ``v``; with ``return_state`` also the last state, float32 (batch, value heads, dk,
      dv). The state is float32 throughout.

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
    value_heads, value_size = v.shape[2:]
    check_shape(_OP, "v", v, (batch, time, value_heads, value_size), "batch and time of q")
    if min(key_heads, value_heads) < 1 or value_heads % key_heads:
        raise ValueError(f"{_OP}: v must have a multiple of q's heads, got {value_heads} value heads and {key_heads} key heads")
    check_float32(_OP, "beta", beta)
    check_shape(_OP, "beta", beta, (batch, time, value_heads), "batch, time and heads of v")
    if g is None:
        g = jnp.zeros_like(beta)
    check_float32(_OP, "g", g)
    check_shape(_OP, "g", g, (batch, time, value_heads), "batch, time and heads of v")
    check_positive_int(_OP, "chunk_size", chunk_size)
    check_nonnegative(_OP, "l2norm_eps", l2norm_eps)
    scale = size**-0.5 if scale is None else scale
    check_finite(_OP, "scale", scale)
    check_choice(_OP, "return_state", return_state, (True, False))
    if segment_ids is not None:
        check_int(_OP, "segment_ids", segment_ids)
        check_shape(_OP, "segment_ids", segment_ids, (batch, time), "batch and time of q")
        g = jnp.where(_starts_anew(segment_ids)[..., None], -jnp.inf, g)
    config = Config(float(scale), float(l2norm_eps) if qk_l2norm else None, min(chunk_size, max(time, 1)))
    state_shape = (batch, value_heads, size, value_size)
    if initial_state is not None:
        check_float32(_OP, "initial_state", initial_state)
        check_shape(_OP, "initial_state", initial_state, state_shape, "batch and heads of v, sizes of k and v")
    elif return_state:
        initial_state = jnp.zeros_like(beta, shape=state_shape)
    else:
        return _rule(*vary_together(q, k, v, g, beta), config)
    o, state = _rule_from(*vary_together(q, k, v, g, beta, initial_state), config)
    return (o, state) if return_state else o


def _starts_anew(segment_ids: Int[Array, "b t"]) -> Array:
    """Where a segment begins, but for the first of each sequence."""
    before = jnp.concatenate([segment_ids[:, :1], segment_ids[:, :-1]], axis=1)
    return segment_ids != before


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _rule(q: Array, k: Array, v: Array, g: Array, beta: Array, config: Config) -> Array:
    return gated_delta_rule_forward(q, k, v, g, beta, config=config)


def _rule_fwd(q: Array, k: Array, v: Array, g: Array, beta: Array, config: Config) -> tuple[Array, tuple[Array, ...]]:
    return _rule(q, k, v, g, beta, config), (q, k, v, g, beta)


def _rule_bwd(config: Config, saved: tuple[Array, ...], do: Array) -> tuple[Array, ...]:
    return gated_delta_rule_backward(*saved, do, config=config)


_rule.defvjp(_rule_fwd, _rule_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _rule_from(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, config: Config) -> tuple[Array, Array]:
    run = delta_rule_decode if q.shape[1] <= MAX_STEPS else gated_delta_rule_state_forward
    return run(q, k, v, g, beta, state, config=config)


def _rule_from_fwd(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, config: Config) -> tuple[Any, tuple[Array, ...]]:
    return _rule_from(q, k, v, g, beta, state, config), (q, k, v, g, beta, state)


def _rule_from_bwd(config: Config, saved: tuple[Array, ...], gradients: tuple[Array, Array]) -> tuple[Array, ...]:
    return gated_delta_rule_state_backward(*saved, *gradients, config=config)


_rule_from.defvjp(_rule_from_fwd, _rule_from_bwd)


@launch("gated_delta_rule_forward", row_ndim=2)
def gated_delta_rule_forward(
    q: Float[Array, "b t hk dk"],
    k: Float[Array, "b t hk dk"],
    v: Float[Array, "b t hv dv"],
    g: Float[Array, "b t hv"],
    beta: Float[Array, "b t hv"],
    *,
    config: Config,
) -> Float[Array, "b t hv dv"]:
    """o, from a state of zeros."""
    return outputs(Inputs(q, k, v, g, beta), None, config)[0]


@launch("gated_delta_rule_state_forward", row_ndim=(2, 1))
def gated_delta_rule_state_forward(
    q: Float[Array, "b t hk dk"],
    k: Float[Array, "b t hk dk"],
    v: Float[Array, "b t hv dv"],
    g: Float[Array, "b t hv"],
    beta: Float[Array, "b t hv"],
    state: Float[Array, "b hv dk dv"],
    *,
    config: Config,
) -> tuple[Float[Array, "b t hv dv"], Float[Array, "b hv dk dv"]]:
    """o and the last state, from ``state``."""
    return outputs(Inputs(q, k, v, g, beta), state, config)


@launch("gated_delta_rule_backward", row_ndim=(2, 2, 2, 0, 0))
def gated_delta_rule_backward(
    q: Float[Array, "b t hk dk"],
    k: Float[Array, "b t hk dk"],
    v: Float[Array, "b t hv dv"],
    g: Float[Array, "b t hv"],
    beta: Float[Array, "b t hv"],
    do: Float[Array, "b t hv dv"],
    *,
    config: Config,
) -> tuple[Float[Array, "b t hk dk"], Float[Array, "b t hk dk"], Float[Array, "b t hv dv"], Float[Array, "b t hv"], Float[Array, "b t hv"]]:
    """dq, dk, dv, dg, dbeta."""
    dq, dk, dv, dg, dbeta = gradients(Inputs(q, k, v, g, beta), None, do, None, config)[0]
    return dq, dk, dv, dg, dbeta


@launch("gated_delta_rule_state_backward", row_ndim=(2, 2, 2, 0, 0, 1))
def gated_delta_rule_state_backward(
    q: Float[Array, "b t hk dk"],
    k: Float[Array, "b t hk dk"],
    v: Float[Array, "b t hv dv"],
    g: Float[Array, "b t hv"],
    beta: Float[Array, "b t hv"],
    state: Float[Array, "b hv dk dv"],
    do: Float[Array, "b t hv dv"],
    dstate: Float[Array, "b hv dk dv"],
    *,
    config: Config,
) -> tuple[Array, Array, Array, Array, Array, Float[Array, "b hv dk dv"]]:
    """dq, dk, dv, dg, dbeta and the gradient of the state the sequences went on from; ``dstate`` is that of the last state."""
    d, dstart = gradients(Inputs(q, k, v, g, beta), state, do, dstate, config)
    return *d, dstart
