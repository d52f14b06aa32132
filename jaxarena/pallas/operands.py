"""Where a kernel's operands lie: in the arena or in row-major arrays of their own, read and written by the same bulk copies.

A matrix is cut into **panels** of 128 bytes of every row (:mod:`jaxarena.panels`). In the arena, panel ``p`` of row ``r`` is arena row
``row + p * stride + r``; in a row-major array it is columns ``p * w`` to ``(p + 1) * w`` of row ``r``, with w values in 128 bytes.
:class:`Matrix` hides which.

Block scales lie in (panel, row) order, one f32 each: that of panel p, row r is number ``scale_first + p * scale_stride + r`` from arena
row ``scale_row`` on, or ``[p, r]`` of an array. A tile's scales may start inside an arena row, so :class:`RowScales` copies whole arena
rows and skips when it reads.

All numbers of a :class:`Place` are run-time int32, so that one compiled kernel serves every place: :func:`pack` puts them into one
small vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import ArrayLike

from jaxarena.kernels import ArenaTensor
from jaxarena.pallas.tiles import viewed

__all__ = ["Matrix", "Place", "RowScales", "pack", "place_of", "unpack"]

_PER_ROW = 32
"""Scales in an arena row."""


class Place(NamedTuple):
    """Where a matrix lies in the arena.

    Attributes:
      row: the arena row of panel 0, row 0; a multiple of 8.
      stride: arena rows from one panel to the next; a multiple of 8.
      scale_row: the arena row from which its scales are counted.
      scale_first: the number of the scale of panel 0, row 0.
      scale_stride: from one panel's scales to the next's.
    """

    row: ArrayLike
    stride: ArrayLike
    scale_row: ArrayLike = 0
    scale_first: ArrayLike = 0
    scale_stride: ArrayLike = 0


def place_of(tensor: ArenaTensor, scales: ArenaTensor | None = None) -> Place:
    """The place of a step's tensor; of words, with that of their scales, a flat ``[panels, rows]``."""
    if scales is None:
        return Place(tensor.row, tensor.panel_stride)
    assert tensor.site.matrix is not None
    return Place(tensor.row, tensor.panel_stride, scales.row, 0, tensor.site.matrix[0])


def pack(places: Sequence[Place | None]) -> jax.Array:
    """The numbers of all places, int32 ``[5 * len(places)]``; zeros for a row-major array (None)."""
    return jnp.stack([jnp.asarray(v, jnp.int32) for place in places for v in (place or Place(0, 0))])


def unpack(offsets_gmem: Any, index: int) -> Place:
    """Place number ``index`` of a packed vector, as scalars in a kernel."""
    return Place(*(offsets_gmem[index * len(Place._fields) + i] for i in range(len(Place._fields))))


@dataclass(frozen=True)
class Matrix:
    """A matrix in global memory: ``ref`` is the arena and ``place`` says where, or ``ref`` is its own row-major array."""

    ref: Any
    place: Place | None = None

    def tile(self, row: Any, rows: int, panel: Any) -> Any:
        """Panel ``panel`` of rows ``row`` to ``row + rows``; in the arena ``row`` must be a multiple of 8."""
        if self.place is None:
            width = 128 // jnp.dtype(self.ref.dtype).itemsize
            return self.ref.at[pl.ds(row, rows), pl.ds(panel * width, width)]
        start = self.place.row + panel * self.place.stride + row
        return self.ref.at[pl.ds(pl.multiple_of(start, 8), rows), :]


@dataclass(frozen=True)
class RowScales:
    """The block scales of a matrix' rows, ``f32[panels, rows]``, in the arena or in an array."""

    ref: Any
    place: Place | None = None

    @staticmethod
    def smem(stages: int, rows: int, in_arena: bool, *, interpret: bool) -> Any:
        """Scratch for the scales of ``rows`` rows (a multiple of 32), ``stages`` times."""
        if not in_arena:
            return plgpu.SMEM((stages, rows), jnp.float32)
        whole = rows // _PER_ROW + 1
        return viewed(plgpu.SMEM((stages, whole, 128), jnp.int8), plgpu.SMEM((stages, whole * _PER_ROW), jnp.float32), interpret=interpret)

    def copy(self, smem: Any, slot: Any, row: Any, rows: int, panel: Any, barrier: Any) -> None:
        """Starts to copy the scales of panel ``panel``, rows ``row`` to ``row + rows``."""
        if self.place is None:
            plgpu.copy_gmem_to_smem(self.ref.at[panel, pl.ds(row, rows)], smem.at[slot], barrier)
            return
        start = self.place.scale_row + _first_row(self._number(row, panel), rows)
        plgpu.copy_gmem_to_smem(self.ref.at[pl.ds(start, rows // _PER_ROW + 1), :], smem[0].at[slot], barrier)

    def load(self, smem: Any, slot: Any, row: Any, rows: int, panel: Any, start: Any, count: int, *, interpret: bool) -> jax.Array:
        """Of the copied scales, ``count`` from number ``start`` on, laid out as the rows of a product's result."""
        layout = plgpu.Layout.WGMMA.reduce(1)
        if self.place is None:
            return plgpu.load(smem.at[slot, pl.ds(start, count)], layout=layout)
        number = self._number(row, panel)
        skip = number - _PER_ROW * _first_row(number, rows)
        if interpret:
            everything = lax.bitcast_convert_type(smem[0][slot].reshape(-1, 4), jnp.float32)
            return lax.dynamic_slice_in_dim(everything, skip + start, count)
        return plgpu.load(smem[1].at[slot, pl.ds(skip + start, count)], layout=layout)

    def _number(self, row: Any, panel: Any) -> Any:
        assert self.place is not None
        return self.place.scale_first + panel * self.place.scale_stride + row


def _first_row(number: Any, rows: int) -> Any:
    """The first of the arena rows to copy for scales ``number`` to ``number + rows``, counted from ``scale_row``.

    They end with the row of the last scale: nothing past the scales is read, which other blocks of the launch may be writing.
    """
    return lax.shift_right_arithmetic(number + (rows - 1), jnp.int32(5)) - rows // _PER_ROW
