"""The forward of attention: blocks of queries through blocks of keys, with a running maximum m, sum l and result o a row.

    m' = max(m, max over j of s_j)     l' = e^(m - m') l + sum over j of e^(s_j - m')     o' = e^(m - m') o + sum over j of e^(s_j - m') v_j

over the keys j of a block, then o / l and lse = m + log l at the end (Milakov and Gimelshein, 2018; Dao et al., 2022). Where the keys
come from is up to the caller: an array, or a quantized cache that is decoded a block at a time.

With lengths, sequences run one after another (:func:`forward_by_sequence`), each through its own blocks of keys only, which are sliced out
of the keys as they lie. So no work and no copy goes to what lies past a sequence's end, and a sequence's result has the same bits whatever
else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxarena.ops.attention_blocks import Mask, Rules, blocks, filled, over_blocks, product, row_vector, rows

__all__ = ["capped", "forward_blocks", "forward_by_sequence"]


def capped(s: Array, rules: Rules) -> Array:
    """The scores of products of q and k."""
    s = rules.scale * s
    return s if rules.softcap is None else rules.softcap * jnp.tanh(s / rules.softcap)


def forward_blocks(
    queries: Float[Array, "n b g r i d"],
    fetch: Callable[[Array], tuple[Array, Array]],
    value_size: int,
    mask: Mask,
    dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "n b g r i dv"], Float[Array, "n b g r i"]]:
    """o, in ``dtype`` (that of the queries if None), and lse of blocks of queries; ``fetch(j)`` gives block j of the keys [b, g, j, d] and
    of the values [b, g, j, dv]."""
    rules = mask.rules
    guarded = rules.may_see_nothing or not mask.keys

    def row_block(i: Array, q: Array) -> tuple[Array, Array]:
        def key_block(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, o = carry
            k, v = fetch(j)
            s = jnp.where(mask.seen(i, j), capped(product("bgrqd,bgkd->bgrqk", q, k), rules), -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(s, axis=-1))
            # While a row has seen nothing its maximum is -inf, which must not be subtracted from itself.
            base = jnp.where(new_top == -jnp.inf, 0, new_top) if guarded else new_top
            p, shrink = jnp.exp(s - base[..., None]), jnp.exp(top - base)
            total = shrink * total + jnp.sum(p, axis=-1)
            return new_top, total, shrink[..., None] * o + product("bgrqk,bgkv->bgrqv", p.astype(v.dtype), mask.existing(j, v))

        shape = q.shape[:-1]
        start = (filled(q, shape, -jnp.inf), filled(q, shape), filled(q, (*shape, value_size)))
        top, total, o = lax.fori_loop(*mask.keys_of(i), key_block, start)
        share = jnp.where(total == 0, 1, total) if guarded else total
        return (o / share[..., None]).astype(q.dtype if dtype is None else dtype), top + jnp.log(share)

    o, lse = over_blocks(row_block, queries)
    return o, lse


def forward_by_sequence(
    q: Float[Array, "b tq h d"],
    fetch: Callable[[Array, Array], tuple[Array, Array]],
    hints: tuple[Array, ...],
    rules: Rules,
    *,
    keys: int,
    key_heads: int,
    value_size: int,
    dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "b tq h dv"], Float[Array, "b h tq"]]:
    """o and lse where sequences have lengths; ``fetch(sequence, j)`` gives block j of one sequence's keys and values."""
    if not q.shape[0]:
        empty = filled(q, (*q.shape[:3], value_size))
        return empty.astype(q.dtype if dtype is None else dtype), empty[..., 0].swapaxes(1, 2)
    queries = blocks(q, key_heads)

    def sequence(i: Array) -> tuple[Array, Array]:
        own = tuple(lax.dynamic_index_in_dim(hint, i) for hint in hints)
        mask = Mask(rules, q.shape[1], keys, own)
        o, lse = forward_blocks(lax.dynamic_index_in_dim(queries, i, 1), lambda j: fetch(i, j), value_size, mask, dtype)
        return o[:, 0], lse[:, 0]

    o, lse = lax.map(sequence, lax.iota(jnp.int32, q.shape[0]))
    return rows(jnp.swapaxes(o, 0, 1), q.shape[1]), row_vector(jnp.swapaxes(lse, 0, 1), q.shape[1])
