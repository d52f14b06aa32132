"""Quantization of rows: bf16 to int8 words with one scale for each 128 values of a row, as :func:`jaxarena.storage.quantize` defines::

    scale = amax / 127,   word = round(x / scale)        a block of zeros: scale 0;   a block with NaN or Inf: scale NaN, words 0

The kernel multiplies by 1 / scale: a word may differ by one from the reference's where x / scale lies within rounding of a half.

Memory-bound: it reads 2 bytes and writes 1 + 1/32 a value. Each warpgroup works alone on pieces of 64 rows by 128 values (16 KiB), the
next ``depth`` of them on their way.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxarena.pallas.operands import Matrix, Place, pack, unpack
from jaxarena.pallas.tiles import read_bytes, tile, viewed, write_bytes

__all__ = ["QuantizeConfig", "quantize_rows", "supports"]

_TINY = float(jnp.finfo(jnp.float32).tiny)
_ROWS, _BLOCK, _HALF = 64, 128, 64


@dataclass(frozen=True)
class QuantizeConfig:
    """How the work is spread.

    Attributes:
      warpgroups: a block, 1 to 4.
      depth: pieces a warpgroup has on their way, or in work.
      blocks: a multiprocessor.

    Raises:
      ValueError: for a field outside what its line says.
    """

    warpgroups: int = 4
    depth: int = 2
    blocks: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.warpgroups <= 4:
            raise ValueError(f"QuantizeConfig: warpgroups must be 1 to 4, got {self.warpgroups}")
        for name in ("depth", "blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"QuantizeConfig: {name} must be at least 1, got {getattr(self, name)}")


def supports(m: int, k: int, *, x_in_arena: bool, out_in_arena: bool) -> str | None:
    """None if the kernel takes this array, else why not."""
    if not (m and k):
        return "the array is empty"
    if x_in_arena and 0 < k % _BLOCK <= _HALF:
        return f"the last panel of bf16 values must reach into the last block of 128, got k = {k}"
    if not (x_in_arena and out_in_arena) and k % 64:
        return f"rows of arrays that are not in the arena must be a multiple of 64 values, got k = {k}"
    if m % 8:
        return f"arrays must have multiples of 8 rows, got {m}"
    return None


def quantize_rows(
    arena: Any,
    x: Place | jax.Array,
    out: Place | None = None,
    *,
    m: int,
    k: int,
    config: QuantizeConfig | None = None,
    multiprocessors: int = 132,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array] | None:
    """Words and scales of ``x``.

    Args:
      arena: the arena's ref; None when no operand is a place.
      x: bf16 ``[m, k]``, or its place.
      out: where words and scales go (``scale_first`` and ``scale_stride`` multiples of 8); None: to arrays of their own.
      m: rows; in the arena with the pads between groups.
      k: values in a row.
      config: overrides the default.
      multiprocessors: of the device.
      interpret: whether to interpret the kernel on the CPU, looking for races.

    Returns:
      int8 ``[m, k]`` and float32 ``[ceil(k / 128), m]``; None when ``out`` is a place.

    Raises:
      ValueError: when :func:`supports` has a reason against it.
    """
    x_in_arena, out_in_arena = isinstance(x, Place), isinstance(out, Place)
    reason = supports(m, k, x_in_arena=x_in_arena, out_in_arena=out_in_arena)
    if reason:
        raise ValueError(f"quantize_rows: {reason}")
    offsets = pack([a if isinstance(a, Place) else None for a in (x, out)])
    array = None if isinstance(x, Place) else x
    return _launch(arena, offsets, array, m, k, x_in_arena, out_in_arena, config or QuantizeConfig(), multiprocessors, interpret)


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6, 7, 8, 9))
def _launch(
    arena: Any,
    offsets: jax.Array,
    x: jax.Array | None,
    m: int,
    k: int,
    x_in_arena: bool,
    out_in_arena: bool,
    config: QuantizeConfig,
    multiprocessors: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array] | None:
    c = config
    panels, row_tiles = -(-k // _BLOCK), -(-m // _ROWS)
    pieces = panels * row_tiles
    blocks = min(multiprocessors * c.blocks, -(-pieces // c.warpgroups))
    stride = blocks * c.warpgroups

    def body(offsets_gmem: Any, *refs: Any) -> None:
        remaining = list(refs)
        x_ref = arena if x_in_arena else remaining.pop(0)
        words_ref, scales_ref = (arena, None) if out_in_arena else (remaining.pop(0), remaining.pop(0))
        x_smem, words_smem, scales_smem, full = remaining
        source = Matrix(x_ref, unpack(offsets_gmem, 0) if x_in_arena else None)
        words = Matrix(words_ref, unpack(offsets_gmem, 1) if out_in_arena else None)
        warpgroup = lax.axis_index("warpgroup")
        first = lax.axis_index("block") * c.warpgroups + warpgroup
        mine = lax.div(pieces - first + stride - 1, jnp.int32(stride))
        numbers = x_smem[1] if x_in_arena else x_smem
        scales = scales_smem[1] if out_in_arena else scales_smem

        def piece(i: Any) -> tuple[Any, Any, Any]:
            index = first + i * stride
            panel = lax.div(index, jnp.int32(row_tiles))
            row = (index - panel * row_tiles) * _ROWS
            # In the arena the last piece starts further up, so that nothing past the matrix is read; what it does twice, it does alike.
            start = jnp.minimum(row, max(m - _ROWS, 0)) if x_in_arena else row
            return row, start, panel

        def slot(i: Any) -> Any:
            return warpgroup * c.depth + lax.rem(i, jnp.int32(c.depth))

        def fetch(i: Any) -> None:
            _, start, panel = piece(i)
            for half in range(2):
                into = (x_smem[0] if x_in_arena else x_smem).at[slot(i), half]
                plgpu.copy_gmem_to_smem(source.tile(start, _ROWS, 2 * panel + half), into, full.at[slot(i)])

        def step(i: Any, _: Any) -> Any:
            row, start, panel = piece(i)
            plgpu.barrier_wait(full.at[slot(i)])
            halves = []
            for half in range(2):
                if x_in_arena:
                    read_bytes(x_smem, (slot(i), half), interpret=interpret)
                halves.append(plgpu.load(numbers.at[slot(i), half], layout=plgpu.Layout.WGMMA).astype(jnp.float32))
            quantized, scale = _quantize(halves)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for half in range(2):
                words_smem[warpgroup, half] = quantized[half]
            scales[warpgroup] = scale
            if out_in_arena:
                write_bytes(scales_smem, warpgroup, interpret=interpret)
            plgpu.commit_smem()

            @pl.when(i + c.depth < mine)
            def _() -> None:
                fetch(i + c.depth)

            def store(at: int, rows: int) -> None:
                for half in range(2):
                    target = words.tile(start + at, rows, panel).at[:, pl.ds(half * _HALF, _HALF)]
                    plgpu.copy_smem_to_gmem(words_smem.at[warpgroup, half, pl.ds(at, rows)], target)

            def store_scales(at: int, rows: int) -> None:
                if not out_in_arena:
                    source_scales = scales.at[warpgroup, pl.ds(at, rows)]
                    plgpu.copy_smem_to_gmem(source_scales, scales_ref.at[panel, pl.ds(start + at, rows)])
                    return
                place = words.place
                assert place is not None
                for eight in range(at, at + rows, 8):
                    number = place.scale_first + panel * place.scale_stride + start + eight
                    target = arena.at[
                        pl.ds(place.scale_row + lax.shift_right_logical(number, jnp.int32(5)), 1),
                        pl.ds(pl.multiple_of(lax.bitwise_and(number, jnp.int32(31)) * 4, 32), 32),
                    ]
                    plgpu.copy_smem_to_gmem(scales_smem[0].at[warpgroup, pl.ds(eight // 8, 1)], target)

            whole = (start >= row) & (start + _ROWS <= m)

            @pl.when(whole)
            def _() -> None:
                store(0, _ROWS)
                store_scales(0, _ROWS)

            @pl.when(jnp.logical_not(whole))
            def _() -> None:
                for at in range(0, _ROWS, 8):

                    @pl.when((start + at >= row) & (start + at < m))
                    def _(at: int = at) -> None:
                        store(at, 8)
                        store_scales(at, 8)

            return 0

        for i in range(c.depth):

            @pl.when(i < mine)
            def _(i: int = i) -> None:
                fetch(jnp.int32(i))

        lax.fori_loop(0, mine, step, 0)
        plgpu.wait_smem_to_gmem(0)

    slots = c.warpgroups * c.depth
    x_type = tile((slots, 2, _ROWS, _HALF), jnp.bfloat16)
    scales_type = plgpu.SMEM((c.warpgroups, _ROWS), jnp.float32)
    if x_in_arena:
        x_type = viewed(tile((slots, 2, _ROWS, 128), jnp.int8), x_type, interpret=interpret)
    if out_in_arena:
        scales_type = viewed(plgpu.SMEM((c.warpgroups, 8, 32), jnp.int8), scales_type, interpret=interpret)
    results = (jax.ShapeDtypeStruct((m, k), jnp.int8), jax.ShapeDtypeStruct((panels, m), jnp.float32))
    made = plgpu.kernel(
        body,
        out_type=() if out_in_arena else results,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=c.warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            x_type,
            tile((c.warpgroups, 2, _ROWS, _HALF), jnp.int8, _HALF),
            scales_type,
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        ],
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(*([offsets] if x is None else [offsets, x]))
    if out_in_arena:
        return None
    words, scales = made
    return words, scales


def _quantize(halves: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """Words of two halves of a block, float32 ``[64, 64]`` each, and its scales ``[64]``."""
    # Magnitudes by their bits, which order NaN above Inf above all numbers.
    tops = [jnp.max(lax.bitcast_convert_type(h, jnp.int32) & 0x7FFFFFFF, axis=1) for h in halves]
    top = jnp.maximum(*tops)
    amax = lax.bitcast_convert_type(top, jnp.float32)
    finite = top < 0x7F800000
    coded = finite & (top >= 0x00800000)
    scale = jnp.where(coded, jnp.maximum(amax * (1 / 127), _TINY), 1.0)
    inverse = jnp.where(coded, 1.0 / scale, 0.0)
    # In a block too small for a normal scale words stay at or below amax / scale, so that it decodes within its own amax.
    limit = jnp.where(amax < 127 * _TINY, (amax * inverse).astype(jnp.int32), 127)
    limit = jnp.where(coded, limit, 0)
    shape = halves[0].shape
    wide_limit = lax.broadcast_in_dim(limit, shape, [0])
    words = []
    for half in halves:
        # Adding 3 * 2^22 rounds to the nearest integer, which then stands in the low bits.
        rounded = lax.bitcast_convert_type(half * lax.broadcast_in_dim(inverse, shape, [0]) + 12582912.0, jnp.int32) - 0x4B400000
        words.append(jnp.maximum(jnp.minimum(rounded, wide_limit), 0 - wide_limit).astype(jnp.int8))
    return words, jnp.where(finite, jnp.where(coded, scale, 0.0), jnp.nan)
