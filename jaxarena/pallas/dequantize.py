"""Rows of int8 words with one scale for each 128 values (:mod:`jaxarena.pallas.quantize`) to bf16::

    x = round to bf16 (scale * word)        a block whose scale is NaN: NaN

so that a gradient in bf16 can be computed from activations kept as words. Bits are those of
:func:`jaxarena.ops.quantized.row_values`. A weight's tiles are rows whose scales are repeated.

Memory-bound: it reads 1 + 1/32 bytes and writes 2 a value. Each warpgroup works alone on pieces of 64 rows by 128 values, the next
``depth`` of them on their way.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxarena.pallas.operands import Matrix, Place, RowScales, pack, unpack
from jaxarena.pallas.quantize import QuantizeConfig
from jaxarena.pallas.tiles import tile, viewed, write_bytes

__all__ = ["dequantize_rows", "supports"]

_ROWS, _BLOCK, _HALF = 64, 128, 64


def supports(m: int, k: int, *, words_in_arena: bool, out_in_arena: bool) -> str | None:
    """None if the kernel takes these words, else why not."""
    if not (m and k):
        return "the array is empty"
    if not (words_in_arena and out_in_arena) and k % _HALF:
        return f"rows of arrays that are not in the arena must be a multiple of 64 values, got k = {k}"
    if m % 8:
        return f"arrays must have multiples of 8 rows, got {m}"
    return None


class _Form(NamedTuple):
    m: int
    k: int
    words_in_arena: bool
    out_in_arena: bool


def dequantize_rows(
    arena: Any,
    x: Place | tuple[jax.Array, jax.Array],
    out: Place | None = None,
    *,
    m: int,
    k: int,
    config: QuantizeConfig | None = None,
    multiprocessors: int = 132,
    interpret: bool = False,
) -> jax.Array | None:
    """The values of words and scales.

    Args:
      arena: the arena's ref; None when no operand is a place.
      x: words int8 ``[m, k]`` and scales float32 ``[ceil(k / 128), m]``, or their place.
      out: where the values go; None: to an array of their own.
      m: rows; in the arena with the pads between groups.
      k: values in a row.
      config: overrides the default.
      multiprocessors: of the device.
      interpret: whether to interpret the kernel on the CPU, looking for races.

    Returns:
      bf16 ``[m, k]``; None when ``out`` is a place.

    Raises:
      ValueError: when :func:`supports` has a reason against it.
    """
    form = _Form(m, k, isinstance(x, Place), out is not None)
    if reason := supports(m, k, words_in_arena=form.words_in_arena, out_in_arena=form.out_in_arena):
        raise ValueError(f"dequantize_rows: {reason}")
    offsets = pack([x if isinstance(x, Place) else None, out])
    return _launch(arena, offsets, () if isinstance(x, Place) else x, form, config or QuantizeConfig(), multiprocessors, interpret)


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _launch(
    arena: Any,
    offsets: jax.Array,
    x: tuple[jax.Array, ...],
    form: _Form,
    config: QuantizeConfig,
    multiprocessors: int,
    interpret: bool,
) -> jax.Array | None:
    c, m, k = config, form.m, form.k
    panels, row_tiles = -(-k // _BLOCK), -(-m // _ROWS)
    pieces = panels * row_tiles
    blocks = min(multiprocessors * c.blocks, -(-pieces // c.warpgroups))
    stride = blocks * c.warpgroups

    def body(offsets_gmem: Any, *refs: Any) -> None:
        remaining = list(refs)
        words_ref, scales_ref = (arena, arena) if form.words_in_arena else (remaining.pop(0), remaining.pop(0))
        out_ref = arena if form.out_in_arena else remaining.pop(0)
        words_smem, scales_smem, out_smem, full = remaining
        place = unpack(offsets_gmem, 0) if form.words_in_arena else None
        words, scales = Matrix(words_ref, place), RowScales(scales_ref, place)
        out = Matrix(out_ref, unpack(offsets_gmem, 1) if form.out_in_arena else None)
        as_bytes, as_numbers = out_smem if form.out_in_arena else (out_smem, out_smem)
        warpgroup = lax.axis_index("warpgroup")
        first = lax.axis_index("block") * c.warpgroups + warpgroup
        mine = lax.div(pieces - first + stride - 1, jnp.int32(stride))

        def piece(i: Any) -> tuple[Any, Any, Any]:
            index = first + i * stride
            panel = lax.div(index, jnp.int32(row_tiles))
            row = (index - panel * row_tiles) * _ROWS
            # The last piece starts further up, so that nothing past the words is read; what it does twice, it does alike.
            return row, jnp.minimum(row, max(m - _ROWS, 0)), panel

        def slot(i: Any) -> Any:
            return warpgroup * c.depth + lax.rem(i, jnp.int32(c.depth))

        def fetch(i: Any) -> None:
            _, start, panel = piece(i)
            for half in range(2):
                source = words.tile(start, _ROWS, panel).at[:, pl.ds(half * _HALF, _HALF)]
                plgpu.copy_gmem_to_smem(source, words_smem.at[slot(i), half], full.at[slot(i)])
            scales.copy(scales_smem, slot(i), start, _ROWS, panel, full.at[slot(i)])

        def step(i: Any, _: Any) -> Any:
            row, start, panel = piece(i)
            plgpu.barrier_wait(full.at[slot(i)])
            scale = scales.load(scales_smem, slot(i), start, _ROWS, panel, 0, _ROWS, interpret=interpret)
            wide = lax.broadcast_in_dim(scale, (_ROWS, _HALF), [0])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for half in range(2):
                word = plgpu.load(words_smem.at[slot(i), half], layout=plgpu.Layout.WGMMA)
                x = word.astype(jnp.int32).astype(jnp.float32) * wide
                if k % _BLOCK:
                    # In pads 0 times a NaN would be a NaN.
                    column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=plgpu.Layout.WGMMA)
                    x = jnp.where(column < k - panel * _BLOCK - half * _HALF, x, 0.0)
                as_numbers[warpgroup, half] = x.astype(jnp.bfloat16)
                if form.out_in_arena:
                    write_bytes(out_smem, (warpgroup, half), interpret=interpret)
            plgpu.commit_smem()

            @pl.when(i + c.depth < mine)
            def _() -> None:
                fetch(i + c.depth)

            def store(at: int, count: int) -> None:
                for half in range(2):

                    @pl.when(panel * _BLOCK + half * _HALF < k)
                    def _(half: int = half) -> None:
                        target = out.tile(start + at, count, 2 * panel + half)
                        plgpu.copy_smem_to_gmem(as_bytes.at[warpgroup, half, pl.ds(at, count)], target)

            whole = (start >= row) & (start + _ROWS <= m)

            @pl.when(whole)
            def _() -> None:
                store(0, _ROWS)

            @pl.when(jnp.logical_not(whole))
            def _() -> None:
                for at in range(0, _ROWS, 8):

                    @pl.when((start + at >= row) & (start + at < m))
                    def _(at: int = at) -> None:
                        store(at, 8)

            return 0

        for i in range(c.depth):

            @pl.when(i < mine)
            def _(i: int = i) -> None:
                fetch(jnp.int32(i))

        lax.fori_loop(0, mine, step, 0)
        plgpu.wait_smem_to_gmem(0)

    out_type = tile((c.warpgroups, 2, _ROWS, _HALF), jnp.bfloat16)
    if form.out_in_arena:
        out_type = viewed(tile((c.warpgroups, 2, _ROWS, 128), jnp.int8), out_type, interpret=interpret)
    slots = c.warpgroups * c.depth
    made = plgpu.kernel(
        body,
        out_type=() if form.out_in_arena else jax.ShapeDtypeStruct((m, k), jnp.bfloat16),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=c.warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            tile((slots, 2, _ROWS, _HALF), jnp.int8, _HALF),
            RowScales.smem(slots, _ROWS, form.words_in_arena, interpret=interpret),
            out_type,
            plgpu.Barrier(num_arrivals=3, num_barriers=slots),
        ],
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(offsets, *x)
    return None if form.out_in_arena else made
