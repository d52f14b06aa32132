"""Blocks of queries and keys, and which query sees which key: what the passes of attention share.

Query row i of a sequence with ``n`` keys and ``m`` query rows stands at key position ``n - m + i`` (bottom-right aligned). It sees key j if

    i < m,   j < n,   j <= position (causal),   j > position - window,   segment of i = segment of j

for as many of these as the :class:`Rules` ask for. Blocks without any such pair are not visited. What lies past a sequence's ``n`` keys
never reaches a result, NaNs included: it is read as zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

__all__ = ["Mask", "Rules", "blocks", "filled", "key_block_of", "key_blocks", "over_blocks", "product", "row_vector", "rows"]

BLOCK = 128


@dataclasses.dataclass(frozen=True)
class Rules:
    """What is known of an attention when it is traced; the last three say which integer arrays are given."""

    causal: bool
    scale: float
    window: int | None = None
    softcap: float | None = None
    lengths: bool = False
    query_lengths: bool = False
    segments: bool = False

    @property
    def may_see_nothing(self) -> bool:
        """Whether a query, or a query within one block of keys that is visited, may see no key at all."""
        return self.lengths or self.segments or self.window is not None


class Mask:
    """Which query sees which key, block by block.

    Args:
      rules: what to ask for.
      queries, keys: how many a sequence has.
      hints: ``lengths`` int32 [b], ``query_lengths`` int32 [b], then the segments of queries [b, queries] and keys [b, keys]: those
        that ``rules`` names.
    """

    def __init__(self, rules: Rules, queries: int, keys: int, hints: tuple[Array, ...]):
        self.rules, self.queries, self.keys = rules, queries, keys
        rest = list(hints)
        # How many keys, and query rows, of each sequence there are; None where all are.
        self.ends = jnp.clip(rest.pop(0), 0, keys) if rules.lengths else None
        self.query_ends = jnp.clip(rest.pop(0), 0, queries) if rules.query_lengths else None
        self.segments = tuple(_vector_blocks(a) for a in rest)
        self.query_block, self.key_block = block_of(queries), block_of(keys)
        self.query_blocks, self.key_blocks = -(-queries // self.query_block), -(-keys // self.key_block)
        # The key position of query 0: of every sequence, and the least and the greatest.
        self.starts: Any = (keys if self.ends is None else self.ends) - (queries if self.query_ends is None else self.query_ends)
        self.first, self.last = self.starts, self.starts
        if self.ends is not None:
            # The initial values bound all others: they count in an empty batch only.
            self.first, self.last = jnp.min(self.starts, initial=keys), jnp.max(self.starts, initial=-queries)

    def seen(self, row: Array, column: Array) -> Bool[Array, "... i j"]:
        """Which queries of block ``row`` see which keys of block ``column``: [i, j], or [b, 1, 1, i, j] where sequences differ."""
        shape = (self.query_block, self.key_block)
        key = column * self.key_block + lax.broadcasted_iota(jnp.int32, shape, 1)
        query = row * self.query_block + lax.broadcasted_iota(jnp.int32, shape, 0)
        if self.ends is None:
            position, seen = query + self.starts, key < self.keys
        else:
            position, seen = query + self.starts[:, None, None], key < self.ends[:, None, None]
        if self.query_ends is not None:
            seen = seen & (query < self.query_ends[:, None, None])
        if self.rules.causal:
            # With as many queries as keys the causal rule hides the pads too.
            seen = key <= position if self.queries == self.keys and self.ends is None else seen & (key <= position)
        if self.rules.window is not None:
            seen = seen & (key > position - self.rules.window)
        if self.rules.segments:
            of_queries, of_keys = self.segments
            seen = seen & (of_queries[row][:, :, None] == of_keys[column][:, None, :])
        return seen if seen.ndim == 2 else seen[:, None, None]

    def keys_of(self, row: Array) -> tuple[Any, Any]:
        """The blocks of keys, from and up to, that queries of block ``row`` may see."""
        start: Any = 0
        stop: Any = self.key_blocks
        if self.ends is not None:
            stop = (jnp.max(self.ends, initial=0) + self.key_block - 1) // self.key_block
        if self.query_ends is not None:
            stop = jnp.where(row * self.query_block < jnp.max(self.query_ends, initial=0), stop, 0)
        if self.rules.causal:
            last = (row + 1) * self.query_block - 1 + self.last
            stop = jnp.clip(last // self.key_block + 1, 0, stop)
        if self.rules.window is not None:
            start = jnp.maximum((row * self.query_block + self.first - self.rules.window + 1) // self.key_block, 0)
        return start, stop

    def queries_of(self, column: Array) -> tuple[Any, Any]:
        """The blocks of queries, from and up to, that may see keys of block ``column``."""
        start: Any = 0
        stop: Any = self.query_blocks
        if self.rules.causal:
            start = jnp.clip((column * self.key_block - self.last) // self.query_block, 0, stop)
        if self.rules.window is not None:
            last = (column + 1) * self.key_block - 1 + self.rules.window - 1 - self.first
            stop = jnp.clip(last // self.query_block + 1, 0, stop)
        return start, stop

    def existing(self, column: Array, a: Float[Array, "b g j d"]) -> Float[Array, "b g j d"]:
        """A block of keys or values, with zeros past each sequence's end."""
        if self.ends is None:
            return a
        key = column * self.key_block + lax.iota(jnp.int32, self.key_block)
        return jnp.where((key < self.ends[:, None])[:, None, :, None], a, 0)


