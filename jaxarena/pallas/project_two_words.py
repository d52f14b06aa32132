"""Projection of rows in two int8 words by a weight in two int8 words, x ~ scale * (256 high + low)::

    y[r, c] = sum over panels p of  sx[p, r] * sw[c // 128, p] * (256 (256 HH + HL + LH) + LL)

with HH, HL, LH, LL the exact int32 products of a panel's words. ``256 HH + HL + LH`` is exact in int32 too, being under
128 * 127 * (127 * 256 + 2 * 128) < 2^30, so the three share one accumulator: HH is computed first, shifted by 8 bits in its registers,
and the tensor cores add the other two to it. A panel's two terms are added in float32, panels in ascending order, so a row's result
depends on nothing but that row and the weight. The reference is :func:`jaxarena.ops.project_quantized.exact_product`.

LL may not be left out: for normally distributed operands it is 6e-5 of the result, more than the 4.4e-5 that two words are wrong by.

**What limits it.** Four times the tensor work of one word, for little more than twice its conversions: per 64 x 128 x 128 a shift, two
conversions at half rate and two multiply-adds, 7 issue slots a value, 448 of 1024 tensor cycles (one word: 192 of 256). Shared memory gives
96 bytes a cycle to the products and 27 to 32 to the copies, of 128, so this, and power, come first.

A stage of the pipeline holds one word of a panel: even stages the high words of rows and weight, odd ones the low words.
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

from jaxarena.pallas import configs, products
from jaxarena.pallas.frame import Shape, Steps, TileConfig, launch_product
from jaxarena.pallas.operands import Matrix, Place, RowScales, pack
from jaxarena.pallas.tiles import tile

__all__ = ["CONFIGS", "config_for", "project_two_words", "supports"]

CONFIGS: dict[str, tuple[TileConfig, float]] = {
    "wide": (TileConfig(tile_m=128, tile_n=256, warpgroups=2, stages=4, cluster_m=2, group=4, in_turn=True, piece=32), 1.0),
    "large": (TileConfig(tile_m=192, tile_n=128, warpgroups=3, stages=4, cluster_n=2, piece=32), 0.97),
    "small": (TileConfig(tile_m=128, tile_n=128, warpgroups=2, stages=6, piece=32, together=2), 0.93),
    "few": (TileConfig(tile_m=64, tile_n=64, warpgroups=1, stages=12, piece=32, together=2), 0.4),
}
"""Configs, with their speed at 8192 cubed as a share of the first's. ``together=2`` starts LL beside HH, in an accumulator of its own."""

_HIGH, _LOW = 0, 1


def config_for(m: int, n: int, k: int, multiprocessors: int = 132) -> TileConfig:
    """The config for a product of m rows and n columns, summed over k."""
    return configs.choose(configs.Product("project_two_words", m, n, k, multiprocessors), CONFIGS)


def supports(m: int, n: int, k: int, *, rows_in_arena: bool, weight_in_arena: bool, out_in_arena: bool) -> str | None:
    """None if the kernel takes this product, else why not."""
    if not (m and n and k):
        return "the product is empty"
    if weight_in_arena and n % 128:
        return f"a weight in the arena must have a multiple of 128 rows, got n = {n}"
    if not (rows_in_arena and weight_in_arena) and k % 128:
        return f"rows of int8 words that are not in the arena must be a multiple of 128 bytes, got k = {k}"
    if n % 8 or m % 8:
        return f"arrays must have multiples of 8 rows, got m, n = {m}, {n}"
    if not out_in_arena and n % 32:
        return f"rows of a float32 result that is not in the arena must be a multiple of 128 bytes, got n = {n}"
    return None


