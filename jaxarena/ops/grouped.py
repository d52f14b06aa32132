"""Products over rows grouped by expert, and the grouping itself.

``n`` tokens each choose ``k`` of ``e`` experts. A stable counting sort puts the ``n * k`` choices in order of their expert, and
every expert's group starts a new block of ``rows`` rows, the rest of its last block being **pads**. So each block belongs to one
expert, nothing is dropped however uneven the choice, and all shapes are static: at most ``n * k // rows + min(e, n * k)`` blocks,
those left over holding pads only. A grouped product then is one product a block with its expert's matrix; no token meets an
expert that it did not choose.

Pads read as zeros, so that a weight's gradient, which contracts over rows, needs no mask. A token's results are summed over its
choices in the order of the choices, and a weight's gradient over its blocks in the order of the blocks: fixed sums, no atomics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxarena.ops.interface import launch

__all__ = ["block_rows", "grouped_weight_gradient", "moe_gather", "moe_group", "over_blocks", "take_choices"]


def block_rows(choices: int, experts: int) -> int:
    """Rows of a block: the power of two next below the mean group, from 8 (what an arena row range starts at) to 128."""
    mean = max(choices // experts, 1)
    return min(max(1 << (mean.bit_length() - 1), 8), 128)


@launch("moe_group", row_ndim=0)
def moe_group(
    choice: Int[Array, "n k"], *, experts: int, rows: int
) -> tuple[Int[Array, " padded"], Int[Array, "n k"], Int[Array, " blocks"], Int[Array, " e"]]:
    """Groups choices by expert.

    Returns:
      source: the choice (token * k + slot) that each grouped row holds, -1 for a pad.
      place: the grouped row of each choice.
      expert: the expert of each block; blocks left over belong to the last expert.
      counts: how many choices fell on each expert.
    """
    flat = choice.reshape(-1)
    total = flat.shape[0]
    blocks = total // rows + min(experts, total)
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
    return source, place.reshape(choice.shape), expert, counts


@launch("moe_gather")
def moe_gather(x: Float[Array, "n d"], source: Int[Array, " padded"], *, top_k: int) -> Float[Array, "padded d"]:
    """The rows of the tokens behind grouped choices, pads as zeros."""
    return _take_rows(x, source // top_k)


def _take_rows(a: Float[Array, "n ..."], index: Int[Array, " m"]) -> Float[Array, "m ..."]:
    """``a[index]``, zeros where the index is negative."""
    taken = jnp.take(a, jnp.maximum(index, 0), axis=0, mode="clip")
    keep = (index >= 0).reshape(index.shape + (1,) * (a.ndim - 1))
    return jnp.where(keep, taken, jnp.zeros((), a.dtype))


def take_choices(a: Float[Array, "n k"], source: Int[Array, " padded"]) -> Float[Array, " padded"]:
    """The per-choice values of grouped rows, zeros for pads."""
    return _take_rows(a.reshape(-1), source)


def over_blocks(function: Callable[..., Any], weight: Float[Array, "e i o"], expert: Int[Array, " blocks"], *rows: Array) -> Any:
    """Runs ``function(matrix, *blocks)`` on each block of the row arrays ``rows`` with its expert's matrix; joins the results' rows."""
    blocks = expert.shape[0]

    def step(_: None, xs: tuple[Array, tuple[Array, ...]]) -> tuple[None, Any]:
        index, block = xs
        return None, function(lax.dynamic_index_in_dim(weight, index, keepdims=False), *block)

    _, out = lax.scan(step, None, (expert, tuple(_blocked(a, blocks) for a in rows)))
    return jax.tree.map(lambda a: a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]), out)


def grouped_weight_gradient(
    a: Float[Array, "padded i"], b: Float[Array, "padded o"], expert: Int[Array, " blocks"], *, experts: int
) -> Float[Array, "e i o"]:
    """For each expert ``a^T b`` over its rows, summed in float32 block after block; exactly zero for an expert without rows."""
    blocks = expert.shape[0]

    def step(carry: tuple[Array, Array, Array], xs: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array, Array], None]:
        total, previous, out = carry
        a, b, index = xs
        product = lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        total = jnp.where(index == previous, total, 0.0) + product
        # An expert's last block writes last, so what stays is its whole sum; only one float32 matrix is ever carried.
        return (total, index, lax.dynamic_update_index_in_dim(out, total.astype(out.dtype), index, 0)), None

    width = (a.shape[1], b.shape[1])
    total = jnp.zeros_like(b, shape=width, dtype=jnp.float32)
    start = (total, jnp.full_like(expert, -1, shape=()), jnp.zeros_like(b, shape=(experts, *width)))
    (_, _, out), _ = lax.scan(step, start, (_blocked(a, blocks), _blocked(b, blocks), expert))
    return out


def _blocked(a: Float[Array, "padded ..."], blocks: int) -> Float[Array, "blocks rows ..."]:
    return a.reshape(blocks, a.shape[0] // max(blocks, 1), *a.shape[1:])
