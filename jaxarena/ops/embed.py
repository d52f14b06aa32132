"""Embedding: the rows of a table at given indices.

::

    y[i]      = table[tokens[i]]                     a row of zeros where tokens[i] is out of range
    dtable[r] = sum over i with tokens[i] = r of dy[i]

The sum is formed in float32 in a fixed order, without a scatter-add, whose order a GPU does not promise. Tokens are sorted
(stably, so equal tokens stay in order), and the sorted rows are summed run by run in two levels: each block of about sqrt(N) rows
keeps a running sum that restarts where the token changes, all blocks side by side; then the sum a run brings from earlier blocks
is passed from block to block. The last row of a run holds its total, and each table row fetches its own. Cost: O(N d) work in
about 2 sqrt(N) steps. No multiplication takes part, so a NaN stays in the rows of its own token.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxarena.ops.checks import check_float, check_int, check_ndim, vary_together
from jaxarena.ops.interface import launch

__all__ = ["embed"]


def embed(tokens: Int[Array, "*rows"], table: Float[Array, "v d"]) -> Float[Array, "*rows d"]:
    """The rows of ``table`` at ``tokens``.

    Args:
      tokens: int32, any shape. A token below 0 or from ``v`` on gives a row of zeros and takes no part in the gradient.
      table: ``[v, d]``, bfloat16 or float32, ``v`` at least 1.

    Returns:
      ``[..., d]`` in the dtype of ``table``, exactly the table's rows. The gradient is within ``tolerance(dtype, n)`` of float64,
      n the most often a token occurs (:func:`jaxarena.testing.tolerance`). With tokens sharded over devices and no
      ``jax.shard_map``, XLA gathers all tokens for the gradient's sort and sums the sorted rows over devices.

    Raises:
      TypeError: ``tokens`` is not int32, or ``table`` not bfloat16 or float32.
      ValueError: ``table`` is not a matrix, or has no rows.
    """
    check_int("embed", "tokens", tokens)
    check_float("embed", "table", table)
    check_ndim("embed", "table", table, "v d")
    if table.shape[0] == 0:
        raise ValueError(f"embed: table must have at least one row, got shape {tuple(table.shape)}")
    return _embed(*vary_together(tokens, table), table.shape[0])


@launch("embed")
def embed_forward(tokens: Int[Array, "*rows"], table: Float[Array, "v d"]) -> Float[Array, "*rows d"]:
    return table.at[tokens].get(mode="fill", fill_value=0, wrap_negative_indices=False)


@launch("embed_dtable")
def embed_dtable(tokens: Int[Array, "*rows"], dy: Float[Array, "*rows d"], *, vocabulary: int) -> Float[Array, "v d"]:
    n, d = tokens.size, dy.shape[-1]
    if n == 0:
        return jnp.zeros_like(dy, shape=(vocabulary, d))
    block = math.isqrt(n - 1) + 1
    pad = -n % block
    # Padding takes the largest index, so that it sorts to the end and no table row fetches it.
    flat = jnp.pad(tokens.reshape(n), (0, pad), constant_values=jnp.iinfo(jnp.int32).max)
    order = jnp.argsort(flat, stable=True)
    ids = flat[order]
    rows = jnp.pad(dy.reshape(n, d), ((0, pad), (0, 0)))[order].astype(jnp.float32)
    sums = _run_sums(ids.reshape(-1, block), rows.reshape(-1, block, d))

    wanted = jnp.arange(vocabulary, dtype=jnp.int32)
    last = jnp.searchsorted(ids, wanted, side="right").astype(jnp.int32) - 1
    present = (last >= 0) & (ids[jnp.maximum(last, 0)] == wanted)
    return jnp.where(present[:, None], sums[jnp.maximum(last, 0)], 0).astype(dy.dtype)


def _run_sums(ids: Int[Array, "blocks block"], rows: Float[Array, "blocks block d"]) -> Float[Array, "n d"]:
    """For each row of the sorted list the sum of the rows from the start of its run of equal ids up to it."""
    same = ids == jnp.roll(ids, 1, axis=1)
    same = same.at[:, 0].set(False)

    def along(total: Array, at: Any) -> tuple[Array, Array]:
        row, goes_on = at
        total = jnp.where(goes_on[:, None], total + row, row)
        return total, total

    _, inside = jax.lax.scan(along, jnp.zeros_like(rows[:, 0]), (jnp.moveaxis(rows, 1, 0), same.T))
    inside = jnp.moveaxis(inside, 0, 1)

    joins = (ids == jnp.roll(ids[:, -1], 1)[:, None]).at[0].set(False)

    def across(total: Array, at: Any) -> tuple[Array, Array]:
        last, first_joins, last_joins = at
        brought = jnp.where(first_joins, total, 0)
        return jnp.where(last_joins, last + brought, last), brought

    _, brought = jax.lax.scan(across, jnp.zeros_like(rows[0, 0]), (inside[:, -1], joins[:, 0], joins[:, -1]))
    sums = jnp.where(joins[..., None], inside + brought[:, None], inside)
    return sums.reshape(-1, rows.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _embed(tokens: Array, table: Array, vocabulary: int) -> Array:
    return embed_forward(tokens, table)


def _embed_fwd(tokens: Array, table: Array, vocabulary: int) -> tuple[Array, Array]:
    return _embed(tokens, table, vocabulary), tokens


def _embed_bwd(vocabulary: int, tokens: Array, dy: Array) -> tuple[None, Array]:
    return None, embed_dtable(tokens, dy, vocabulary=vocabulary)


_embed.defvjp(_embed_fwd, _embed_bwd)
