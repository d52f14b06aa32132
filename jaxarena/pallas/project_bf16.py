"""Products of bf16 matrices with float32 sums: a projection, and both of its gradients::

    forward   y  = x @ w          rows x [m, k],              columns w [k, n]
    dx        dx = dy @ w^T       rows dy [m, n],             columns w^T, given as w [k, n] with ``columns_transposed``
    dw        dw = x^T @ dy       rows x^T, given as x [m, k] with ``rows_transposed``,   columns dy [m, n]

16-bit operands may lie either way in shared memory, so none of the three moves data first. All sums run over the contracted axis in one
order: results repeat bit for bit.

Rows come from the arena or an array; columns come from a row-major array.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxarena.pallas import configs
from jaxarena.pallas.frame import Shape, Steps, TileConfig, launch_product
from jaxarena.pallas.operands import Matrix, Place, pack
from jaxarena.pallas.tiles import read_bytes, tile, viewed

__all__ = ["CONFIGS", "DECODE", "config_for", "project_bf16", "supports"]

CONFIGS: dict[str, tuple[TileConfig, float]] = {
    "large": (TileConfig(tile_m=128, tile_n=256, warpgroups=2, stages=4, cluster_m=2, buffers=2), 1.0),
    "small": (TileConfig(tile_m=128, tile_n=128, warpgroups=2, stages=5, buffers=2), 0.85),
}
"""What was measured on an H200 to be fast, with its speed at 8192 cubed, as a share of the first's."""

DECODE = TileConfig(tile_m=64, tile_n=64, warpgroups=1, stages=12, piece=32)
"""For up to 64 rows, where reading the columns is all that counts."""

_K = 64
"""Values of the contracted axis in a stage: 128 bytes."""


def config_for(m: int, n: int, k: int, multiprocessors: int = 132) -> TileConfig:
    """The config for a product of m rows and n columns, summed over k."""
    return configs.choose(configs.Product("project_bf16", m, n, k, multiprocessors), CONFIGS, DECODE)


def supports(
    m: int, n: int, k: int, *, rows_in_arena: bool, out_in_arena: bool, rows_transposed: bool = False, columns_transposed: bool = False
) -> str | None:
    """None if the kernel takes this product, else why not."""
    if not (m and n and k):
        return "the product is empty"
    if rows_transposed and rows_in_arena and (k % _K or m % _K):
        return f"a sum over the rows of an array in the arena needs multiples of {_K} rows and columns, got {k} and {m}"
    wide = {"columns": k if columns_transposed else n}
    if not rows_in_arena:
        wide["rows"] = m if rows_transposed else k
    if not out_in_arena:
        wide["the result"] = n
    for name, size in wide.items():
        if size % 64:
            return f"rows of a bf16 array that is not in the arena must be a multiple of 128 bytes, got {size} columns of {name}"
    if m % 8 or n % 8 or k % 8:
        return f"arrays must have multiples of 8 rows and columns, got m, n, k = {m}, {n}, {k}"
    return None


@dataclass(frozen=True)
class _Form:
    """How the operands are given."""

    rows_in_arena: bool
    out_in_arena: bool
    rows_transposed: bool
    columns_transposed: bool


