"""Softmax attention, with several query heads to a key head, and its backward in two passes.

    s_ij = scale * q_i . k_j           lse_i = log sum over j of exp(s_ij)
    p_ij = exp(s_ij - lse_i)           o_i = sum over j of p_ij v_j

over the keys j that row i sees (:mod:`jaxarena.ops.attention_blocks`): causal, in a window, of its segment. With a ``softcap`` c, scores
are ``c tanh(s / c)``. A row that sees no key has o = 0 and lse = -inf. Neither scores nor probabilities ever exist as a whole: the
forward takes a block of query rows through the blocks of keys with a running maximum and sum (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022) and keeps one number a row, lse. The backward recomputes p
from it. With the row terms D_i = do_i . o_i - dlse_i, where do_i . o_i equals the sum over j of p_ij dp_ij,

    dp_ij = do_i . v_j        ds_ij = p_ij (dp_ij - D_i), times 1 - (s_ij / c)^2 under a softcap
    key pass:    dv_j = sum over i of p_ij do_i,   dk_j = scale * sum over i of ds_ij q_i
    query pass:  dq_i = scale * sum over j of ds_ij k_j

Each pass owns what it writes and sums in the order of the blocks, so gradients repeat bit for bit with no atomics.

Products take the operands' dtype (p and ds are rounded to it) and sum in float32; the softmax is float32. Shapes: q (batch, queries,
heads, d); k (batch, keys, key heads, d); v (batch, keys, key heads, dv); o (batch, queries, heads, dv); lse and D (batch, heads,
queries). Query head h reads key head h // (heads / key heads).
"""

from __future__ import annotations

import functools
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxarena.ops.attention_blocks import Mask, Rules, blocks, filled, key_block_of, key_blocks, over_blocks, product, row_vector, rows
from jaxarena.ops.attention_forward import capped, forward_blocks, forward_by_sequence
from jaxarena.ops.checks import (
    check_choice,
    check_finite,
    check_float,
    check_int,
    check_ndim,
    check_positive_int,
    check_same_dtype,
    check_shape,
    vary_together,
)
from jaxarena.ops.interface import launch

__all__ = ["attention"]


class _Options(TypedDict, total=False):
    """The options that do not change what :func:`attention` returns, for its overloads."""

    causal: bool
    scale: float | None
    window: int | None
    softcap: float | None
    segment_ids: Array | tuple[Array, Array] | None
    lengths: Array | None
    query_lengths: Array | None


@overload
def attention(q: Array, k: Array, v: Array, *, return_lse: Literal[False] = False, **options: Unpack[_Options]) -> Array: ...


@overload
def attention(q: Array, k: Array, v: Array, *, return_lse: Literal[True], **options: Unpack[_Options]) -> tuple[Array, Array]: ...


def attention(
    q: Float[Array, "b tq h d"],
    k: Float[Array, "b tk g d"],
    v: Float[Array, "b tk g dv"],
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    segment_ids: Int[Array, "b t"] | tuple[Int[Array, "b tq"], Int[Array, "b tk"]] | None = None,
    lengths: Int[Array, " b"] | None = None,
    query_lengths: Int[Array, " b"] | None = None,
    return_lse: bool = False,
) -> Float[Array, "b tq h dv"] | tuple[Float[Array, "b tq h dv"], Float[Array, "b h tq"]]:
    """Attends every query to the keys of its sequence that it sees.

    With ``lengths``, a sequence's result has the same bits in any batch with as many key rows, and alone. What lies in ``k`` and ``v`` past
    a sequence's length changes nothing, whatever it is.

    Args:
      q: (batch, queries, heads, d), bfloat16 or float32; any d from 1 up.
      k: (batch, keys, key heads, d) in the dtype of ``q``; the heads are a multiple of the key heads.
      v: (batch, keys, key heads, dv) in the dtype of ``q``; any dv from 1 up.
      causal: whether a row sees only the keys up to its own. With fewer queries than keys the queries are the last rows (bottom-right
        aligned), as in decoding.
      scale: multiplies the scores; ``d ** -0.5`` if None.
      window: with ``causal``, a row sees only so many keys, its own included.
      softcap: bounds the scaled scores smoothly.
      segment_ids: int32, for packed sequences: a row sees only keys with its own id. One array for as many queries as keys, else a
        pair for queries and keys.
      lengths: int32 [batch]: how many of the keys each sequence has, as in a cache; the queries are the last of them. Below 0 counts as
        0, above the keys as all of them. No gradient.
      query_lengths: int32 [batch], with ``lengths``: how many of the query rows each sequence has, the first ones; the last of these is
        at its last key. The other rows see no key.
      return_lse: whether to return lse too, with its gradient.

    Returns:
      (batch, queries, heads, dv) in the dtype of ``q``; with ``return_lse`` also lse, float32 (batch, heads, queries). A row that sees no
      key is 0, its lse -inf.

    Raises:
      TypeError: a dtype is not supported.
      ValueError: shapes do not fit together, the heads are no multiple of the key heads, there are more queries than keys under
        ``causal``, or an option is out of its range.
    """
    hints, rules = prepare(
        "attention", q, k, v, causal=causal, scale=scale, window=window, softcap=softcap, segment_ids=segment_ids, lengths=lengths,
        query_lengths=query_lengths
    )  # fmt: skip
    return attend_arrays(q, k, v, hints, rules, return_lse=return_lse)


