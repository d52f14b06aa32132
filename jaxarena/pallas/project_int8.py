"""Projection of block-quantized rows by a block-quantized weight, one int8 word each::

    y[r, c] = sum over panels p of  sx[p, r] * sw[c // 128, p] * P,    P = sum over the panel's 128 of  x[r, i] * w[c, i]

P is exact in int32; a panel's term is added in float32 with one fused multiply-add, panels in ascending order, so a row's result
depends on nothing but that row and the weight. The reference is :func:`jaxarena.ops.project_quantized.exact_product`.

**What limits it.** The tensor cores read both operands from shared memory: a 64 x 128 product takes ``(64 + 128) * 128`` bytes in the 256
cycles it needs, 96 a cycle, and the copies bring another 53 (192 x 128 tiles), of 128 a cycle that shared memory gives. Every int32 sum
costs a conversion at half rate and a multiply-add, 3 issue slots for 64 x 128 x 128 / 4096 = 256 tensor cycles a warp: 192, hidden only
if another warpgroup multiplies meanwhile. Hence three compute warpgroups, each with one accumulator in flight.
``docs/notes-project-kernels.md`` has the variants that were measured.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxarena.pallas import configs, products
from jaxarena.pallas.frame import Shape, Steps, TileConfig, launch_product
from jaxarena.pallas.operands import Matrix, Place, RowScales, pack
from jaxarena.pallas.tiles import tile

__all__ = ["CONFIGS", "DECODE", "config_for", "project_int8", "supports"]

CONFIGS: dict[str, tuple[TileConfig, float]] = {
    "large": (TileConfig(tile_m=192, tile_n=128, warpgroups=3, stages=4, cluster_n=2, buffers=2), 1.0),
    "tall": (TileConfig(tile_m=256, tile_n=128, warpgroups=2, stages=4, cluster_m=2, in_turn=True), 0.93),
    "small": (TileConfig(tile_m=128, tile_n=128, warpgroups=2, stages=6, together=2), 0.88),
}
"""What was measured on an H200 to be fast, with its speed at 8192 cubed, as a share of the first's."""

DECODE = TileConfig(tile_m=64, tile_n=64, warpgroups=1, stages=10, cluster_n=2, piece=32, together=4)
"""For up to 64 rows, where reading the weight is all that counts."""


def config_for(m: int, n: int, k: int, multiprocessors: int = 132) -> TileConfig:
    """The config for a product of m rows and n columns, summed over k."""
    return configs.choose(configs.Product("project_int8", m, n, k, multiprocessors), CONFIGS, DECODE)


def supports(
    m: int, n: int, k: int, *, rows_in_arena: bool, weight_in_arena: bool, out_in_arena: bool, out_dtype: Any = jnp.bfloat16
) -> str | None:
    """None if the kernel takes this product, else why not."""
    if not (m and n and k):
        return "the product is empty"
    if weight_in_arena and n % 128:
        return f"a weight in the arena must have a multiple of 128 rows, got n = {n}"
    if not (rows_in_arena and weight_in_arena) and k % 128:
        return f"rows of int8 words that are not in the arena must be a multiple of 128 bytes, got k = {k}"
    if n % 8 or m % 8:
        return f"arrays must have multiples of 8 rows, got m, n = {m}, {n}"
    if jnp.dtype(out_dtype) not in (jnp.bfloat16, jnp.float32):
        return f"the result must be bfloat16 or float32, got {jnp.dtype(out_dtype)}"
    if not out_in_arena and n * jnp.dtype(out_dtype).itemsize % 128:
        return f"rows of a {jnp.dtype(out_dtype)} result that is not in the arena must be a multiple of 128 bytes, got n = {n}"
    return None


