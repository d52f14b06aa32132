"""Where an array's bytes lie in arena rows, and which parts of an array are views of it.

**Panels.** An array of ``G`` groups of ``R`` rows of ``C`` bytes lies as ``P = ceil(C / 128)`` panels: panel ``p`` holds bytes
``128 p .. 128 p + 127`` of every row, one arena row for each row. Every group starts at a multiple of 8 arena rows, so with
``Rp = round_up(R, 8)``, row ``r`` of group ``g`` has its panel ``p`` at arena row ``p * (G * Rp) + g * Rp + r``. Rows past ``R``
and bytes past ``C`` are pads and hold zeros.

**Quantized.** One byte a value (the *words*), so that a panel is a block of 128 values; under two words a second part of the same
size (the *low words*); then one f32 *scale* for each panel and row, in the order of the words' arena rows. So the number of a
word's arena row within its part is also the number of its scale.

**Flat** (``row_ndim = 0``). All bytes in row-major order, padded to ``ALIGN``: vectors such as a log-sum-exp.

**Views.** A part of an array is a *view* when its own panels lie among the array's: a :class:`View` gives the first arena row and
the distances between panels and between groups. A part is a view only if what would be its pads are the array's own pads, because
whoever writes a part also writes its pads, and whoever reads it relies on the zeros there. The functions that look for a view
return None when there is none: then the part needs a copy, an array of its own.

    >>> qkv = Layout((4, 100, 384), "bf16", 1)            # 4 sequences of 100 rows of 768 bytes: 6 panels of 4 * 104 rows
    >>> columns(qkv, full_view(qkv), 128, 256)            # the second third: panels 2 and 3
    (Layout(shape=(4, 100, 128), storage='bf16', row_ndim=1), View(row=832, panel_stride=416, group_stride=104, part_rows=0))
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from jaxarena._arena_types import ALIGN, ITEMSIZE, ROW_BYTES, round_up

__all__ = [
    "ROW_GRANULE",
    "WORDS",
    "Layout",
    "QuantParts",
    "View",
    "array_bytes",
    "columns",
    "full_view",
    "quant_parts",
    "reshape",
    "row_spans",
    "slice_groups",
    "slice_rows",
]

ROW_GRANULE = 8
"""Groups, and row slices that are views, start at a multiple of this many arena rows."""

WORDS = {"int8": 1, "int8x2": 2}
"""The quantized storages, and how many int8 words each value has."""


@dataclass(frozen=True)
class Layout:
    """How an array lies in arena rows.

    Attributes:
      shape: the array's shape.
      storage: a raw storage (``f32``, ``i32``, ``u32``, ``bf16``, ``f16``, ``i16``, ``u16``, ``i8``, ``u8``, ``bool``) or a
        quantized one (``int8``: one word, ``int8x2``: two words).
      row_ndim: how many trailing axes lie side by side in one row. The axis before them counts rows, those before it groups.
        0: flat, raw storages only.

    Raises:
      ValueError: for an unknown storage, a negative size, a ``row_ndim`` past the shape, or a flat quantized array.
    """

    shape: tuple[int, ...]
    storage: str
    row_ndim: int

    def __post_init__(self) -> None:
        if self.storage not in ITEMSIZE and self.storage not in WORDS:
            raise ValueError(f"Layout: storage {self.storage!r} is unknown; supported: {', '.join((*ITEMSIZE, *WORDS))}")
        if any(n < 0 for n in self.shape):
            raise ValueError(f"Layout: shape must have no negative size, got {self.shape}")
        if not 0 <= self.row_ndim <= len(self.shape):
            raise ValueError(f"Layout: row_ndim must be 0 to {len(self.shape)} for shape {self.shape}, got {self.row_ndim}")
        if self.quantized and not self.row_ndim:
            raise ValueError(f"Layout: storage {self.storage!r} needs rows to quantize along: row_ndim must be at least 1, got 0")

    @property
    def quantized(self) -> bool:
        return self.storage in WORDS

    @property
    def flat(self) -> bool:
        return self.row_ndim == 0

    @property
    def itemsize(self) -> int:
        """Bytes of one value in one part: 1 when quantized."""
        return ITEMSIZE.get(self.storage, 1)

    @cached_property
    def size(self) -> int:
        """How many values the array has."""
        return math.prod(self.shape)

    @cached_property
    def columns(self) -> int:
        """Values in one row; all values when flat."""
        return math.prod(self.shape[-self.row_ndim :]) if self.row_ndim else self.size

    @cached_property
    def groups(self) -> int:
        """Groups of rows that each start at a multiple of 8 arena rows; 1 when flat."""
        return math.prod(self.shape[: max(len(self.shape) - self.row_ndim - 1, 0)]) if self.row_ndim else 1

    @property
    def rows_per_group(self) -> int:
        """Rows in a group, without pads; when flat, the arena rows that hold values."""
        if not self.row_ndim:
            return -(-self.row_bytes // ROW_BYTES)
        return self.shape[-self.row_ndim - 1] if len(self.shape) > self.row_ndim else 1

    @property
    def padded_rows(self) -> int:
        """Arena rows of a group in one panel."""
        return round_up(self.rows_per_group, ROW_GRANULE)

    @property
    def rows(self) -> int:
        """Arena rows of one panel: all groups, with pads."""
        return self.groups * self.padded_rows

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in one part; of the whole array when flat."""
        return self.columns * self.itemsize

    @property
    def panels(self) -> int:
        """Panels of one part; 1 when flat (0 for an array without values)."""
        if not self.row_ndim:
            return min(self.row_bytes, 1)
        return -(-self.row_bytes // ROW_BYTES)

    @property
    def part_rows(self) -> int:
        """Arena rows of the words; of the whole array when raw."""
        return self.panels * self.rows if self.size else 0

    @cached_property
    def bytes(self) -> int:
        """Bytes of all parts, each aligned; 0 for an array without values."""
        words = self.part_rows * ROW_BYTES
        if not self.quantized:
            return words
        return WORDS[self.storage] * words + _scale_bytes(self.part_rows)


@dataclass(frozen=True)
class View:
    """Where a layout's rows lie within one slot of its home, in arena rows from the slot's first row.

    Panel ``p``, group ``g``, row ``r`` lies at ``row + p * panel_stride + g * group_stride + r``.

    Attributes:
      row: the first arena row.
      panel_stride: from one panel to the next.
      group_stride: from one group to the next.
      part_rows: arena rows of one part of a quantized home, the distance from words to low words; 0 for raw storage.
    """

    row: int
    panel_stride: int
    group_stride: int
    part_rows: int = 0


class QuantParts(NamedTuple):
    """Byte offsets of a quantized array's parts."""

    words: int
    low_words: int | None
    scales: int


Part = tuple[Layout, View]


def array_bytes(layout: Layout) -> int:
    """Bytes of an array in the arena: its rows with pads or, quantized, words, low words and scales, each part aligned."""
    return layout.bytes


def quant_parts(layout: Layout, offset: int) -> QuantParts:
    """Where the parts of a quantized array that starts at byte ``offset`` lie.

    Raises:
      ValueError: for a raw storage.
    """
    if not layout.quantized:
        raise ValueError(f"quant_parts: storage {layout.storage!r} has one part; quantized storages: {', '.join(WORDS)}")
    part = layout.part_rows * ROW_BYTES
    words = WORDS[layout.storage]
    return QuantParts(offset, offset + part if words == 2 else None, offset + words * part)


def full_view(layout: Layout) -> View:
    """The view that is the whole array."""
    return View(0, layout.rows, layout.padded_rows, layout.part_rows if layout.quantized else 0)


def row_spans(layout: Layout, view: View) -> tuple[tuple[int, int], ...]:
    """The runs ``[start, stop)`` of arena rows, pads included, that a view covers in the first part of its home, in order."""
    if not layout.size:
        return ()
    panels, groups, rows = layout.panels, layout.groups, layout.padded_rows
    if groups == 1 or view.group_stride == rows:
        groups, rows = 1, groups * rows
    if groups == 1 and (panels == 1 or view.panel_stride == rows):
        panels, rows = 1, panels * rows
    starts = (view.row + p * view.panel_stride + g * view.group_stride for p in range(panels) for g in range(groups))
    return tuple((start, start + rows) for start in starts)


def reshape(layout: Layout, view: View, new_shape: tuple[int, ...]) -> Part | None:
    """The view of ``layout`` under another shape of as many values, or None.

    A row must stay a row: some trailing axes of the new shape hold exactly the columns. Rows may be grouped differently only if
    neither grouping has pads. A flat array has every shape.

    Raises:
      ValueError: when the sizes differ.
    """
    if math.prod(new_shape) != layout.size:
        raise ValueError(f"reshape: shape {layout.shape} has {layout.size} values, {new_shape} has {math.prod(new_shape)}")
    if layout.flat:
        return Layout(new_shape, layout.storage, 0), view
    if not layout.size:
        return Layout(new_shape, layout.storage, min(layout.row_ndim, len(new_shape))), view
    for row_ndim in range(1, len(new_shape) + 1):
        new = Layout(new_shape, layout.storage, row_ndim)
        if new.columns == layout.columns:
            group_stride = _regroup(layout, view, new)
            if group_stride is not None:
                return new, replace(view, group_stride=group_stride)
    return None


def _regroup(old: Layout, view: View, new: Layout) -> int | None:
    """The group stride under which ``new``, of as many rows, lies on the rows of ``old``."""
    if (old.groups, old.rows_per_group) == (new.groups, new.rows_per_group):
        return view.group_stride
    if old.groups > 1 and view.group_stride != old.rows_per_group:
        return None
    if new.groups > 1 and new.rows_per_group % ROW_GRANULE:
        return None
    return new.padded_rows


def columns(layout: Layout, view: View, start: int, stop: int) -> Part | None:
    """Columns ``start`` to ``stop`` of every row (of the trailing ``row_ndim`` axes, flattened), or None.

    The slice must start at a multiple of 128 bytes, a panel, and end at one or at the array's last column. Quantized, a panel is
    a block of 128 values: a part whose rows start inside a block is no view. Flat arrays have no columns.

    Returns:
      A layout of shape ``(*leading axes, stop - start)`` with ``row_ndim`` 1, and its view.

    Raises:
      ValueError: for a slice outside the row.
    """
    _check_slice("columns", start, stop, layout.columns)
    first, last = start * layout.itemsize, stop * layout.itemsize
    if layout.flat or first % ROW_BYTES or (last % ROW_BYTES and stop != layout.columns):
        return None
    part = Layout((*layout.shape[: -layout.row_ndim], stop - start), layout.storage, 1)
    return part, replace(view, row=view.row + first // ROW_BYTES * view.panel_stride)


def slice_rows(layout: Layout, view: View, start: int, stop: int) -> Part | None:
    """Rows ``start`` to ``stop`` of every group, or None.

    The slice must start at a multiple of 8 rows, and end at one or at the group's last row. A flat array is sliced along its
    first axis, at multiples of ALIGN bytes.

    Raises:
      ValueError: for a slice outside the axis.
    """
    if layout.flat:
        return _slice_flat(layout, view, start, stop)
    _check_slice("slice_rows", start, stop, layout.rows_per_group)
    axis = len(layout.shape) - layout.row_ndim - 1
    if axis < 0 or start % ROW_GRANULE or (stop % ROW_GRANULE and stop != layout.rows_per_group):
        return None
    part = Layout((*layout.shape[:axis], stop - start, *layout.shape[axis + 1 :]), layout.storage, layout.row_ndim)
    return part, replace(view, row=view.row + start)


def slice_groups(layout: Layout, view: View, start: int, stop: int) -> Part | None:
    """Entries ``start`` to ``stop`` of the first axis, which counts groups, or None when it does not.

    A flat array is sliced along its first axis, at multiples of ALIGN bytes.

    Raises:
      ValueError: for a slice outside the axis.
    """
    if layout.flat:
        return _slice_flat(layout, view, start, stop)
    if len(layout.shape) < layout.row_ndim + 2:
        return None
    _check_slice("slice_groups", start, stop, layout.shape[0])
    part = Layout((stop - start, *layout.shape[1:]), layout.storage, layout.row_ndim)
    inner = math.prod(layout.shape[1 : -layout.row_ndim - 1])
    return part, replace(view, row=view.row + start * inner * view.group_stride)


def _slice_flat(layout: Layout, view: View, start: int, stop: int) -> Part | None:
    if not layout.shape:
        return None
    _check_slice("slice of a flat array", start, stop, layout.shape[0])
    step = math.prod(layout.shape[1:]) * layout.itemsize
    if start * step % ALIGN or (stop * step % ALIGN and stop != layout.shape[0]):
        return None
    part = Layout((stop - start, *layout.shape[1:]), layout.storage, 0)
    return part, View(view.row + start * step // ROW_BYTES, part.rows, part.padded_rows)


def _check_slice(what: str, start: int, stop: int, size: int) -> None:
    if not 0 <= start <= stop <= size:
        raise ValueError(f"{what}: [{start}, {stop}) is outside [0, {size})")


def _scale_bytes(part_rows: int) -> int:
    return round_up(4 * part_rows, ALIGN)