def block_of(time: int) -> int:
    """How many rows make a block."""
    return min(BLOCK, max(time, 1))


def blocks(a: Float[Array, "b t h d"], key_heads: int, fill: float = 0.0) -> Float[Array, "n b g r block d"]:
    """Cuts time into blocks, the last filled up, and the heads into key heads and the r heads that share each."""
    batch, time, heads, size = a.shape
    block = block_of(time)
    count = max(-(-time // block), 1)
    a = jnp.pad(a, ((0, 0), (0, count * block - time), (0, 0), (0, 0)), constant_values=fill)
    a = a.reshape(batch, count, block, key_heads, heads // key_heads, size)
    return a.transpose(1, 0, 3, 4, 2, 5)


def key_blocks(a: Float[Array, "b t g d"]) -> Float[Array, "n b g block d"]:
    return blocks(a, a.shape[2])[:, :, :, 0]


def key_block_of(a: Shaped[Array, "*leading t g d"], sequence: tuple[Array, ...], column: Array) -> Shaped[Array, "1 g block d"]:
    """Block ``column`` of the keys of one sequence, an index of each leading axis, sliced out of all keys; what lies past the last key is
    zeros."""
    time, *rest = a.shape[-3:]
    block = block_of(time)
    start = column * block
    first = jnp.minimum(start, time - block)
    part = lax.dynamic_slice(a, (*sequence, first, jnp.zeros_like(first), jnp.zeros_like(first)), (*(1 for _ in sequence), block, *rest))
    part = part.reshape(1, block, *rest)
    if time % block:
        # A slice that would reach past the end starts earlier: move its keys to the front.
        part = lax.dynamic_slice_in_dim(jnp.pad(part, ((0, 0), (0, block), (0, 0), (0, 0))), start - first, block, axis=1)
    return part.transpose(0, 2, 1, 3)


def _vector_blocks(a: Int[Array, "b t"]) -> Int[Array, "n b block"]:
    block = block_of(a.shape[1])
    a = jnp.pad(a, ((0, 0), (0, -a.shape[1] % block)))
    return a.reshape(a.shape[0], -1, block).transpose(1, 0, 2)


def rows(a: Float[Array, "n b g r block d"], time: int) -> Float[Array, "b t h d"]:
    """The inverse of :func:`blocks`."""
    count, batch, key_heads, repeats, block, size = a.shape
    return a.transpose(1, 0, 4, 2, 3, 5).reshape(batch, count * block, key_heads * repeats, size)[:, :time]


def row_vector(a: Float[Array, "n b g r block"], time: int) -> Float[Array, "b h t"]:
    return rows(a[..., None], time)[..., 0].transpose(0, 2, 1)


def filled(like: Array, shape: tuple[int, ...], value: float = 0.0) -> Array:
    """A float32 array to sum into, which varies over the same mesh axes as ``like``."""
    return jnp.full_like(like, value, shape=shape, dtype=jnp.float32)


def product(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def over_blocks(function: Callable[..., Any], *arrays: Array) -> Any:
    """Maps ``function(index, *blocks)`` over the blocks of the arrays, one after another."""
    index = lax.iota(jnp.int32, arrays[0].shape[0])
    return lax.map(lambda xs: function(*xs), (index, *arrays))