def prepare(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    segment_ids: Any = None,
    lengths: Any = None,
    query_lengths: Any = None,
) -> tuple[list[Array], Rules]:
    """Checks the arguments of an attention; ``k`` and ``v`` may be ``jax.ShapeDtypeStruct``. Returns the integer arrays that say who sees
    whom, in the order that :class:`Mask` takes them, and the rules."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_float(op, name, array)
        check_ndim(op, name, array, "batch time heads size")
        check_same_dtype(op, name, array, "q", q)
    batch, queries, heads, size = q.shape
    keys, key_heads = k.shape[1:3]
    check_choice(op, "causal", causal, (True, False))
    if causal and queries > keys:
        raise ValueError(f"{op}: q must have at most as many rows as k when causal, got {queries} queries and {keys} keys")
    if min(heads, key_heads) < 1 or heads % key_heads:
        raise ValueError(f"{op}: q must have a multiple of k's heads, got {heads} query heads and {key_heads} key heads")
    if size < 1 or v.shape[3] < 1:
        raise ValueError(f"{op}: heads must have at least 1 element, got {size} for q and {v.shape[3]} for v")
    check_shape(op, "k", k, (batch, keys, key_heads, size), "batch and size of q")
    check_shape(op, "v", v, (batch, keys, key_heads, v.shape[3]), "batch, time and heads of k")
    scale = size**-0.5 if scale is None else scale
    check_finite(op, "scale", scale)
    if window is not None:
        check_positive_int(op, "window", window)
        if not causal:
            raise ValueError(f"{op}: window must be None unless causal, got {window}")
    if softcap is not None:
        check_finite(op, "softcap", softcap)
        if softcap <= 0:
            raise ValueError(f"{op}: softcap must be positive, got {softcap}")
    if query_lengths is not None and lengths is None:
        raise ValueError(f"{op}: query_lengths must be None unless lengths are given, got shape {tuple(query_lengths.shape)}")
    hints = []
    for name, array in (("lengths", lengths), ("query_lengths", query_lengths)):
        if array is not None:
            check_int(op, name, array)
            check_shape(op, name, array, (batch,), "the batch of q")
            hints.append(array)
    if segment_ids is not None:
        pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        if len(pair) != 2:
            raise ValueError(f"{op}: segment_ids must be one array or a pair for queries and keys, got {len(pair)} arrays")
        for ids, time, what in zip(pair, (queries, keys), ("queries", "keys"), strict=True):
            check_int(op, "segment_ids", ids)
            check_shape(op, "segment_ids", ids, (batch, time), f"batch and {what}")
            hints.append(ids)
    given = {"lengths": lengths is not None, "query_lengths": query_lengths is not None, "segments": segment_ids is not None}
    return hints, Rules(bool(causal), float(scale), window, None if softcap is None else float(softcap), **given)


def attend_arrays(q: Array, k: Array, v: Array, hints: list[Array], rules: Rules, *, return_lse: bool) -> Any:
    """The differentiable attention of checked arguments."""
    o, lse = _attention(*vary_together(q, k, v, tuple(hints)), rules, return_lse)
    return (o, lse) if return_lse else o


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(q: Array, k: Array, v: Array, hints: tuple[Array, ...], rules: Rules, with_lse: bool) -> tuple[Array, Array | None]:
    """o, and lse or None: a result that is not asked for has no gradient of zeros to be read."""
    return _fwd(q, k, v, hints, rules, with_lse)[0]


def _fwd(
    q: Array, k: Array, v: Array, hints: tuple[Array, ...], rules: Rules, with_lse: bool
) -> tuple[tuple[Array, Array | None], tuple[Any, ...]]:
    o, lse = attention_forward(q, k, v, *hints, rules=rules)
    return (o, lse if with_lse else None), (q, k, v, hints, o, lse)


def _bwd(rules: Rules, with_lse: bool, saved: tuple[Any, ...], gradients: tuple[Array, Array | None]) -> tuple[Any, ...]:
    q, k, v, hints, o, lse = saved
    do, dlse = gradients
    terms = attention_row_terms(do, o) if dlse is None else attention_row_terms_lse(do, o, dlse)
    dk, dv = attention_key_pass(q, k, v, do, lse, terms, *hints, rules=rules)
    dq = attention_query_pass(q, k, v, do, lse, terms, *hints, rules=rules)
    return dq, dk, dv, None


_attention.defvjp(_fwd, _bwd)


@launch("attention_forward", row_ndim=(2, 0))
def attention_forward(
    q: Float[Array, "b tq h d"], k: Float[Array, "b tk g d"], v: Float[Array, "b tk g dv"], *hints: Int[Array, "*_shape"], rules: Rules
) -> tuple[Float[Array, "b tq h dv"], Float[Array, "b h tq"]]:
    """o and lse, a block of query rows at a time."""
    keys, key_heads = k.shape[1:3]
    if rules.lengths and keys:

        def fetch(sequence: Array, j: Array) -> tuple[Array, Array]:
            return key_block_of(k, (sequence,), j), key_block_of(v, (sequence,), j)

        return forward_by_sequence(q, fetch, hints, rules, keys=keys, key_heads=key_heads, value_size=v.shape[3])
    mask = Mask(rules, q.shape[1], keys, hints)
    by_key, by_value = key_blocks(k), key_blocks(v)
    o, lse = forward_blocks(blocks(q, key_heads), lambda j: (by_key[j], by_value[j]), v.shape[3], mask)
    return rows(o, q.shape[1]), row_vector(lse, q.shape[1])


@launch("attention_row_terms", row_ndim=0)
def attention_row_terms(do: Float[Array, "b t h dv"], o: Float[Array, "b t h dv"]) -> Float[Array, "b h t"]:
    """D: the product of every row of the result with its gradient, in float32."""
    return jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), axis=-1).transpose(0, 2, 1)


@launch("attention_row_terms_lse", row_ndim=0)
def attention_row_terms_lse(
    do: Float[Array, "b t h dv"], o: Float[Array, "b t h dv"], dlse: Float[Array, "b h t"]
) -> Float[Array, "b h t"]:
    """D where lse has a gradient too."""
    return attention_row_terms.reference(do, o) - dlse


@launch("attention_key_pass", row_ndim=2)
def attention_key_pass(
    q: Float[Array, "b tq h d"],
    k: Float[Array, "b tk g d"],
    v: Float[Array, "b tk g dv"],
    do: Float[Array, "b tq h dv"],
    lse: Float[Array, "b h tq"],
    terms: Float[Array, "b h tq"],
    *hints: Int[Array, "*_shape"],
    rules: Rules,
) -> tuple[Float[Array, "b tk g d"], Float[Array, "b tk g dv"]]:
    """dk and dv, a block of keys at a time, summed over the blocks of queries and the query heads of each key head."""
    key_heads = k.shape[2]
    mask = Mask(rules, q.shape[1], k.shape[1], hints)
    # The queries of all heads that share a key head make one axis, which dk and dv sum over.
    repeats = q.shape[2] // key_heads
    side = tuple(a.reshape(*a.shape[:3], repeats * a.shape[4], *a.shape[5:]) for a in _query_side(q, do, lse, terms, key_heads))

    def key_block(j: Array, k: Array, v: Array) -> tuple[Array, Array]:
        k, v = mask.existing(j, k), mask.existing(j, v)

        def row_block(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            dk, dv = carry
            q, do, lse, terms = (a[i] for a in side)
            # Keys by queries: the products that sum over queries then read p and ds as they lie.
            seen = jnp.swapaxes(mask.seen(i, j), -1, -2)
            seen = jnp.tile(seen if seen.ndim == 2 else seen[:, :, 0], (1,) * (min(seen.ndim, 4) - 1) + (repeats,))
            s = capped(product("bgkd,bgqd->bgkq", k, q), rules)
            p = jnp.exp(jnp.where(seen, s, -jnp.inf) - lse[:, :, None])
            ds = _uncapped(p * (product("bgkv,bgqv->bgkq", v, do) - terms[:, :, None]), s, rules)
            dk = dk + product("bgkq,bgqd->bgkd", ds.astype(q.dtype), q)
            return dk, dv + product("bgkq,bgqd->bgkd", p.astype(do.dtype), do)

        dk, dv = lax.fori_loop(*mask.queries_of(j), row_block, (filled(k, k.shape), filled(v, v.shape)))
        return (rules.scale * dk).astype(k.dtype), dv.astype(v.dtype)

    dk, dv = over_blocks(key_block, key_blocks(k), key_blocks(v))
    return rows(dk[:, :, :, None], k.shape[1]), rows(dv[:, :, :, None], k.shape[1])


@launch("attention_query_pass", row_ndim=2)
def attention_query_pass(
    q: Float[Array, "b tq h d"],
    k: Float[Array, "b tk g d"],
    v: Float[Array, "b tk g dv"],
    do: Float[Array, "b tq h dv"],
    lse: Float[Array, "b h tq"],
    terms: Float[Array, "b h tq"],
    *hints: Int[Array, "*_shape"],
    rules: Rules,
) -> Float[Array, "b tq h d"]:
    """dq, a block of query rows at a time."""
    mask = Mask(rules, q.shape[1], k.shape[1], hints)
    keys, values = key_blocks(k), key_blocks(v)

    def row_block(i: Array, q: Array, do: Array, lse: Array, terms: Array) -> Array:
        def key_block(j: Array, dq: Array) -> Array:
            k, v = mask.existing(j, keys[j]), mask.existing(j, values[j])
            s = capped(product("bgrqd,bgkd->bgrqk", q, k), rules)
            p = jnp.exp(jnp.where(mask.seen(i, j), s, -jnp.inf) - lse[..., None])
            ds = _uncapped(p * (product("bgrqv,bgkv->bgrqk", do, v) - terms[..., None]), s, rules)
            return dq + product("bgrqk,bgkd->bgrqd", ds.astype(k.dtype), k)

        dq = lax.fori_loop(*mask.keys_of(i), key_block, filled(q, q.shape))
        return (rules.scale * dq).astype(q.dtype)

    return rows(over_blocks(row_block, *_query_side(q, do, lse, terms, k.shape[2])), q.shape[1])


def _uncapped(ds: Array, s: Array, rules: Rules) -> Array:
    """The gradient of the scaled products, of that of the scores ``s``."""
    return ds if rules.softcap is None else ds * (1 - (s / rules.softcap) ** 2)


def _query_side(q: Array, do: Array, lse: Array, terms: Array, key_heads: int) -> tuple[Array, Array, Array, Array]:
    """The blocks of what belongs to query rows. Rows past the end, and rows that see nothing, get lse = inf: probabilities of 0."""
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)
    lse, terms = (blocks(a.transpose(0, 2, 1)[..., None], key_heads, fill)[..., 0] for a, fill in ((lse, jnp.inf), (terms, 0.0)))
    return blocks(q, key_heads), blocks(do, key_heads), lse, terms