@dataclass(frozen=True)
class _Operands:
    rows: Matrix
    columns: Any
    shape: Shape
    form: _Form
    config: TileConfig
    interpret: bool

    def copy(self, stage: Any, slot: Any, row: Any, column: Any, panel: Any, barrier: Any) -> None:
        rows_smem, columns_smem = stage
        c, form = self.config, self.form
        into = rows_smem[0] if form.rows_in_arena else rows_smem
        shared_row = "beside" if c.cluster_n > 1 else None
        shared_column = "below" if c.cluster_m > 1 else None
        for i in range(c.tile_m // 64):
            # One tile for every 64 rows, or their columns when transposed.
            if form.rows_transposed:
                source = self.rows.tile(panel * _K, _K, lax.div(row, jnp.int32(64)) + i)
            else:
                source = self.rows.tile(row + 64 * i, 64, panel)
            plgpu.copy_gmem_to_smem(source, into.at[slot, i], barrier, collective_axes=shared_row)
        here, along = pl.ds(column, c.tile_n), pl.ds(panel * _K, _K)
        source = self.columns.at[(here, along) if form.columns_transposed else (along, here)]
        plgpu.copy_gmem_to_smem(source, columns_smem.at[slot], barrier, collective_axes=shared_column)

    def compute(self, stage: Any, steps: Steps, row: Any, column: Any) -> list[list[jax.Array]]:
        rows_smem, columns_smem = stage
        c, form = self.config, self.form
        numbers = rows_smem[1] if form.rows_in_arena else rows_smem
        count = c.rows // 64

        def multiply(*accumulators: Any) -> list[jax.Array]:
            @pl.loop(0, self.shape.panels)
            def _(panel: Any) -> None:
                slot = steps.wait(panel)
                right = columns_smem.at[slot]
                if form.columns_transposed:
                    right = right.transpose((1, 0))
                for i, accumulator in enumerate(accumulators):
                    index = (slot, steps.warpgroup * count + i)
                    if form.rows_in_arena:
                        read_bytes(rows_smem, index, interpret=self.interpret)
                    left = numbers.at[index]
                    plgpu.wgmma(accumulator, left.transpose((1, 0)) if form.rows_transposed else left, right)
                # The products of the panel before are done once no more than this panel's run.
                plgpu.wgmma_wait(count)

                @pl.when(panel > 0)
                def _() -> None:
                    steps.release(panel - 1)

            plgpu.wgmma_wait(0)
            steps.release(self.shape.panels - 1)
            return [a[...] for a in accumulators]

        sums = pl.run_scoped(multiply, *[plgpu.ACC((64, c.tile_n), jnp.float32) for _ in range(count)])
        return [[s[:, p : p + 64] for p in range(0, c.tile_n, 64)] for s in sums]


def project_bf16(
    arena: Any,
    rows: Place | jax.Array,
    columns: jax.Array,
    out: Place | None = None,
    *,
    m: int,
    n: int,
    k: int,
    rows_transposed: bool = False,
    columns_transposed: bool = False,
    config: TileConfig | None = None,
    multiprocessors: int = 132,
    interpret: bool = False,
) -> jax.Array | None:
    """The product of ``[m, k]`` rows and ``[k, n]`` columns as bf16.

    Args:
      arena: the arena's ref; None when no operand is a place.
      rows: bf16 ``[m, k]``, or ``[k, m]`` when ``rows_transposed``, or its place.
      columns: bf16 ``[k, n]``, or ``[n, k]`` when ``columns_transposed``.
      out: where the result goes; None: to an array of its own.
      m: rows of the result.
      n: columns of the result.
      k: the contracted size.
      rows_transposed: whether ``rows`` is given transposed.
      columns_transposed: whether ``columns`` is given transposed.
      config: overrides :func:`config_for`.
      multiprocessors: of the device.
      interpret: whether to interpret the kernel on the CPU, looking for races.

    Returns:
      bf16 ``[m, n]``; None when ``out`` is a place.

    Raises:
      ValueError: when :func:`supports` has a reason against it.
    """
    form = _Form(isinstance(rows, Place), isinstance(out, Place), rows_transposed, columns_transposed)
    reason = supports(
        m,
        n,
        k,
        rows_in_arena=form.rows_in_arena,
        out_in_arena=form.out_in_arena,
        rows_transposed=rows_transposed,
        columns_transposed=columns_transposed,
    )
    if reason:
        raise ValueError(f"project_bf16: {reason}")
    offsets = pack([a if isinstance(a, Place) else None for a in (rows, out)])
    arrays = (columns,) if isinstance(rows, Place) else (rows, columns)
    return _launch(
        arena, offsets, arrays, Shape(m, n, -(-k // _K)), form, config or config_for(m, n, k, multiprocessors), multiprocessors, interpret
    )


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6, 7))
def _launch(
    arena: Any,
    offsets: jax.Array,
    arrays: tuple[jax.Array, ...],
    shape: Shape,
    form: _Form,
    config: TileConfig,
    multiprocessors: int,
    interpret: bool,
) -> jax.Array | None:
    def make(refs: Sequence[Any], places: Sequence[Place | None]) -> _Operands:
        return _Operands(Matrix(arena if form.rows_in_arena else refs[0], places[0]), refs[-1], shape, form, config, interpret)

    tiles = config.tile_m // 64
    rows = tile((config.stages, tiles, 64, _K), jnp.bfloat16)
    if form.rows_in_arena:
        rows = viewed(tile((config.stages, tiles, 64, 128), jnp.int8), rows, interpret=interpret)
    across = (config.tile_n, _K) if form.columns_transposed else (_K, config.tile_n)
    return launch_product(
        make,
        arena,
        arrays,
        [rows, tile((config.stages, *across), jnp.bfloat16)],
        arrivals=tiles + 1,
        offsets=offsets,
        in_arena=(form.rows_in_arena, form.out_in_arena),
        shape=shape,
        config=config,
        multiprocessors=multiprocessors,
        interpret=interpret,
    )
