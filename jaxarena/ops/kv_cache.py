"""Key-value caches: what attention keeps of the tokens it has seen, in bfloat16 or float32 or in int8 words.

A :class:`KVCache` has room for ``capacity`` tokens of each sequence of a batch and knows how many each has. :func:`append` writes new
tokens behind them, :func:`attend` lets the queries of the newest tokens attend to everything there. Prefill, decode and continuations of
several tokens are the same two calls::

    cache = KVCache.create(batch, capacity, key_heads, head_size)
    cache = append(cache, k, v)          # k, v: (batch, tokens, key heads, size)
    o = attend(q, cache)                 # q: (batch, tokens, heads, size)

Where the sequences of a batch bring different numbers of tokens, pass both calls how many, ``lengths``: of the rows of each sequence the
first so many count, the rest is padding.

The caches of a model's layers may be one, with ``layers`` in front of every array, and both calls then take which ``layer``, also one that
is only known when it runs: a scan over layers carries such a cache, and each turn writes and reads its own layer where it lies.

Quantized storage (:mod:`jaxarena.storage`): a head's keys, or values, of one token are int8 words in blocks of 128 with one float32 scale
each, with a second int8 word under ``"int8x2"``. With heads of 128 that takes 1.03 or 2.03 bytes a value, and is off by at most 1/254 or
1/65278 of the block's largest magnitude. :func:`attend` decodes one block of tokens at a time, to float32, and forms its products in
float32.

:func:`append` has no gradient, :func:`attend` has where the cache is of one layer and not quantized. When the cache is donated to the
step, tokens are written in place.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from jaxarena.ops.attention import attend_arrays, prepare
from jaxarena.ops.attention_blocks import Rules, key_block_of
from jaxarena.ops.attention_forward import forward_by_sequence
from jaxarena.ops.checks import (
    check_choice,
    check_float,
    check_int,
    check_ndim,
    check_positive_int,
    check_same_dtype,
    check_shape,
    vary_together,
)
from jaxarena.ops.interface import launch
from jaxarena.storage import BLOCK, dequantize, quantize

__all__ = ["KVCache", "QuantizedHeads", "append", "attend"]

STORAGES = (None, "int8", "int8x2")


class QuantizedHeads(NamedTuple):
    """Keys or values in int8 words. The batch leads in every array (after the layers, if any), so that one partition spec shards a whole
    cache by sequences.

    Attributes:
      words: int8 (batch, capacity, key heads, size).
      low: the low words, int8 of that shape, or None under one word.
      scales: float32 (batch, capacity, key heads, size / 128 rounded up).
    """

    words: Any
    low: Any
    scales: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens seen so far; a pytree, made by :meth:`create`. A cache of layers has them in front of every axis.

    Attributes:
      k: (batch, capacity, key heads, head size), an array or :class:`QuantizedHeads`.
      v: (batch, capacity, key heads, value size), likewise.
      lengths: int32 (batch,): how many tokens each sequence has. Setting it back, with ``dataclasses.replace``, drops the last tokens.
    """

    k: Any
    v: Any
    lengths: Any

    @staticmethod
    def create(
        batch: int,
        capacity: int,
        key_heads: int,
        head_size: int,
        value_size: int | None = None,
        dtype: DTypeLike = jnp.bfloat16,
        storage: str | None = None,
        layers: int | None = None,
    ) -> KVCache:
        """An empty cache.

        Args:
          batch: sequences; may be 0.
          capacity: tokens that there is room for in each.
          key_heads: heads of keys and values.
          head_size: elements of a key.
          value_size: elements of a value, ``head_size`` if None.
          dtype: bfloat16 or float32, of a cache that is not quantized.
          storage: None, or ``"int8"`` for one word a value, ``"int8x2"`` for two.
          layers: how many layers it is for; None for one, without an axis for it.

        Raises:
          TypeError: a size is no int, or ``dtype`` is not supported.
          ValueError: a size is not positive, or ``storage`` is unknown.
        """
        value_size = head_size if value_size is None else value_size
        if batch != 0:
            check_positive_int("KVCache.create", "batch", batch)
        sizes = {"capacity": capacity, "key_heads": key_heads, "head_size": head_size, "value_size": value_size}
        for name, size in (sizes if layers is None else sizes | {"layers": layers}).items():
            check_positive_int("KVCache.create", name, size)
        check_choice("KVCache.create", "storage", storage, STORAGES)
        check_float("KVCache.create", "dtype", jax.ShapeDtypeStruct((), dtype))

        leading = (batch,) if layers is None else (layers, batch)

        def empty(size: int) -> Any:
            shape = (*leading, capacity, key_heads, size)
            if storage is None:
                return jnp.zeros(shape, dtype)
            low = jnp.zeros(shape, jnp.int8) if storage == "int8x2" else None
            return QuantizedHeads(jnp.zeros(shape, jnp.int8), low, jnp.zeros((*shape[:-1], -(-size // BLOCK)), jnp.float32))

        return KVCache(empty(head_size), empty(value_size), jnp.zeros(leading, jnp.int32))

    @property
    def storage(self) -> str | None:
        """None, ``"int8"`` or ``"int8x2"``."""
        if not isinstance(self.k, QuantizedHeads):
            return None
        return "int8" if self.k.low is None else "int8x2"

    @property
    def capacity(self) -> int:
        """Tokens that there is room for in each sequence."""
        return int(_main(self.k).shape[-3])

    @property
    def layers(self) -> int | None:
        """How many layers it is for, None if for one, without an axis for it."""
        shape = _main(self.k).shape
        return int(shape[0]) if len(shape) == 5 else None


def append(
    cache: KVCache,
    k: Float[Array, "b t g d"],
    v: Float[Array, "b t g dv"],
    *,
    lengths: Int[Array, " b"] | None = None,
    layer: int | Int[Array, ""] | None = None,
) -> KVCache:
    """Writes the keys and values of new tokens behind those of each sequence.

    In place when the cache is donated. Tokens that find no room are dropped and the sequence's length stays at the capacity: nothing that
    is there changes, and no other sequence. A caller that must not lose tokens compares ``cache.lengths`` with ``cache.capacity``.

    Args:
      cache: the cache.
      k: (batch, tokens, key heads, head size), in the cache's dtype; bfloat16 or float32 for a quantized one.
      v: (batch, tokens, key heads, value size), likewise.
      lengths: int32 [batch]: how many of the tokens each sequence really has, the first ones (below 0 counts as 0); all if None.
      layer: of a cache of layers, the one to write; an int, or an int32 of shape []. One that is out of range is taken as the nearest.

    Returns:
      The cache with the tokens. It has no gradient.

    Raises:
      TypeError: a dtype does not fit the cache.
      ValueError: shapes do not fit the cache, there are more tokens than its capacity, or ``layer`` is missing or not meant.
    """
    index = _layer("append", cache, layer)
    for name, new, kept in (("k", k, cache.k), ("v", v, cache.v)):
        check_float("append", name, new)
        check_ndim("append", name, new, "batch tokens heads size")
        if cache.storage is None:
            check_same_dtype("append", name, new, f"cache.{name}", kept)
        batch, capacity, heads, size = _main(kept).shape[-4:]
        if new.shape[1] > capacity:
            raise ValueError(f"append: {name} must have at most as many tokens as the cache's capacity {capacity}, got {new.shape[1]}")
        check_shape("append", name, new, (batch, k.shape[1], heads, size), "batch, heads and size of the cache")
    if lengths is not None:
        check_int("append", "lengths", lengths)
        check_shape("append", "lengths", lengths, cache.lengths.shape[-1:], "the batch of the cache")
    before = _lengths(cache, index)
    counts = jnp.full_like(before, k.shape[1]) if lengths is None else lengths
    before, counts, k, v, kept, every = vary_together(
        before, jnp.clip(counts, 0, k.shape[1]), k, v, (cache.k, cache.v), (cache.lengths, *index)
    )
    leaves, tree = jax.tree.flatten(kept)
    kept_k, kept_v = jax.tree.unflatten(tree, _append((before, counts, k, v, *every[1:], *leaves), bool(index)))
    after = jnp.minimum(before + counts, cache.capacity)
    return KVCache(kept_k, kept_v, lax.dynamic_update_index_in_dim(every[0], after, every[1], 0) if index else after)


def attend(
    q: Float[Array, "b t h d"],
    cache: KVCache,
    *,
    lengths: Int[Array, " b"] | None = None,
    layer: int | Int[Array, ""] | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Float[Array, "b t h dv"] | tuple[Float[Array, "b t h dv"], Float[Array, "b h t"]]:
    """Attends the queries of the newest tokens to their sequences in the cache.

    The last query row of each sequence is at its last token. A sequence's result has the same bits in any batch with a cache of this
    capacity, and alone, and its cost is that of its own tokens, not of the capacity.

    Args:
      q: (batch, tokens, heads, head size), bfloat16 or float32, in the dtype of a cache that is not quantized; the heads are a multiple of
        the key heads.
      cache: the cache, with the keys and values of these tokens appended.
      lengths: int32 [batch], as given to :func:`append`: how many of the query rows each sequence has, the first ones; all if None.
      layer: of a cache of layers, the one to attend to, as for :func:`append`.
      causal, scale, window, softcap, return_lse: as for :func:`jaxarena.ops.attention`.

    Returns:
      (batch, tokens, heads, value size) in the dtype of ``q``; with ``return_lse`` also lse, float32 (batch, heads, tokens). Rows that see
      no token are 0, their lse -inf. Gradients go to ``q`` and the cache where the cache is of one layer and not quantized.

    Raises:
      TypeError: a dtype is not supported; or a gradient is asked for through a quantized cache, or one of layers.
      ValueError: shapes do not fit, there are more query rows than the capacity under ``causal``, an option is out of its range, or
        ``layer`` is missing or not meant.
    """
    index = _layer("attend", cache, layer)
    # A quantized cache is checked as if it were one in the dtype of q.
    check_float("attend", "q", q)
    if lengths is not None:
        check_int("attend", "lengths", lengths)
        check_shape("attend", "lengths", lengths, cache.lengths.shape[-1:], "the batch of the cache")
    k, v = (
        jax.ShapeDtypeStruct(_main(a).shape[-4:], q.dtype if isinstance(a, QuantizedHeads) else a.dtype) for a in (cache.k, cache.v)
    )
    hints, rules = prepare(
        "attend",
        q,
        k,
        v,
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        lengths=_lengths(cache, index),
        query_lengths=lengths,
    )
    if cache.storage is None and not index:
        return attend_arrays(q, cache.k, cache.v, hints, rules, return_lse=return_lse)
    o, lse = _attend_cache(vary_together(q, *hints, *index, *jax.tree.leaves((cache.k, cache.v))), rules, bool(index))
    return (o, lse) if return_lse else o


def _layer(op: str, cache: KVCache, layer: Any) -> tuple[Array, ...]:
    """The layer of a cache of layers, as one int32; nothing for a cache of one."""
    if cache.layers is None:
        if layer is not None:
            raise ValueError(f"{op}: layer must be None unless the cache was made with layers, got {layer!r}")
        return ()
    if layer is None:
        raise ValueError(f"{op}: layer must be given for a cache of {cache.layers} layers, got None")
    if isinstance(layer, int) and not isinstance(layer, bool):
        layer = jnp.int32(layer)
    check_int(op, "layer", layer)
    check_shape(op, "layer", layer, (), "one number")
    return (jnp.clip(layer, 0, cache.layers - 1),)


def _lengths(cache: KVCache, index: tuple[Array, ...]) -> Array:
    return lax.dynamic_index_in_dim(cache.lengths, *index, keepdims=False) if index else cache.lengths


def _main(part: Any) -> Any:
    return part.words if isinstance(part, QuantizedHeads) else part


def _refusing(message: str) -> tuple[Any, Any]:
    """The rules of a function that has no gradient, and says so."""

    def refuse(*args: Any) -> Any:
        raise TypeError(message)

    return refuse, refuse


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _append(arrays: tuple[Array, ...], layered: bool) -> Any:
    return kv_append(*arrays, layered=layered)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _attend_cache(arrays: tuple[Array, ...], rules: Rules, layered: bool) -> Any:
    return kv_attend(*arrays, rules=rules, layered=layered)


_append.defvjp(*_refusing("append: writing to a cache has no gradient: to train, use attention with lengths on arrays of your own"))
_attend_cache.defvjp(
    *_refusing(
        "attend: a quantized cache, or one of layers, has no gradient: to train, use a float cache of one, or attention with lengths"
    )
)


@launch("kv_append", row_ndim=2)
def kv_append(
    lengths: Int[Array, " b"],
    counts: Int[Array, " b"],
    k: Float[Array, "b t g d"],
    v: Float[Array, "b t g dv"],
    *arrays: Shaped[Array, "*_shape"],
    layered: bool,
) -> tuple[Shaped[Array, "*_shape"], ...]:
    """The parts of the cache, keys first, with ``counts`` new rows of each sequence behind its ``lengths``. ``arrays`` are the layer, if
    ``layered``, and the parts."""
    index, kept = arrays[:layered], arrays[layered:]
    batch, time = k.shape[:2]
    if not batch * time:
        return kept
    capacity, half = kept[0].shape[-3], len(kept) // 2
    row = lax.broadcasted_iota(jnp.int32, (batch, time), 1)
    place = lengths[:, None] + row
    # Rows to leave out go past the end, each to a place of its own: no two writes meet, and those past the end are dropped.
    place = jnp.where((row < counts[:, None]) & (place < capacity), place, capacity + row)
    sequence = lax.broadcasted_iota(jnp.int32, (batch, time), 0)
    new = [*_encoded(k, half), *_encoded(v, half)]
    return tuple(a.at[(*index, sequence, place)].set(x, mode="drop", unique_indices=True) for a, x in zip(kept, new, strict=True))


@launch("kv_attend", row_ndim=(2, 0))
def kv_attend(
    q: Float[Array, "b t h d"], *arrays: Shaped[Array, "*_shape"], rules: Rules, layered: bool
) -> tuple[Float[Array, "b t h dv"], Float[Array, "b h t"]]:
    """o and lse: ``arrays`` are the lengths that ``rules`` name, the layer, if ``layered``, and the parts of the cache, keys first."""
    hints, rest = arrays[: 1 + rules.query_lengths], arrays[1 + rules.query_lengths :]
    index, parts = rest[:layered], rest[layered:]
    half = len(parts) // 2
    capacity, key_heads = parts[0].shape[-3:-1]

    def fetch(sequence: Array, j: Array) -> tuple[Array, Array]:
        blocks = [key_block_of(a, (*index, sequence), j) for a in parts]
        return _decoded(blocks[:half]), _decoded(blocks[half:])

    sizes = {"keys": capacity, "key_heads": key_heads, "value_size": parts[half].shape[-1]}
    # Decoded words are float32, and their products with q are formed so.
    return forward_by_sequence(q.astype(jnp.float32) if half > 1 else q, fetch, hints, rules, dtype=q.dtype, **sizes)


def _encoded(x: Array, parts: int) -> list[Array]:
    """``x`` as the arrays that a cache keeps of it: itself, or words, low words where there are two, and scales."""
    return [x] if parts == 1 else [a for a in quantize(x, parts - 1) if a is not None]


def _decoded(parts: list[Array]) -> Array:
    if len(parts) == 1:
        return parts[0]
    word, *low, scales = parts
    return dequantize(word, low[0] if low else None, scales)
