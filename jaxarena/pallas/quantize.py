"""Quantization of rows, or of columns: bf16 or float32 to int8 words with one scale for each 128 values (:mod:`jaxarena.pallas.codes`).

- :func:`quantize_rows`: blocks of 128 along a row, what a projection sums over.
- :func:`quantize_columns`: blocks of 128 rows of a column, and the words transposed, ``[k, m]``: what ``dw = x^T dy`` sums over, as the
  tensor cores read int8 operands (with the contracted axis last). The transposition is a product with the identity.

Memory-bound: in one word of bf16 it reads 2 bytes and writes 1 + 1/32 a value. Each warpgroup works alone on pieces of 64 rows of the
result by 128 values, the next ``depth`` of them on their way.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxarena.pallas.codes import encode, magnitudes, transposed, write_identity
from jaxarena.pallas.operands import Matrix, Place, pack, unpack
from jaxarena.pallas.tiles import read_bytes, tile, viewed, write_bytes

__all__ = ["QuantizeConfig", "quantize_columns", "quantize_rows", "supports", "supports_columns"]

_ROWS, _BLOCK = 64, 128


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


_WIDE = QuantizeConfig(warpgroups=2)
"""Where the default would take more shared memory than there is: for float32, and for two words of columns."""


def supports(m: int, k: int, *, x_in_arena: bool, out_in_arena: bool, dtype: Any = jnp.bfloat16) -> str | None:
    """None if :func:`quantize_rows` takes this array, else why not."""
    if not (m and k):
        return "the array is empty"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        return f"the kernel takes bfloat16 and float32, not {jnp.dtype(dtype)}"
    width = 128 // jnp.dtype(dtype).itemsize
    if x_in_arena and 0 < k % _BLOCK <= _BLOCK - width:
        return f"the last panel of {jnp.dtype(dtype)} values must reach into the last part of a block of 128, got k = {k}"
    if not (x_in_arena and out_in_arena) and k % 64:
        return f"rows of arrays that are not in the arena must be a multiple of 64 values, got k = {k}"
    if m % 8:
        return f"arrays must have multiples of 8 rows, got {m}"
    return None


def supports_columns(m: int, k: int, *, x_in_arena: bool, dtype: Any = jnp.bfloat16) -> str | None:
    """None if :func:`quantize_columns` takes this array, else why not."""
    if not (m and k):
        return "the array is empty"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"the kernel takes bfloat16, not {jnp.dtype(dtype)}"
    if m % 64:
        return f"blocks along the rows need a multiple of 64 rows, got {m}"
    if k % 8 or (not x_in_arena and k % 64):
        return f"columns must be a multiple of {8 if x_in_arena else 64}, got k = {k}"
    return None


class _Form(NamedTuple):
    """What a kernel is compiled for: ``rows`` and ``columns`` of the result, in whose rows the blocks lie."""

    rows: int
    columns: int
    dtype: Any
    words: int
    columns_of_x: bool
    x_in_arena: bool
    out_in_arena: bool


Out = Place | tuple[Place, Place]
"""Where words (with their scales) go, or words and low words."""


def quantize_rows(
    arena: Any,
    x: Place | jax.Array,
    out: Out | None = None,
    *,
    m: int,
    k: int,
    words: int = 1,
    dtype: Any = None,
    config: QuantizeConfig | None = None,
    multiprocessors: int = 132,
    interpret: bool = False,
) -> tuple[jax.Array, ...] | None:
    """Words and scales of the rows of ``x``.

    Args:
      arena: the arena's ref; None when no operand is a place.
      x: bf16 or float32 ``[m, k]``, or its place.
      out: where words and scales go (``scale_first`` and ``scale_stride`` multiples of 8), and second the low words when there are
        two words; None: to arrays of their own.
      m: rows; in the arena with the pads between groups.
      k: values in a row.
      words: 1, or 2 for low words too.
      dtype: of ``x`` when it is a place; None: bf16.
      config: overrides the default.
      multiprocessors: of the device.
      interpret: whether to interpret the kernel on the CPU, looking for races.

    Returns:
      int8 ``[m, k]``, with two words as many low words, and float32 ``[ceil(k / 128), m]``; None when ``out`` is given.

    Raises:
      ValueError: when :func:`supports` has a reason against it, or ``words`` is not 1 or 2.
    """
    dtype = jnp.dtype(dtype or (jnp.bfloat16 if isinstance(x, Place) else x.dtype))
    form = _Form(m, k, dtype, words, False, isinstance(x, Place), out is not None)
    reason = supports(m, k, x_in_arena=form.x_in_arena, out_in_arena=form.out_in_arena, dtype=dtype)
    return _run("quantize_rows", reason, arena, x, out, form, config, multiprocessors, interpret)


def quantize_columns(
    arena: Any,
    x: Place | jax.Array,
    out: Out | None = None,
    *,
    m: int,
    k: int,
    words: int = 1,
    config: QuantizeConfig | None = None,
    multiprocessors: int = 132,
    interpret: bool = False,
) -> tuple[jax.Array, ...] | None:
    """Words and scales of ``x^T``, in blocks of 128 rows of x.

    Args:
      arena: the arena's ref; None when no operand is a place.
      x: bf16 ``[m, k]``, or its place.
      out: where words and scales go (``scale_first`` and ``scale_stride`` multiples of 8), and second the low words when there are
        two words; None: to arrays of their own.
      m: rows of ``x``, which the blocks divide.
      k: columns of ``x``, rows of the result.
      words: 1, or 2 for low words too.
      config: overrides the default.
      multiprocessors: of the device.
      interpret: whether to interpret the kernel on the CPU, looking for races.

    Returns:
      int8 ``[k, m]``, with two words as many low words, and float32 ``[ceil(m / 128), k]``; None when ``out`` is given.

    Raises:
      ValueError: when :func:`supports_columns` has a reason against it, or ``words`` is not 1 or 2.
    """
    dtype = jnp.dtype(jnp.bfloat16 if isinstance(x, Place) else x.dtype)
    form = _Form(k, m, dtype, words, True, isinstance(x, Place), out is not None)
    reason = supports_columns(m, k, x_in_arena=form.x_in_arena, dtype=dtype)
    return _run("quantize_columns", reason, arena, x, out, form, config, multiprocessors, interpret)


def _run(
    name: str,
    reason: str | None,
    arena: Any,
    x: Place | jax.Array,
    out: Out | None,
    form: _Form,
    config: QuantizeConfig | None,
    multiprocessors: int,
    interpret: bool,
) -> tuple[jax.Array, ...] | None:
    if reason:
        raise ValueError(f"{name}: {reason}")
    if form.words not in (1, 2):
        raise ValueError(f"{name}: words must be 1 or 2, got {form.words}")
    outs: Sequence[Place | None] = [out] if isinstance(out, Place) else out or [None] * form.words
    if len(outs) != form.words:
        raise ValueError(f"{name}: out must have a place for each of {form.words} words, got {len(outs)}")
    offsets = pack([x if isinstance(x, Place) else None, *outs])
    roomy = form.dtype == jnp.bfloat16 and not (form.columns_of_x and form.words == 2)
    chosen = config or (QuantizeConfig() if roomy else _WIDE)
    return _launch(arena, offsets, None if isinstance(x, Place) else x, form, chosen, multiprocessors, interpret)


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _launch(
    arena: Any, offsets: jax.Array, x: jax.Array | None, form: _Form, config: QuantizeConfig, multiprocessors: int, interpret: bool
) -> tuple[jax.Array, ...] | None:
    c = config
    rows, columns = form.rows, form.columns
    x_in_arena, out_in_arena = form.x_in_arena, form.out_in_arena
    width = 128 // form.dtype.itemsize  # values in 128 bytes of x
    parts = _BLOCK // width
    panels, row_tiles = -(-columns // _BLOCK), -(-rows // _ROWS)
    pieces = panels * row_tiles
    blocks = min(multiprocessors * c.blocks, -(-pieces // c.warpgroups))
    stride = blocks * c.warpgroups

    def body(offsets_gmem: Any, *refs: Any) -> None:
        remaining = list(refs)
        x_ref = arena if x_in_arena else remaining.pop(0)
        outs_ref = [arena if out_in_arena else remaining.pop(0) for _ in range(form.words)]
        scales_ref = None if out_in_arena else remaining.pop(0)
        x_smem, words_smem, scales_smem, full, *identity_smem = remaining
        source = Matrix(x_ref, unpack(offsets_gmem, 0) if x_in_arena else None)
        outs = [Matrix(ref, unpack(offsets_gmem, 1 + i) if out_in_arena else None) for i, ref in enumerate(outs_ref)]
        warpgroup = lax.axis_index("warpgroup")
        first = lax.axis_index("block") * c.warpgroups + warpgroup
        mine = lax.div(pieces - first + stride - 1, jnp.int32(stride))
        numbers = x_smem[1] if x_in_arena else x_smem
        scales = scales_smem[1] if out_in_arena else scales_smem
        if form.columns_of_x:
            identity = identity_smem[0].at[warpgroup]
            write_identity(identity)

        def piece(i: Any) -> tuple[Any, Any, Any]:
            index = first + i * stride
            panel = lax.div(index, jnp.int32(row_tiles))
            row = (index - panel * row_tiles) * _ROWS
            # In the arena the last piece starts further up, so that nothing past the matrix is read; what it does twice, it does alike.
            # Across columns of x there is no need: their last panel is whole.
            start = jnp.minimum(row, max(rows - _ROWS, 0)) if x_in_arena and not form.columns_of_x else row
            return row, start, panel

        def slot(i: Any) -> Any:
            return warpgroup * c.depth + lax.rem(i, jnp.int32(c.depth))

        def fetch(i: Any) -> None:
            _, start, panel = piece(i)
            for part in range(parts):
                into = (x_smem[0] if x_in_arena else x_smem).at[slot(i), part]
                if form.columns_of_x:
                    # Past the last row of x its last rows stand in, and are not used.
                    x_row = jnp.minimum(panel * _BLOCK + part * _ROWS, columns - _ROWS)
                    tile_of_x = source.tile(x_row, _ROWS, lax.div(start, jnp.int32(width)))
                else:
                    tile_of_x = source.tile(start, _ROWS, parts * panel + part)
                plgpu.copy_gmem_to_smem(tile_of_x, into, full.at[slot(i)])

        def values(i: Any, panel: Any, part: int) -> jax.Array:
            if x_in_arena:
                read_bytes(x_smem, (slot(i), part), interpret=interpret)
            if not form.columns_of_x:
                return plgpu.load(numbers.at[slot(i), part], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
            turned = transposed(numbers.at[slot(i), part], identity)
            if columns % _BLOCK == 0 or part == 0:
                return turned
            inside = (panel < panels - 1).astype(jnp.int32)
            return lax.bitcast_convert_type(lax.bitcast_convert_type(turned, jnp.int32) & (0 - inside), jnp.float32)

        def step(i: Any, _: Any) -> Any:
            row, start, panel = piece(i)
            plgpu.barrier_wait(full.at[slot(i)])
            x_parts = [values(i, panel, part) for part in range(parts)]
            quantized, scale = encode(x_parts, magnitudes(x_parts), form.words)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for part in range(parts):
                for word in range(form.words):
                    words_smem[warpgroup, word * parts + part] = quantized[part][word]
            scales[warpgroup] = scale
            if out_in_arena:
                write_bytes(scales_smem, warpgroup, interpret=interpret)
            plgpu.commit_smem()

            @pl.when(i + c.depth < mine)
            def _() -> None:
                fetch(i + c.depth)

            def store(at: int, count: int) -> None:
                for word in range(form.words):
                    for part in range(parts):
                        from_smem = words_smem.at[warpgroup, word * parts + part, pl.ds(at, count)]
                        target = outs[word].tile(start + at, count, panel).at[:, pl.ds(part * width, width)]
                        if out_in_arena or columns % _BLOCK == 0:
                            plgpu.copy_smem_to_gmem(from_smem, target)
                            continue

                        @pl.when(panel * _BLOCK + part * width < columns)
                        def _(from_smem: Any = from_smem, target: Any = target) -> None:
                            plgpu.copy_smem_to_gmem(from_smem, target)

            def store_scales(at: int, count: int) -> None:
                if not out_in_arena:
                    source_scales = scales.at[warpgroup, pl.ds(at, count)]
                    plgpu.copy_smem_to_gmem(source_scales, scales_ref.at[panel, pl.ds(start + at, count)])
                    return
                place = outs[0].place
                assert place is not None
                for eight in range(at, at + count, 8):
                    number = place.scale_first + panel * place.scale_stride + start + eight
                    target = arena.at[
                        pl.ds(place.scale_row + lax.shift_right_logical(number, jnp.int32(5)), 1),
                        pl.ds(pl.multiple_of(lax.bitwise_and(number, jnp.int32(31)) * 4, 32), 32),
                    ]
                    plgpu.copy_smem_to_gmem(scales_smem[0].at[warpgroup, pl.ds(eight // 8, 1)], target)

            whole = (start >= row) & (start + _ROWS <= rows)

            @pl.when(whole)
            def _() -> None:
                store(0, _ROWS)
                store_scales(0, _ROWS)

            @pl.when(jnp.logical_not(whole))
            def _() -> None:
                for at in range(0, _ROWS, 8):

                    @pl.when((start + at >= row) & (start + at < rows))
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
    x_type = tile((slots, parts, _ROWS, width), form.dtype)
    scales_type = plgpu.SMEM((c.warpgroups, _ROWS), jnp.float32)
    if x_in_arena:
        x_type = viewed(tile((slots, parts, _ROWS, 128), jnp.int8), x_type, interpret=interpret)
    if out_in_arena:
        scales_type = viewed(plgpu.SMEM((c.warpgroups, 8, 32), jnp.int8), scales_type, interpret=interpret)
    words_of = [jax.ShapeDtypeStruct((rows, columns), jnp.int8)] * form.words
    made = plgpu.kernel(
        body,
        out_type=() if out_in_arena else (*words_of, jax.ShapeDtypeStruct((panels, rows), jnp.float32)),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=c.warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            x_type,
            tile((c.warpgroups, form.words * parts, _ROWS, width), jnp.int8, width),
            scales_type,
            plgpu.Barrier(num_arrivals=parts, num_barriers=slots),
            *([tile((c.warpgroups, _ROWS, width), jnp.bfloat16)] if form.columns_of_x else []),
        ],
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(*([offsets] if x is None else [offsets, x]))
    return None if out_in_arena else tuple(made)