@dataclass(frozen=True)
class _Operands:
    x: Matrix
    x_scales: RowScales
    weight: Matrix
    weight_scales: Any
    shape: Shape
    config: TileConfig
    interpret: bool

    def copy(self, stage: Any, slot: Any, row: Any, column: Any, panel: Any, barrier: Any) -> None:
        x_smem, scales_smem, weight_smem = stage
        c = self.config
        shared_row = "beside" if c.cluster_n > 1 else None
        shared_column = "below" if c.cluster_m > 1 else None
        plgpu.copy_gmem_to_smem(self.x.tile(row, c.tile_m, panel), x_smem.at[slot], barrier, collective_axes=shared_row)
        plgpu.copy_gmem_to_smem(self.weight.tile(column, c.tile_n, panel), weight_smem.at[slot], barrier, collective_axes=shared_column)
        self.x_scales.copy(scales_smem, slot, row, c.tile_m, panel, barrier)

    def compute(self, stage: Any, steps: Steps, row: Any, column: Any) -> list[list[jax.Array]]:
        x_smem, scales_smem, weight_smem = stage
        c, last = self.config, self.shape.panels - 1
        width = min(c.tile_n, 128)
        blocks = [(i, j) for i in range(c.rows // 64) for j in range(c.tile_n // width)]
        # A tile may reach past the weight, whose words there are zeros: any scale does.
        scale_rows = [
            jnp.minimum(lax.div(column + j * width, jnp.int32(128)), -(-self.shape.n // 128) - 1) for j in range(c.tile_n // width)
        ]
        top = steps.warpgroup * c.rows

        def weight_scales(panel: Any, count: int) -> list[tuple[Any, ...]]:
            """Of ``count`` panels: one for every block of columns."""
            return [tuple(self.weight_scales[r, jnp.minimum(panel + p, last)] for r in scale_rows) for p in range(count)]

        def step(panel: Any, count: int, carry: Any) -> Any:
            """Adds ``count`` panels from ``panel`` on."""
            sums, scales = carry
            slots = [steps.wait(panel + p) for p in range(count)]
            next_scales = weight_scales(panel + count, count)  # asked for a whole step before they are needed
            added = []
            for block, ((i, j), sum_) in enumerate(zip(blocks, sums, strict=True)):
                started = []
                for slot in slots:
                    tiles = x_smem.at[slot, pl.ds(top + 64 * i, 64)], weight_smem.at[slot, pl.ds(j * width, width)]
                    started.append(steps.start_in_turn(lambda t=tiles: products.start([t], interpret=self.interpret)))
                for p, slot in enumerate(slots):
                    scale = scales[p][j] * self.x_scales.load(
                        scales_smem, slot, row, c.tile_m, panel + p, top + 64 * i, 64, interpret=self.interpret
                    )
                    product = products.settle(started[p], pending=count - 1 - p, interpret=self.interpret)
                    if block == len(blocks) - 1:
                        steps.release(panel + p)
                    sum_ = sum_ + product.astype(jnp.float32) * lax.broadcast_in_dim(scale, (64, width), [0])
                added.append(sum_)
            return tuple(added), next_scales

        zeros = tuple(plgpu.layout_cast(jnp.zeros((64, width), jnp.float32), plgpu.Layout.WGMMA) for _ in blocks)
        whole = self.shape.panels // c.together
        sums, _ = lax.fori_loop(0, whole, lambda h, carry: step(h * c.together, c.together, carry), (zeros, weight_scales(0, c.together)))
        if rest := self.shape.panels % c.together:
            sums, _ = step(whole * c.together, rest, (sums, weight_scales(whole * c.together, rest)))
        rows: list[list[jax.Array]] = [[] for _ in range(c.rows // 64)]
        for (i, _), sum_ in zip(blocks, sums, strict=True):
            rows[i] += [sum_[:, p : p + 64] for p in range(0, width, 64)]
        return rows


def project_int8(
    arena: Any,
    x: Place | tuple[jax.Array, jax.Array],
    weight: Place | jax.Array,
    weight_scales: jax.Array,
    out: Place | None = None,
    *,
    m: int,
    n: int,
    k: int,
    out_dtype: Any = jnp.bfloat16,
    config: TileConfig | None = None,
    multiprocessors: int = 132,
    interpret: bool = False,
) -> jax.Array | None:
    """``decoded(x) @ decoded(weight)^T`` as bf16 or float32.

    Args:
      arena: the arena's ref; None when no operand is a place.
      x: words int8 ``[m, k]`` and scales float32 ``[ceil(k / 128), m]``, or their place.
      weight: words int8 ``[n, k]``, or their place (whose scales are not used).
      weight_scales: float32 ``[ceil(n / 128), ceil(k / 128)]``.
      out: where the result goes; None: to an array of its own.
      m: rows; in the arena with the pads that it has between groups, which hold zeros.
      n: columns of the result.
      k: the contracted size.
      out_dtype: bfloat16 or float32.
      config: overrides :func:`config_for`.
      multiprocessors: of the device.
      interpret: whether to interpret the kernel on the CPU, looking for races.

    Returns:
      ``[m, n]``; None when ``out`` is a place.

    Raises:
      ValueError: when :func:`supports` has a reason against it.
    """
    in_arena = (isinstance(x, Place), isinstance(weight, Place), isinstance(out, Place))
    reason = supports(m, n, k, rows_in_arena=in_arena[0], weight_in_arena=in_arena[1], out_in_arena=in_arena[2], out_dtype=out_dtype)
    if reason:
        raise ValueError(f"project_int8: {reason}")
    places = [a if isinstance(a, Place) else None for a in (x, weight, out)]
    arrays = (*(() if isinstance(x, Place) else x), *(() if isinstance(weight, Place) else (weight,)), weight_scales)
    chosen = config or config_for(m, n, k, multiprocessors)
    if jnp.dtype(out_dtype) == jnp.float32:
        chosen = dataclasses.replace(chosen, piece=min(chosen.piece, 32))  # 128 bytes of a row
    return _launch(
        arena,
        pack(places),
        arrays,
        Shape(m, n, -(-k // 128)),
        in_arena,
        jnp.dtype(out_dtype),
        chosen,
        multiprocessors,
        interpret,
    )


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6, 7, 8))
def _launch(
    arena: Any,
    offsets: jax.Array,
    arrays: tuple[jax.Array, ...],
    shape: Shape,
    in_arena: tuple[bool, ...],
    out_dtype: Any,
    config: TileConfig,
    multiprocessors: int,
    interpret: bool,
) -> jax.Array | None:
    def make(refs: Sequence[Any], places: Sequence[Place | None]) -> _Operands:
        remaining = list(refs)
        x, x_scales = (arena, arena) if in_arena[0] else (remaining.pop(0), remaining.pop(0))
        weight = arena if in_arena[1] else remaining.pop(0)
        return _Operands(
            Matrix(x, places[0]), RowScales(x_scales, places[0]), Matrix(weight, places[1]), remaining[0], shape, config, interpret
        )

    stage = [
        tile((config.stages, config.tile_m, 128), jnp.int8),
        RowScales.smem(config.stages, config.tile_m, in_arena[0], interpret=interpret),
        tile((config.stages, config.tile_n, 128), jnp.int8),
    ]
    return launch_product(
        make,
        arena,
        arrays,
        stage,
        arrivals=3,
        offsets=offsets,
        in_arena=in_arena,
        shape=shape,
        config=config,
        multiprocessors=multiprocessors,
        interpret=interpret,
        out_dtype=out_dtype,
    )
