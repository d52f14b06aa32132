"""Gradients of a projection in int8 words: both are the product of :mod:`jaxarena.pallas.project_int8`, of operands quantized along the
axis that it sums over::

    y  = x w           x by rows                  w by tiles, forward           sums over k
    dx = dy w^T        dy by rows                 w by tiles, backward          sums over n
    dw = x^T dy        x by columns               dy by tiles, forward          sums over m

``x [m, k]``, ``w [k, n]``, ``dy [m, n]``. A column of x has a scale of its own every 128 rows, so that a channel larger than the others
costs them nothing; 128 columns of dy share theirs. Quantizing: :func:`~jaxarena.pallas.quantize.quantize_rows`,
:func:`~jaxarena.pallas.quantize.quantize_columns`, :func:`~jaxarena.pallas.quantize_tiles.quantize_tiles` (for dy with
``orientations=("forward",)``). Sums within a block are exact, blocks are added in ascending order: results repeat bit for bit.

For normally distributed operands either gradient is within 1.5e-2 of float64 (root mean square of the error over that of the result).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxarena.pallas.frame import TileConfig
from jaxarena.pallas.operands import Place
from jaxarena.pallas.project_int8 import project_int8

__all__ = ["dweight_int8", "dx_int8"]


def dx_int8(
    arena: Any,
    dy: Place | tuple[jax.Array, jax.Array],
    weight: Place | jax.Array,
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
    """``dx = decoded(dy) @ decoded(weight)^T`` as bf16.

    Args:
      arena: the arena's ref; None when no operand is a place.
      dy: quantized by rows: words int8 ``[m, n]`` and scales float32 ``[ceil(n / 128), m]``, or their place.
      weight: quantized by tiles, backward: words int8 ``[k, n]``, or their place.
      weight_scales: float32 ``[ceil(k / 128), ceil(n / 128)]``.
      out: where the result goes; None: to an array of its own.
      m: rows; in the arena with the pads between groups.
      n: columns of ``dy``, which are summed over.
      k: columns of the result.
      config: overrides :func:`jaxarena.pallas.project_int8.config_for`.
      multiprocessors: of the device.
      interpret: whether to interpret the kernel on the CPU, looking for races.

    Returns:
      bf16 ``[m, k]``; None when ``out`` is a place.

    Raises:
      ValueError: when :func:`jaxarena.pallas.project_int8.supports` has a reason against ``(m, k, n)``.
    """
    sizes = {"m": m, "n": k, "k": n}
    return project_int8(arena, dy, weight, weight_scales, out, **sizes, config=config, multiprocessors=multiprocessors, interpret=interpret)


def dweight_int8(
    arena: Any,
    x: Place | tuple[jax.Array, jax.Array],
    dy: Place | jax.Array,
    dy_scales: jax.Array,
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
    """``dw = decoded(x)^T @ decoded(dy)``.

    Args:
      arena: the arena's ref; None when no operand is a place.
      x: quantized by columns: words int8 ``[k, m]`` and scales float32 ``[ceil(m / 128), k]``, or their place.
      dy: quantized by tiles, forward: words int8 ``[n, m]``, or their place.
      dy_scales: float32 ``[ceil(n / 128), ceil(m / 128)]``.
      out: where the result goes; None: to an array of its own.
      m: rows of ``x`` and ``dy``, which are summed over.
      n: columns of the result.
      k: its rows.
      out_dtype: bfloat16 or float32.
      config: overrides :func:`jaxarena.pallas.project_int8.config_for`.
      multiprocessors: of the device.
      interpret: whether to interpret the kernel on the CPU, looking for races.

    Returns:
      ``[k, n]``; None when ``out`` is a place.

    Raises:
      ValueError: when :func:`jaxarena.pallas.project_int8.supports` has a reason against ``(k, n, m)``.
    """
    sizes = {"m": k, "n": n, "k": m}
    return project_int8(
        arena, x, dy, dy_scales, out, **sizes, out_dtype=out_dtype, config=config, multiprocessors=multiprocessors, interpret=interpret
    )
