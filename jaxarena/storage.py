"""Arrays to arena rows and back.

**The arena's element** is int8, as the kernels read it: ``int8[rows, 128]``. Where no kernel runs it may be uint32, ``uint32[rows, 32]``:
the same bytes, which XLA moves faster on the CPU when it need not take 32-bit numbers apart (:func:`arena_element`).

**Raw storage** keeps a value's own bytes; ``bool`` is one byte. Bytes are reinterpreted on the rows of one array, after they were
sliced out: on the CPU, reinterpreting the whole arena under another element width is a pass over all of it.

**Quantized storage.** For each block of 128 values ``x`` of a row, with ``amax = max |x|``:

- one word: ``scale = amax / 127``, ``word = round(x / scale)`` in [-127, 127], and ``x ~ scale * word``;
- two words: ``scale = amax / 32639``, ``v = round(x / scale)``, ``word = floor((v + 128) / 256)`` in [-127, 127],
  ``low = v - 256 * word`` in [-128, 127], and ``x ~ scale * (256 * word + low)``: 15 bits and a sign.

The error of a value is at most ``scale / 2``, and the roundings of f32. A block whose amax is zero or subnormal has scale 0 and
decodes to zeros. Other scales are never below the smallest normal number; in a block too small for that, words stay at or below
``amax / scale``, so that it decodes within its own amax. A block that holds a NaN or an Inf has scale NaN and words 0: all of it
decodes to NaN, and no other block changes.

**Loads and writes** move one array (or a view of one) out of or into the arena. What was loaded passes one ``lax.optimization_barrier``
together with the arena before the next write: without it XLA copies the whole arena at each read.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxarena._arena_types import ALIGN, ROW_BYTES
from jaxarena.panels import WORDS, Layout, View, full_view, row_spans

__all__ = [
    "BLOCK",
    "DTYPE_OF_STORAGE",
    "STORAGE_OF_DTYPE",
    "arena_element",
    "as_elements",
    "decode",
    "dequantize",
    "encode",
    "load",
    "quantize",
    "quantize_blocks",
    "write",
]

DTYPE_OF_STORAGE: dict[str, Any] = {
    "f32": jnp.dtype(jnp.float32),
    "i32": jnp.dtype(jnp.int32),
    "u32": jnp.dtype(jnp.uint32),
    "bf16": jnp.dtype(jnp.bfloat16),
    "f16": jnp.dtype(jnp.float16),
    "i16": jnp.dtype(jnp.int16),
    "u16": jnp.dtype(jnp.uint16),
    "i8": jnp.dtype(jnp.int8),
    "u8": jnp.dtype(jnp.uint8),
    "bool": jnp.dtype(jnp.bool_),
}
"""The dtype that each raw storage holds."""

STORAGE_OF_DTYPE: dict[Any, str] = {dtype: storage for storage, dtype in DTYPE_OF_STORAGE.items()}
"""The raw storage of each dtype that has one."""

BLOCK = ROW_BYTES
"""Values that share one scale: the words of one arena row."""

_TINY = float(jnp.finfo(jnp.float32).tiny)
_LEVELS = {1: 127, 2: 256 * 127 + 127}


def arena_element(platform: str) -> Any:
    """The dtype of the arena on a platform (``"cpu"``, ``"gpu"``): int8 wherever kernels may run."""
    return jnp.dtype(jnp.uint32) if platform == "cpu" else jnp.dtype(jnp.int8)


def as_elements(arena: jax.Array, element: Any) -> jax.Array:
    """The same arena with elements of another dtype."""
    return arena if arena.dtype == element else _reinterpret(arena, jnp.dtype(element))


def quantize(x: jax.Array, words: int = 1) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Words, low words (None under one word) and block scales of ``x``.

    Args:
      x: ``[..., columns]``, floating point. Blocks of 128 are counted from column 0; the last may be shorter.
      words: 1 or 2.

    Returns:
      words and low words ``int8[..., columns]``, scales ``float32[..., ceil(columns / 128)]``.

    Raises:
      ValueError: for another number of words.
      TypeError: for a dtype that is not floating point.
    """
    if words not in _LEVELS:
        raise ValueError(f"quantize: words must be 1 or 2, got {words}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"quantize: x must be floating point, got {x.dtype}")
    word, low, scales = quantize_blocks(_blocked(x), words)
    columns = x.shape[-1]
    return _unblocked(word, columns), None if low is None else _unblocked(low, columns), scales


def dequantize(words: jax.Array, low: jax.Array | None, scales: jax.Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """The values that words, low words (or None) and block scales stand for, as ``dtype``; shapes as :func:`quantize` returns them."""
    x = _dequantize_blocks(_blocked(words), None if low is None else _blocked(low), scales)
    return _unblocked(x, words.shape[-1]).astype(dtype)


def encode(x: jax.Array, layout: Layout) -> jax.Array:
    """The arena rows ``int8[layout.bytes // 128, 128]`` of ``x``; pads are zeros.

    Raises:
      ValueError: when the shape is not the layout's.
      TypeError: when the dtype is not the raw storage's, or not floating point under a quantized storage.
    """
    _check_array("encode", x, layout)
    if not layout.size:
        return jnp.zeros((0, ROW_BYTES), jnp.int8)
    *words, scales = _encode_parts(x, layout, jnp.dtype(jnp.int8))
    if not layout.quantized:
        return scales.reshape(-1, ROW_BYTES)
    return jnp.concatenate([*(w.reshape(-1, ROW_BYTES) for w in words), _scale_rows(scales.reshape(-1), jnp.dtype(jnp.int8))])


def decode(rows: jax.Array, layout: Layout, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """The array of ``layout.shape`` that arena rows ``int8[layout.bytes // 128, 128]`` hold, in the raw storage's dtype or,
    quantized, as ``dtype``.

    Raises:
      ValueError: when there are not as many rows as the layout has.
    """
    if rows.shape != (layout.bytes // ROW_BYTES, ROW_BYTES):
        raise ValueError(f"decode: {layout} takes rows of shape {(layout.bytes // ROW_BYTES, ROW_BYTES)}, got {rows.shape}")
    return _fetch(rows, jnp.int32(0), layout, full_view(layout), dtype)


def load(arena: jax.Array, row: ArrayLike, layout: Layout, view: View, home_rows: int, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Reads a part of a home out of the arena.

    What is made of the result must pass, together with the arena, through one ``lax.optimization_barrier`` before the arena is written
    again: without it XLA copies the whole arena.

    Args:
      arena: ``int8[rows, 128]`` or ``uint32[rows, 32]``.
      row: the home's first arena row (its slot's, when it is a stack); may be traced.
      layout: the part's layout.
      view: where the part lies in the home.
      home_rows: arena rows of the home (of one slot).
      dtype: what a quantized part is decoded to.

    Returns:
      The array of ``layout.shape``.

    Raises:
      ValueError: when the part does not lie within ``home_rows``.
    """
    _check_view("load", layout, view, home_rows)
    return _fetch(arena, jnp.asarray(row, jnp.int32), layout, view, dtype)


def write(arena: jax.Array, row: ArrayLike, layout: Layout, view: View, x: jax.Array, home_rows: int | None = None) -> jax.Array:
    """Writes ``x`` into a part of a home, and zeros into the part's pads; arguments as for :func:`load`.

    Returns:
      The arena to go on with.

    Raises:
      ValueError: when the part does not lie within ``home_rows`` (where given), or the shape is not the layout's.
      TypeError: when the dtype is not the raw storage's, or not floating point under a quantized storage.
    """
    _check_array("write", x, layout)
    if home_rows is not None:
        _check_view("write", layout, view, home_rows)
    if layout.size:
        # Finish x first: fused into the bytes it is split into, it would be computed again for each of them.
        arena = _put(arena, jnp.asarray(row, jnp.int32), layout, view, lax.optimization_barrier(x))
    return lax.optimization_barrier(arena)


def _fetch(arena: jax.Array, row: jax.Array, layout: Layout, view: View, dtype: DTypeLike) -> jax.Array:
    if not layout.size:
        return jnp.zeros(layout.shape, DTYPE_OF_STORAGE.get(layout.storage, dtype))
    if not layout.quantized:
        return _decode_raw(_load(arena, row, layout, view), layout)
    parts = WORDS[layout.storage]
    words = [_load(arena, row + i * view.part_rows, layout, view) for i in range(parts)]
    scales = _load(_load_scales(arena, row + parts * view.part_rows, view), jnp.int32(0), layout, view)
    words = [lax.bitcast_convert_type(_unpack(w, 1), jnp.int8) for w in words]
    x = _dequantize_blocks(words[0], words[1] if parts == 2 else None, scales)
    return _from_panels(x, layout).astype(dtype)


def _put(arena: jax.Array, row: jax.Array, layout: Layout, view: View, x: jax.Array) -> jax.Array:
    *words, last = _encode_parts(x, layout, arena.dtype)
    if not layout.quantized:
        return _store(arena, row, layout, view, last)
    for i, part in enumerate(words):
        arena = _store(arena, row + i * view.part_rows, layout, view, part)
    row = row + len(words) * view.part_rows
    if row_spans(layout, view) == ((0, view.part_rows),):
        scales = last.reshape(-1)
    else:
        # A part's scales may start inside an arena row: merge them into the home's.
        scales = _store(_load_scales(arena, row, view), jnp.int32(0), layout, view, last)
    return _update(arena, _scale_rows(scales, arena.dtype), row)


def _load(rows: jax.Array, row: jax.Array, layout: Layout, view: View) -> jax.Array:
    """The part's rows as ``[panels, groups, padded rows, ...]``, from ``rows[:, ...]``."""
    panels, groups, padded = layout.panels, layout.groups, layout.padded_rows
    rest = rows.shape[1:]
    spans = row_spans(layout, view)
    if len(spans) == 1:
        return _slice(rows, row + spans[0][0], panels * groups * padded).reshape(panels, groups, padded, *rest)
    # Slice whole panels of the home, then cut each at the same place, so that nothing is gathered.
    within = (groups - 1) * view.group_stride + padded
    offset = view.row % view.panel_stride if panels > 1 else 0
    stride = view.panel_stride if panels > 1 else within
    x = _slice(rows, row + (view.row - offset), panels * stride).reshape(panels, stride, *rest)[:, offset : offset + within]
    if view.group_stride == padded or groups == 1:
        return x.reshape(panels, groups, padded, *rest)
    x = jnp.pad(x, [(0, 0), (0, view.group_stride - padded), *[(0, 0)] * len(rest)])
    return x.reshape(panels, groups, view.group_stride, *rest)[:, :, :padded]


def _store(rows: jax.Array, row: jax.Array, layout: Layout, view: View, blocks: jax.Array) -> jax.Array:
    """``rows`` with the part's rows replaced by ``blocks``, one update for each run of consecutive rows."""
    spans = row_spans(layout, view)
    blocks = blocks.reshape(len(spans), -1, *rows.shape[1:])
    for block, (start, _) in zip(blocks, spans, strict=True):
        rows = _update(rows, block, row + start)
    return rows


def _load_scales(arena: jax.Array, row: jax.Array, view: View) -> jax.Array:
    """All scales of a quantized home, ``float32[part_rows]``."""
    rows = _slice(arena, row, -(-view.part_rows // (ROW_BYTES // 4)))
    return lax.bitcast_convert_type(_unpack(rows, 4), jnp.float32).reshape(-1)[: view.part_rows]


def _scale_rows(scales: jax.Array, element: Any) -> jax.Array:
    """All scales of a quantized home as its arena rows."""
    scales = lax.bitcast_convert_type(_pad_last(scales, -len(scales) % (ALIGN // 4)), jnp.uint32)
    return _pack(scales.reshape(-1, ROW_BYTES // 4), element)


def _slice(rows: jax.Array, start: jax.Array, length: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(rows, start, length)


def _update(rows: jax.Array, block: jax.Array, start: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(rows, block, start, 0)


def _encode_parts(x: jax.Array, layout: Layout, element: Any) -> list[jax.Array]:
    """The parts in the order they lie in: arena elements ``[panels, groups, padded rows, ...]`` of the values or words, then scales
    ``float32[panels, groups, padded rows]``."""
    if not layout.quantized:
        return [_encode_raw(x, layout, element)]
    word, low, scales = quantize_blocks(_to_panels(x, layout, BLOCK), WORDS[layout.storage])
    packed = [_pack(lax.bitcast_convert_type(w, jnp.uint8), element) for w in (word, low) if w is not None]
    return [*packed, scales]


def _encode_raw(x: jax.Array, layout: Layout, element: Any) -> jax.Array:
    x = x.astype(jnp.uint8) if layout.storage == "bool" else lax.bitcast_convert_type(x, _UINT[layout.itemsize])
    per_row = ROW_BYTES // layout.itemsize
    if layout.flat:
        return _pack(_pad_last(x.reshape(-1), layout.rows * per_row - layout.size).reshape(1, 1, -1, per_row), element)
    return _pack(_to_panels(x, layout, per_row), element)


def _decode_raw(blocks: jax.Array, layout: Layout) -> jax.Array:
    dtype = DTYPE_OF_STORAGE[layout.storage]
    x = _unpack(blocks, layout.itemsize)
    x = x.reshape(-1)[: layout.size].reshape(layout.shape) if layout.flat else _from_panels(x, layout)
    return x != 0 if layout.storage == "bool" else lax.bitcast_convert_type(x, dtype)


def _to_panels(x: jax.Array, layout: Layout, per_row: int) -> jax.Array:
    """``x`` as ``[panels, groups, padded rows, values in an arena row]``."""
    x = x.reshape(layout.groups, layout.rows_per_group, layout.columns)
    pads = layout.padded_rows - layout.rows_per_group, layout.panels * per_row - layout.columns
    if any(pads):
        x = jnp.pad(x, ((0, 0), (0, pads[0]), (0, pads[1])))
    x = x.reshape(layout.groups, layout.padded_rows, layout.panels, per_row)
    return x.reshape(1, layout.groups, layout.padded_rows, per_row) if layout.panels == 1 else x.transpose(2, 0, 1, 3)


def _from_panels(x: jax.Array, layout: Layout) -> jax.Array:
    """The inverse of :func:`_to_panels`."""
    x = x[:, :, : layout.rows_per_group]
    if layout.itemsize == 2 and layout.panels <= 32:
        # On the CPU up to three times as fast as a transposition of 16-bit values.
        x = jnp.concatenate(list(x), axis=-1)
    else:
        x = x[0] if layout.panels == 1 else x.transpose(1, 2, 0, 3)
    return x.reshape(layout.groups, layout.rows_per_group, -1)[..., : layout.columns].reshape(layout.shape)


_UINT = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def _pack(x: jax.Array, element: Any) -> jax.Array:
    """Unsigned ``[..., n]`` of any width as the arena's elements, in memory order."""
    if x.dtype.itemsize == 2:
        # On the CPU up to four times as fast as XLA's own change of width.
        if element.itemsize == 4:
            return x[..., 0::2].astype(jnp.uint32) | (x[..., 1::2].astype(jnp.uint32) << 16)
        return jnp.stack([x.astype(jnp.int8), (x >> 8).astype(jnp.int8)], axis=-1).reshape(*x.shape[:-1], -1)
    return _reinterpret(x, element)


def _unpack(x: jax.Array, itemsize: int) -> jax.Array:
    """The arena's elements ``[..., m]`` as unsigned ``[..., n]`` of a width."""
    return _reinterpret(x, jnp.dtype(_UINT[itemsize]))


def _reinterpret(x: jax.Array, dtype: Any) -> jax.Array:
    """The same bytes of the last axis as another dtype."""
    ratio = dtype.itemsize // x.dtype.itemsize
    y = lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, ratio) if ratio > 1 else x, dtype)
    return y if y.ndim == x.ndim else y.reshape(*x.shape[:-1], -1)


def _blocked(x: jax.Array) -> jax.Array:
    """``[..., columns]`` as ``[..., blocks, 128]``, the last block filled up with zeros."""
    columns = x.shape[-1]
    return _pad_last(x, -columns % BLOCK).reshape(*x.shape[:-1], -(-columns // BLOCK), BLOCK)


def _unblocked(blocks: jax.Array, columns: int) -> jax.Array:
    """The inverse of :func:`_blocked`."""
    *rest, count, size = blocks.shape
    return blocks.reshape(*rest, count * size)[..., :columns]


def quantize_blocks(blocks: jax.Array, words: int) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Words, low words (None under one word) and scales of blocks ``[..., values]``, one scale a block."""
    x = blocks.astype(jnp.float32)
    levels = _LEVELS[words]
    # The largest magnitude by its bits, which order NaN above Inf above all numbers: XLA's floating-point maximum loses NaNs on the CPU.
    top = jnp.max(lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7FFFFFFF), axis=-1)
    finite = top < jnp.uint32(0x7F800000)
    amax = lax.bitcast_convert_type(top, jnp.float32)
    coded = finite & (amax >= _TINY)
    small = amax < levels * _TINY
    scale = jnp.where(coded, jnp.maximum(amax / levels, _TINY), 1.0)
    limit = jnp.where(small, jnp.floor(jnp.where(coded, amax, 0) / _TINY), levels)[..., None]
    v = jnp.clip(jnp.round(x / scale[..., None]), -limit, limit)
    v = jnp.where(coded[..., None], v, 0).astype(jnp.int32)
    scale = jnp.where(finite, jnp.where(coded, scale, 0), jnp.nan).astype(jnp.float32)
    if words == 1:
        return v.astype(jnp.int8), None, scale
    word = (v + 128) >> 8
    return word.astype(jnp.int8), (v - (word << 8)).astype(jnp.int8), scale


def _dequantize_blocks(word: jax.Array, low: jax.Array | None, scales: jax.Array) -> jax.Array:
    v = word.astype(jnp.int32)
    if low is not None:
        v = (v << 8) + low.astype(jnp.int32)
    return v.astype(jnp.float32) * scales[..., None]


def _pad_last(x: jax.Array, n: int) -> jax.Array:
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, n)]) if n else x


def _check_array(where: str, x: jax.Array, layout: Layout) -> None:
    if x.shape != layout.shape:
        raise ValueError(f"{where}: x must have the layout's shape {layout.shape}, got {x.shape}")
    if layout.quantized and not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{where}: storage {layout.storage} takes floating point, got {x.dtype}")
    if not layout.quantized and x.dtype != DTYPE_OF_STORAGE[layout.storage]:
        raise TypeError(f"{where}: storage {layout.storage} takes {DTYPE_OF_STORAGE[layout.storage]}, got {x.dtype}")


def _check_view(where: str, layout: Layout, view: View, home_rows: int) -> None:
    spans = row_spans(layout, view)
    parts = WORDS[layout.storage] * view.part_rows + -(-view.part_rows // (ROW_BYTES // 4)) if layout.quantized else 0
    end = max(spans[-1][1], parts) if spans else 0
    if spans and (spans[0][0] < 0 or end > home_rows):
        raise ValueError(f"{where}: {layout} at {view} needs rows {spans[0][0]} to {end}, its home has {home_rows}")
