"""Softmax attention, causal or full, with several query heads to a key head, and its backward in two passes.

    s_ij = scale * q_i . k_j           lse_i = log sum over j of exp(s_ij)
    p_ij = exp(s_ij - lse_i)           o_i = sum over j of p_ij v_j

over the keys j that row i sees: all, or j <= i if causal. Neither scores nor probabilities ever exist as a whole: the forward
takes a block of query rows through the blocks of keys with a running maximum and sum (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018; Dao et al., "FlashAttention", 2022) and keeps one number a row, lse. The backward recomputes p from
it. With the row terms D_i = do_i . o_i, which equal the sum over j of p_ij dp_ij,

    dp_ij = do_i . v_j        ds_ij = p_ij (dp_ij - D_i)
    key pass:    dv_j = sum over i of p_ij do_i,   dk_j = scale * sum over i of ds_ij q_i
    query pass:  dq_i = scale * sum over j of ds_ij k_j

Each pass owns what it writes and sums in the order of the blocks, so gradients repeat bit for bit with no atomics.

Products take the operands' dtype (p and ds are rounded to it) and sum in float32; the softmax is float32. Shapes: q (batch, time,
heads, d); k (batch, time, key heads, d); v (batch, time, key heads, dv); o (batch, time, heads, dv); lse and D (batch, heads,
time). Query head h reads key head h // (heads / key heads).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxarena.ops.checks import check_choice, check_finite, check_float, check_ndim, check_same_dtype, check_shape, vary_together
from jaxarena.ops.interface import launch

__all__ = ["attention"]

_OP = "attention"
_BLOCK = 128


def attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b t g d"],
    v: Float[Array, "b t g dv"],
    *,
    causal: bool = True,
    scale: float | None = None,
) -> Float[Array, "b t h dv"]:
    """Attends every query to the keys of its sequence.

    Args:
      q: (batch, time, heads, d), bfloat16 or float32; any d from 1 up.
      k: (batch, time, key heads, d) in the dtype of ``q``; the heads are a multiple of the key heads.
      v: (batch, time, key heads, dv) in the dtype of ``q``; any dv from 1 up.
      causal: whether row i sees the keys 0 to i only.
      scale: multiplies the scores; ``d ** -0.5`` if None.

    Returns:
      (batch, time, heads, dv) in the dtype of ``q``.

    Raises:
      TypeError: a dtype is not supported.
      ValueError: shapes do not fit together, the heads are no multiple of the key heads, or q and k differ in time.
    """
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_float(_OP, name, array)
        check_ndim(_OP, name, array, "batch time heads size")
        check_same_dtype(_OP, name, array, "q", q)
    batch, time, heads, size = q.shape
    key_heads = k.shape[2]
    if k.shape[1] != time:
        raise ValueError(f"{_OP}: k must have the time of q (a continuation is not supported), got {k.shape[1]} keys and {time} queries")
    if min(heads, key_heads) < 1 or heads % key_heads:
        raise ValueError(f"{_OP}: q must have a multiple of k's heads, got {heads} query heads and {key_heads} key heads")
    if size < 1 or v.shape[3] < 1:
        raise ValueError(f"{_OP}: heads must have at least 1 element, got {size} for q and {v.shape[3]} for v")
    check_shape(_OP, "k", k, (batch, time, key_heads, size), "batch, time and size of q")
    check_shape(_OP, "v", v, (batch, time, key_heads, v.shape[3]), "batch, time and heads of k")
    scale = size**-0.5 if scale is None else scale
    check_finite(_OP, "scale", scale)
    check_choice(_OP, "causal", causal, (True, False))
    return _attention(*vary_together(q, k, v), bool(causal), float(scale))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attention(q: Array, k: Array, v: Array, causal: bool, scale: float) -> Array:
    return attention_forward(q, k, v, causal=causal, scale=scale)[0]


def _fwd(q: Array, k: Array, v: Array, causal: bool, scale: float) -> tuple[Array, tuple[Array, ...]]:
    o, lse = attention_forward(q, k, v, causal=causal, scale=scale)
    return o, (q, k, v, o, lse)


def _bwd(causal: bool, scale: float, saved: tuple[Array, ...], do: Array) -> tuple[Array, Array, Array]:
    q, k, v, o, lse = saved
    terms = attention_row_terms(do, o)
    dk, dv = attention_key_pass(q, k, v, do, lse, terms, causal=causal, scale=scale)
    return attention_query_pass(q, k, v, do, lse, terms, causal=causal, scale=scale), dk, dv


_attention.defvjp(_fwd, _bwd)


@launch("attention_forward", row_ndim=(2, 0))
def attention_forward(
    q: Float[Array, "b t h d"], k: Float[Array, "b t g d"], v: Float[Array, "b t g dv"], *, causal: bool, scale: float
) -> tuple[Float[Array, "b t h dv"], Float[Array, "b h t"]]:
    """o and lse, a block of query rows at a time."""
    time, key_heads = q.shape[1], k.shape[2]
    queries, keys, values = _blocks(q, key_heads), _key_blocks(k), _key_blocks(v)
    count = queries.shape[0]

    def row_block(i: Array, q: Array) -> tuple[Array, Array]:
        def key_block(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, o = carry
            s = _scores(q, keys[j], i, j, time=time, causal=causal, scale=scale)
            new_top = jnp.maximum(top, jnp.max(s, axis=-1))
            p, shrink = jnp.exp(s - new_top[..., None]), jnp.exp(top - new_top)
            total = shrink * total + jnp.sum(p, axis=-1)
            return new_top, total, shrink[..., None] * o + _product("bgrqk,bgkv->bgrqv", p.astype(v.dtype), values[j])

        rows = q.shape[:-1]
        start = (_filled(q, rows, -jnp.inf), _filled(q, rows), _filled(q, (*rows, v.shape[-1])))
        top, total, o = lax.fori_loop(0, i + 1 if causal else count, key_block, start)
        return (o / total[..., None]).astype(q.dtype), top + jnp.log(total)

    o, lse = _over_blocks(row_block, queries)
    return _rows(o, time), _row_vector(lse, time)


@launch("attention_row_terms", row_ndim=0)
def attention_row_terms(do: Float[Array, "b t h dv"], o: Float[Array, "b t h dv"]) -> Float[Array, "b h t"]:
    """D: the product of every row of the result with its gradient, in float32."""
    return jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), axis=-1).transpose(0, 2, 1)


@launch("attention_key_pass", row_ndim=2)
def attention_key_pass(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b t g d"],
    v: Float[Array, "b t g dv"],
    do: Float[Array, "b t h dv"],
    lse: Float[Array, "b h t"],
    terms: Float[Array, "b h t"],
    *,
    causal: bool,
    scale: float,
) -> tuple[Float[Array, "b t g d"], Float[Array, "b t g dv"]]:
    """dk and dv, a block of keys at a time, summed over the blocks of queries and the query heads of each key head."""
    time, key_heads = q.shape[1], k.shape[2]
    # The queries of all heads that share a key head make one axis, which dk and dv sum over.
    repeats = q.shape[2] // key_heads
    rows = tuple(a.reshape(*a.shape[:3], repeats * a.shape[4], *a.shape[5:]) for a in _query_side(q, do, lse, terms, key_heads))
    count = rows[0].shape[0]

    def key_block(j: Array, k: Array, v: Array) -> tuple[Array, Array]:
        def row_block(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            dk, dv = carry
            q, do, lse, terms = (a[i] for a in rows)
            # Keys by queries: the products that sum over queries then read p and ds as they lie.
            seen = jnp.tile(_seen(i, j, k.shape[2], time=time, causal=causal).T, (1, repeats))
            s = jnp.where(seen, scale * _product("bgkd,bgqd->bgkq", k, q), -jnp.inf)
            p = jnp.exp(s - lse[:, :, None])
            ds = p * (_product("bgkv,bgqv->bgkq", v, do) - terms[:, :, None])
            dk = dk + _product("bgkq,bgqd->bgkd", ds.astype(q.dtype), q)
            return dk, dv + _product("bgkq,bgqd->bgkd", p.astype(do.dtype), do)

        dk, dv = lax.fori_loop(j if causal else 0, count, row_block, (_filled(k, k.shape), _filled(v, v.shape)))
        return (scale * dk).astype(k.dtype), dv.astype(v.dtype)

    dk, dv = _over_blocks(key_block, _key_blocks(k), _key_blocks(v))
    return _rows(dk[:, :, :, None], time), _rows(dv[:, :, :, None], time)


@launch("attention_query_pass", row_ndim=2)
def attention_query_pass(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b t g d"],
    v: Float[Array, "b t g dv"],
    do: Float[Array, "b t h dv"],
    lse: Float[Array, "b h t"],
    terms: Float[Array, "b h t"],
    *,
    causal: bool,
    scale: float,
) -> Float[Array, "b t h d"]:
    """dq, a block of query rows at a time."""
    time, key_heads = q.shape[1], k.shape[2]
    keys, values = _key_blocks(k), _key_blocks(v)
    count = keys.shape[0]

    def row_block(i: Array, q: Array, do: Array, lse: Array, terms: Array) -> Array:
        def key_block(j: Array, dq: Array) -> Array:
            p = jnp.exp(_scores(q, keys[j], i, j, time=time, causal=causal, scale=scale) - lse[..., None])
            ds = p * (_product("bgrqv,bgkv->bgrqk", do, values[j]) - terms[..., None])
            return dq + _product("bgrqk,bgkd->bgrqd", ds.astype(k.dtype), keys[j])

        dq = lax.fori_loop(0, i + 1 if causal else count, key_block, _filled(q, q.shape))
        return (scale * dq).astype(q.dtype)

    return _rows(_over_blocks(row_block, *_query_side(q, do, lse, terms, key_heads)), time)


def _scores(
    q: Float[Array, "b g r i d"], k: Float[Array, "b g j d"], row: Array, column: Array, *, time: int, causal: bool, scale: float
) -> Float[Array, "b g r i j"]:
    """Scores of a query block against a key block, -inf where a row does not see a key."""
    s = scale * _product("bgrqd,bgkd->bgrqk", q, k)
    return jnp.where(_seen(row, column, k.shape[2], time=time, causal=causal), s, -jnp.inf)


def _seen(row: Array, column: Array, block: int, *, time: int, causal: bool) -> Bool[Array, "i j"]:
    """Which queries of block ``row`` see which keys of block ``column``."""
    query = row * block + lax.broadcasted_iota(jnp.int32, (block, block), 0)
    key = column * block + lax.broadcasted_iota(jnp.int32, (block, block), 1)
    return key <= query if causal else key < time


def _product(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _query_side(q: Array, do: Array, lse: Array, terms: Array, key_heads: int) -> tuple[Array, Array, Array, Array]:
    """The blocks of what belongs to query rows. Rows past the end get lse = inf, so that their probabilities are 0."""
    lse, terms = (_blocks(a.transpose(0, 2, 1)[..., None], key_heads, fill)[..., 0] for a, fill in ((lse, jnp.inf), (terms, 0.0)))
    return _blocks(q, key_heads), _blocks(do, key_heads), lse, terms


def _filled(like: Array, shape: tuple[int, ...], value: float = 0.0) -> Array:
    """A float32 array to sum into, which varies over the same mesh axes as ``like``."""
    return jnp.full_like(like, value, shape=shape, dtype=jnp.float32)


def _blocks(a: Float[Array, "b t h d"], key_heads: int, fill: float = 0.0) -> Float[Array, "n b g r block d"]:
    """Cuts time into blocks, the last filled up, and the heads into key heads and the r heads that share each."""
    batch, time, heads, size = a.shape
    block = min(_BLOCK, max(time, 1))
    count = max(-(-time // block), 1)
    a = jnp.pad(a, ((0, 0), (0, count * block - time), (0, 0), (0, 0)), constant_values=fill)
    a = a.reshape(batch, count, block, key_heads, heads // key_heads, size)
    return a.transpose(1, 0, 3, 4, 2, 5)


def _key_blocks(a: Float[Array, "b t g d"]) -> Float[Array, "n b g block d"]:
    return _blocks(a, a.shape[2])[:, :, :, 0]


def _rows(a: Float[Array, "n b g r block d"], time: int) -> Float[Array, "b t h d"]:
    """The inverse of :func:`_blocks`."""
    count, batch, key_heads, repeats, block, size = a.shape
    return a.transpose(1, 0, 4, 2, 3, 5).reshape(batch, count * block, key_heads * repeats, size)[:, :time]


def _row_vector(a: Float[Array, "n b g r block"], time: int) -> Float[Array, "b h t"]:
    return _rows(a[..., None], time)[..., 0].transpose(0, 2, 1)


def _over_blocks(function: Callable[..., Any], *arrays: Array) -> Any:
    """Maps ``function(index, *blocks)`` over the blocks of the arrays, one after another."""
    index = lax.iota(jnp.int32, arrays[0].shape[0])
    return lax.map(lambda xs: function(*xs), (index, *arrays))