@dataclass(frozen=True)
class _Operands:
    x: tuple[Matrix, Matrix]
    x_scales: RowScales
    weight: tuple[Matrix, Matrix]
    weight_scales: Any
    shape: Shape
    config: TileConfig
    interpret: bool

    def copy(self, stage: Any, slot: Any, row: Any, column: Any, panel: Any, barrier: Any) -> None:
        x_smem, scales_smem, weight_smem = stage
        c = self.config
        block, word = lax.div(panel, jnp.int32(2)), lax.rem(panel, jnp.int32(2))
        shared_row = "beside" if c.cluster_n > 1 else None
        shared_column = "below" if c.cluster_m > 1 else None
        for which in (_HIGH, _LOW):

            @pl.when(word == which)
            def _(which: int = which) -> None:
                source = self.x[which].tile(row, c.tile_m, block)
                plgpu.copy_gmem_to_smem(source, x_smem.at[slot], barrier, collective_axes=shared_row)
                source = self.weight[which].tile(column, c.tile_n, block)
                plgpu.copy_gmem_to_smem(source, weight_smem.at[slot], barrier, collective_axes=shared_column)

        # Both stages of a panel bring its scales, so that every stage waits for as many copies.
        self.x_scales.copy(scales_smem, slot, row, c.tile_m, block, barrier)

    def compute(self, stage: Any, steps: Steps, row: Any, column: Any) -> list[list[jax.Array]]:
        x_smem, scales_smem, weight_smem = stage
        c, blocks = self.config, self.shape.panels // 2
        width = min(c.tile_n, 128)
        parts = [(i, j) for i in range(c.rows // 64) for j in range(c.tile_n // width)]
        # A tile may reach past the weight, whose words there are zeros: any scale does.
        scale_rows = [
            jnp.minimum(lax.div(column + j * width, jnp.int32(128)), -(-self.shape.n // 128) - 1) for j in range(c.tile_n // width)
        ]
        top = steps.warpgroup * c.rows

        start = functools.partial(products.start, interpret=self.interpret)
        settle = functools.partial(products.settle, interpret=self.interpret)
        beside = c.together > 1

        def weight_scales(block: Any) -> tuple[Any, ...]:
            return tuple(self.weight_scales[r, jnp.minimum(block, blocks - 1)] for r in scale_rows)

        def step(block: Any, carry: Any) -> Any:
            sums, scales = carry
            high, low = 2 * block, 2 * block + 1
            slots = steps.wait(high), steps.wait(low)
            next_scales = weight_scales(block + 1)  # asked for a whole step before they are needed
            added = []
            for part, ((i, j), total) in enumerate(zip(parts, sums, strict=True)):

                def pair(a: int, b: int, i: int = i, j: int = j) -> tuple[Any, Any]:
                    return x_smem.at[slots[a], pl.ds(top + 64 * i, 64)], weight_smem.at[slots[b], pl.ds(j * width, width)]

                upper = steps.start_in_turn(lambda pair=pair: start([pair(_HIGH, _HIGH)]))
                lower = start([pair(_LOW, _LOW)]) if beside else None
                scale = scales[j] * self.x_scales.load(
                    scales_smem, slots[_HIGH], row, c.tile_m, block, top + 64 * i, 64, interpret=self.interpret
                )
                upper = start([pair(_HIGH, _LOW), pair(_LOW, _HIGH)], settle(upper, pending=int(beside)) << 8)
                if lower is None:
                    total = _add(total, settle(upper, pending=0), scale * 256.0)
                    lower = start([pair(_LOW, _LOW)])
                    total = _add(total, settle(lower, pending=0), scale)
                else:
                    total = _add(total, settle(lower, pending=1), scale)
                    total = _add(total, settle(upper, pending=0), scale * 256.0)
                if part == len(parts) - 1:
                    steps.release(high)
                    steps.release(low)
                added.append(total)
            return tuple(added), next_scales

        zeros = tuple(plgpu.layout_cast(jnp.zeros((64, width), jnp.float32), plgpu.Layout.WGMMA) for _ in parts)
        sums, _ = lax.fori_loop(0, blocks, step, (zeros, weight_scales(0)))
        rows: list[list[jax.Array]] = [[] for _ in range(c.rows // 64)]
        for (i, _), total in zip(parts, sums, strict=True):
            rows[i] += [total[:, p : p + 64] for p in range(0, width, 64)]
        return rows


def _add(total: jax.Array, product: jax.Array, scale: jax.Array) -> jax.Array:
    return total + product.astype(jnp.float32) * lax.broadcast_in_dim(scale, product.shape, [0])


def project_two_words(
    arena: Any,
    x: tuple[Place, Place] | tuple[jax.Array, jax.Array, jax.Array],
    weight: tuple[Place, Place] | tuple[jax.Array, jax.Array],
    weight_scales: jax.Array,
    out: Place | None = None,
    *,
    m: int,
    n: int,
    k: int,
    config: TileConfig | None = None,
    multiprocessors: int = 132,
    interpret: bool = False,
) -> jax.Array | None:
    """``decoded(x) @ decoded(weight)^T`` as float32.

    Args:
      arena: the arena's ref; None when no operand is a place.
      x: words and low words int8 ``[m, k]`` and scales float32 ``[ceil(k / 128), m]``, or the places of the words (with the scales)
        and of the low words.
      weight: words and low words int8 ``[n, k]``, or their places (whose scales are not used).
      weight_scales: float32 ``[ceil(n / 128), ceil(k / 128)]``.
      out: where the result goes; None: to an array of its own.
      m: rows; in the arena with the pads that it has between groups, which hold zeros.
      n: columns of the result.
      k: the contracted size.
      config: overrides :func:`config_for`.
      multiprocessors: of the device.
      interpret: whether to interpret the kernel on the CPU, looking for races.

    Returns:
      float32 ``[m, n]``; None when ``out`` is a place.

    Raises:
      ValueError: when :func:`supports` has a reason against it, or the config does not fit in shared memory.
    """
    in_arena = isinstance(x[0], Place), isinstance(weight[0], Place), out is not None
    reason = supports(m, n, k, rows_in_arena=in_arena[0], weight_in_arena=in_arena[1], out_in_arena=in_arena[2])
    if reason:
        raise ValueError(f"project_two_words: {reason}")
    operands = (x[0], x[1], weight[0], weight[1], out)
    arrays = (*(() if in_arena[0] else x), *(() if in_arena[1] else weight), weight_scales)
    return _launch(
        arena,
        pack([a if isinstance(a, Place) else None for a in operands]),
        arrays,
        Shape(m, n, 2 * -(-k // 128)),
        in_arena,
        config or config_for(m, n, k, multiprocessors),
        multiprocessors,
        interpret,
    )


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6, 7))
def _launch(
    arena: Any,
    offsets: jax.Array,
    arrays: tuple[Any, ...],
    shape: Shape,
    in_arena: tuple[bool, bool, bool],
    config: TileConfig,
    multiprocessors: int,
    interpret: bool,
) -> jax.Array | None:
    rows_in_arena, weight_in_arena, out_in_arena = in_arena

    def make(refs: Sequence[Any], places: Sequence[Place | None]) -> _Operands:
        remaining = list(refs)
        x, x_low, x_scales = [arena] * 3 if rows_in_arena else [remaining.pop(0) for _ in range(3)]
        weight, weight_low = [arena] * 2 if weight_in_arena else [remaining.pop(0) for _ in range(2)]
        return _Operands(
            (Matrix(x, places[0]), Matrix(x_low, places[1])),
            RowScales(x_scales, places[0]),
            (Matrix(weight, places[2]), Matrix(weight_low, places[3])),
            remaining[0],
            shape,
            config,
            interpret,
        )

    stage = [
        tile((config.stages, config.tile_m, 128), jnp.int8),
        RowScales.smem(config.stages, config.tile_m, rows_in_arena, interpret=interpret),
        tile((config.stages, config.tile_n, 128), jnp.int8),
    ]
    return launch_product(
        make,
        arena,
        arrays,
        stage,
        arrivals=3,
        offsets=offsets,
        in_arena=(rows_in_arena, rows_in_arena, weight_in_arena, weight_in_arena, out_in_arena),
        shape=shape,
        config=config,
        multiprocessors=multiprocessors,
        interpret=interpret,
        out_dtype=jnp.float32,
    )
