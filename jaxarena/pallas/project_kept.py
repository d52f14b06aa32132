"""The weight's gradient in bf16 from activations kept as int8 rows (:mod:`jaxarena.pallas.quantize`)::

    dw = decoded(x)^T dy        x: words [m, k] and scales [ceil(k / 128), m],   dy: bf16 [m, n],   dw [k, n]

x is never in memory as bf16: each warpgroup decodes 64 rows of its 64 columns of x in registers, rounds them to bf16 as the reference
does, and lays them into shared memory, from where ``wgmma`` takes them transposed. That is 32 values a thread for a product of
64 x 64 x tile_n, and runs while the product before it does. Sums are float32 and run over the rows in ascending order: results repeat bit
for bit.

Each warpgroup has three such tiles: a warp may be a product ahead of another, and must not overwrite what that one still reads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxarena.pallas import configs
from jaxarena.pallas.frame import Shape, Steps, TileConfig, launch_product
from jaxarena.pallas.operands import Matrix, Place, RowScales, pack
from jaxarena.pallas.tiles import tile

__all__ = ["CONFIGS", "config_for", "dweight_kept", "supports"]

CONFIGS: dict[str, tuple[TileConfig, float]] = {
    "large": (TileConfig(tile_m=128, tile_n=256, warpgroups=2, stages=3, cluster_m=2), 1.0),
    "small": (TileConfig(tile_m=128, tile_n=128, warpgroups=2, stages=5), 0.85),
}
"""Configs, with their supposed speed at 8192 cubed as a share of the first's; ``tile_m`` is 128, a panel of words."""

_ROWS, _DECODED = 64, 3


def config_for(k: int, n: int, m: int, multiprocessors: int = 132) -> TileConfig:
    """The config for a gradient ``[k, n]``, summed over m rows."""
    return configs.choose(configs.Product("dweight_kept", k, n, m, multiprocessors), CONFIGS)


def supports(m: int, n: int, k: int, *, out_in_arena: bool, out_dtype: Any = jnp.float32) -> str | None:
    """None if the kernel takes this gradient, else why not."""
    if not (m and n and k):
        return "the product is empty"
    if jnp.dtype(out_dtype) not in (jnp.bfloat16, jnp.float32):
        return f"the result must be bfloat16 or float32, got {jnp.dtype(out_dtype)}"
    if m % _ROWS or k % 128:
        return f"a sum over rows of words needs a multiple of {_ROWS} rows and of 128 columns, got m, k = {m}, {k}"
    if n % 64:
        return f"rows of dy must be a multiple of 128 bytes, got n = {n}"
    return None


@dataclass(frozen=True)
class _Operands:
    x: Matrix
    x_scales: RowScales
    dy: Any
    shape: Shape
    config: TileConfig
    interpret: bool

    def copy(self, stage: Any, slot: Any, row: Any, column: Any, panel: Any, barrier: Any) -> None:
        x_smem, scales_smem, dy_smem, _ = stage
        c = self.config
        x_panel = lax.div(row, jnp.int32(128))
        words = self.x.tile(panel * _ROWS, _ROWS, x_panel)
        for half in range(2):
            source = words.at[:, pl.ds(half * 64, 64)]
            plgpu.copy_gmem_to_smem(source, x_smem.at[slot, half], barrier, collective_axes="beside" if c.cluster_n > 1 else None)
        self.x_scales.copy(scales_smem, slot, panel * _ROWS, _ROWS, x_panel, barrier)
        source = self.dy.at[pl.ds(panel * _ROWS, _ROWS), pl.ds(column, c.tile_n)]
        plgpu.copy_gmem_to_smem(source, dy_smem.at[slot], barrier, collective_axes="below" if c.cluster_m > 1 else None)

    def compute(self, stage: Any, steps: Steps, row: Any, column: Any) -> list[list[jax.Array]]:
        x_smem, scales_smem, dy_smem, decoded_smem = stage
        c = self.config
        x_panel = lax.div(row, jnp.int32(128))

        def multiply(accumulator: Any) -> jax.Array:
            @pl.loop(0, self.shape.panels)
            def _(panel: Any) -> None:
                slot = steps.wait(panel)
                word = plgpu.load(x_smem.at[slot, steps.warpgroup], layout=plgpu.Layout.WGMMA)
                scale = self.x_scales.load(scales_smem, slot, panel * _ROWS, _ROWS, x_panel, 0, _ROWS, interpret=self.interpret)
                x = word.astype(jnp.int32).astype(jnp.float32) * lax.broadcast_in_dim(scale, word.shape, [0])
                decoded = decoded_smem.at[steps.warpgroup * _DECODED + lax.rem(panel, jnp.int32(_DECODED))]
                decoded[...] = x.astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.wgmma(accumulator, decoded.transpose((1, 0)), dy_smem.at[slot])
                # The product of the panel before is done once no more than this panel's runs.
                plgpu.wgmma_wait(1)

                @pl.when(panel > 0)
                def _() -> None:
                    steps.release(panel - 1)

            plgpu.wgmma_wait(0)
            steps.release(self.shape.panels - 1)
            return accumulator[...]

        sums = pl.run_scoped(multiply, plgpu.ACC((64, c.tile_n), jnp.float32))
        # Other warps may still read what they decoded last, which the next tile overwrites.
        plgpu.commit_smem()
        return [[sums[:, p : p + 64] for p in range(0, c.tile_n, 64)]]


