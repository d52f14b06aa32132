"""Rows grouped by expert: the grouping, and products over the groups.

``n`` tokens each choose ``k`` of ``e`` experts. A stable counting sort puts the ``n * k`` choices in order of their expert, and
every expert's group starts a new block of ``rows`` rows, the rest of its last block being **pads**. So each block belongs to one
expert, nothing is dropped however uneven the choice, and all shapes are static: groups of c_1, ..., c_e rows fill
``sum of ceil(c / rows) <= (n * k + min(e, n * k) * (rows - 1)) // rows`` blocks, those left over holding pads only. A grouped
product then is one product a block with its expert's matrix; no token meets an expert that it did not choose.

A block's rows are gathered where they are used, by the token of each row: the tokens' rows are never written in grouped order.
Pads are gathered as zeros, so that a weight's gradient, which contracts over rows, needs no mask. A token's results are summed over
its choices in the order of the choices, and a weight's gradient over its blocks in the order of the blocks: fixed sums, no atomics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

__all__ = [
    "Groups",
    "block_rows",
    "group_choices",
    "grouped_weight_gradient",
    "over_blocks",
    "over_rows",
    "sum_choices",
    "take_rows",
]


class Groups(NamedTuple):
    """Where the choices lie once they are grouped."""

    source: Int[Array, " padded"]  # the choice (token * k + slot) that each grouped row holds, -1 for a pad
    place: Int[Array, "n k"]  # the grouped row of each choice
    expert: Int[Array, " blocks"]  # the expert of each block; blocks left over belong to the last expert


def block_rows(choices: int, experts: int) -> int:
    """Rows of a block, a power of two: at most 64 and about the mean group, from 8 (what an arena row range starts at).

    A group wastes half a block on average. 128 rows, the tile of two warpgroups, only where that is below a sixteenth.
    """
    mean = max(choices // experts, 1)
    if mean >= 1024:
        return 128
    return min(max(1 << (mean.bit_length() - 1), 8), 64)


def group_choices(choice: Int[Array, "n k"], *, experts: int, rows: int) -> tuple[Groups, Int[Array, " e"]]:
    """Groups choices by expert in blocks of ``rows``; also how many choices fell on each expert."""
    flat = choice.reshape(-1)
    total = flat.shape[0]
    blocks = (total + min(experts, total) * (rows - 1)) // rows
    index = lax.iota(jnp.int32, total)
    sorted_expert, order = lax.sort((flat, index), num_keys=1, is_stable=True)

    every = lax.iota(jnp.int32, experts)
    starts = jnp.searchsorted(sorted_expert, every, side="left").astype(jnp.int32)
    counts = jnp.searchsorted(sorted_expert, every, side="right").astype(jnp.int32) - starts
    group_blocks = (counts + rows - 1) // rows
    block_ends = jnp.cumsum(group_blocks, dtype=jnp.int32)
    padded_starts = (block_ends - group_blocks) * rows

    _, rank = lax.sort((order, index), num_keys=1)
    place = padded_starts[flat] + rank - starts[flat]
    block = lax.iota(jnp.int32, blocks)
    expert = jnp.minimum(jnp.searchsorted(block_ends, block, side="right").astype(jnp.int32), experts - 1)

    within = lax.iota(jnp.int32, blocks * rows) - jnp.repeat(padded_starts[expert], rows)
    filled = within < jnp.repeat(counts[expert], rows)
    at = jnp.where(filled, jnp.repeat(starts[expert], rows) + within, 0)
    source = jnp.where(filled, order[at], -1)
    return Groups(source, place.reshape(choice.shape), expert), counts


def take_rows(a: Float[Array, "n ..."], index: Int[Array, " m"]) -> Float[Array, "m ..."]:
    """``a[index]``, zeros where the index is negative."""
    taken = jnp.take(a, jnp.maximum(index, 0), axis=0, mode="clip")
    keep = (index >= 0).reshape(index.shape + (1,) * (a.ndim - 1))
    return jnp.where(keep, taken, jnp.zeros((), a.dtype))


def over_blocks(function: Callable[..., Any], weights: tuple[Array, ...], expert: Int[Array, " blocks"], *rows: Array) -> Any:
    """Runs ``function(*matrices, *blocks)`` on each block of the row arrays with its expert's matrices; joins the results' rows."""
    blocks = expert.shape[0]

    def step(_: None, xs: tuple[Array, tuple[Array, ...]]) -> tuple[None, Any]:
        index, block = xs
        return None, function(*(lax.dynamic_index_in_dim(w, index, keepdims=False) for w in weights), *block)

    _, out = lax.scan(step, None, (expert, tuple(_blocked(a, blocks) for a in rows)))
    return jax.tree.map(lambda a: a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]), out)


def sum_choices(
    total: Float[Array, "n d"], results: Float[Array, "padded d"], place: Int[Array, "n k"], weights: Float[Array, "n k"] | None = None
) -> Float[Array, "n d"]:
    """``total`` and every token's results, weighted if ``weights`` are given, in the order of its choices; float32."""
    for j in range(place.shape[1]):
        rows = results[place[:, j]]
        total = total + (rows if weights is None else weights[:, j, None] * rows)
    return total


def over_rows(a: Float[Array, "rows i"], b: Float[Array, "rows o"]) -> Float[Array, "i o"]:
    """``a^T b``, float32."""
    return lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def grouped_weight_gradient(
    a: Float[Array, "padded i"], b: Float[Array, "padded o"], expert: Int[Array, " blocks"], *, experts: int
) -> Float[Array, "e i o"]:
    """For each expert ``a^T b`` over its rows, summed in float32 block after block; exactly zero for an expert without rows."""
    blocks = expert.shape[0]

    def step(carry: tuple[Array, Array, Array], xs: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array, Array], None]:
        total, previous, out = carry
        a, b, index = xs
        total = jnp.where(index == previous, total, 0.0) + over_rows(a, b)
        # An expert's last block writes last, so what stays is its whole sum; only one float32 matrix is ever carried.
        return (total, index, lax.dynamic_update_index_in_dim(out, total.astype(out.dtype), index, 0)), None

    width = (a.shape[1], b.shape[1])
    total = jnp.zeros_like(b, shape=width, dtype=jnp.float32)
    start = (total, jnp.full_like(expert, -1, shape=()), jnp.zeros_like(b, shape=(experts, *width)))
    (_, _, out), _ = lax.scan(step, start, (_blocked(a, blocks), _blocked(b, blocks), expert))
    return out


def _blocked(a: Float[Array, "padded ..."] | Int[Array, " padded"], blocks: int) -> Array:
    return a.reshape(blocks, a.shape[0] // max(blocks, 1), *a.shape[1:])