def dweight_kept(
    arena: Any,
    x: Place | tuple[jax.Array, jax.Array],
    dy: jax.Array,
    out: Place | None = None,
    *,
    m: int,
    n: int,
    k: int,
    out_dtype: Any = jnp.float32,
    config: TileConfig | None = None,
    multiprocessors: int = 132,
    interpret: bool = False,
) -> jax.Array | None:
    """``decoded(x)^T @ dy``.

    Args:
      arena: the arena's ref; None when no operand is a place.
      x: words int8 ``[m, k]`` and scales float32 ``[ceil(k / 128), m]``, or their place.
      dy: bf16 ``[m, n]``.
      out: where the result goes; None: to an array of its own.
      m: rows of ``x`` and ``dy``, which are summed over.
      n: columns of the result.
      k: its rows.
      out_dtype: bfloat16 or float32.
      config: overrides :func:`config_for`.
      multiprocessors: of the device.
      interpret: whether to interpret the kernel on the CPU, looking for races.

    Returns:
      ``[k, n]``; None when ``out`` is a place.

    Raises:
      ValueError: when :func:`supports` has a reason against it, or the config's ``tile_m`` is not 128 in two warpgroups.
    """
    in_arena = isinstance(x, Place), out is not None
    if reason := supports(m, n, k, out_in_arena=in_arena[1], out_dtype=out_dtype):
        raise ValueError(f"dweight_kept: {reason}")
    chosen = config or config_for(k, n, m, multiprocessors)
    if (chosen.tile_m, chosen.warpgroups) != (128, 2):
        raise ValueError(f"dweight_kept: config must have tile_m 128 and 2 warpgroups, got {chosen.tile_m} and {chosen.warpgroups}")
    if jnp.dtype(out_dtype) == jnp.float32:
        chosen = replace(chosen, piece=min(chosen.piece, 32))  # 128 bytes of a row
    offsets = pack([a if isinstance(a, Place) else None for a in (x, out)])
    arrays = (*(() if isinstance(x, Place) else x), dy)
    return _launch(arena, offsets, arrays, Shape(k, n, m // _ROWS), in_arena, jnp.dtype(out_dtype), chosen, multiprocessors, interpret)


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6, 7, 8))
def _launch(
    arena: Any,
    offsets: jax.Array,
    arrays: tuple[jax.Array, ...],
    shape: Shape,
    in_arena: tuple[bool, bool],
    out_dtype: Any,
    config: TileConfig,
    multiprocessors: int,
    interpret: bool,
) -> jax.Array | None:
    def make(refs: Sequence[Any], places: Sequence[Place | None]) -> _Operands:
        x, x_scales = (arena, arena) if in_arena[0] else refs[:2]
        return _Operands(Matrix(x, places[0]), RowScales(x_scales, places[0]), refs[-1], shape, config, interpret)

    stage = [
        tile((config.stages, 2, _ROWS, 64), jnp.int8, 64),
        RowScales.smem(config.stages, _ROWS, in_arena[0], interpret=interpret),
        tile((config.stages, _ROWS, config.tile_n), jnp.bfloat16),
        tile((config.warpgroups * _DECODED, _ROWS, 64), jnp.bfloat16),
    ]
    return launch_product(
        make,
        arena,
        arrays,
        stage,
        arrivals=4,
        offsets=offsets,
        in_arena=in_arena,
        shape=shape,
        config=config,
        multiprocessors=multiprocessors,
        interpret=interpret,
        out_dtype=out_dtype,
    )
