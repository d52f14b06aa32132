"""Numbers in registers to int8 words and back, as :func:`jaxarena.storage.quantize` defines them, one word or two::

    one word    scale = amax / 127      v = round(x / scale) = word
    two words   scale = amax / 32639    v = round(x / scale) = 256 * word + low,   word = floor((v + 128) / 256)

Kernels multiply by 1 / scale: v may differ by one from the reference's where x / scale lies within rounding of a half.

**Transposing.** Registers cannot be transposed, nor can int8 in shared memory, but the tensor cores read 16-bit tiles either way:
``a^T I`` with the identity I is ``a^T`` exactly, as every sum has one term that is not zero. A NaN or an Inf of a spreads over its row of
the result and no further.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["encode", "magnitudes", "transposed", "write_identity"]

_TINY = float(jnp.finfo(jnp.float32).tiny)
_LEVELS = {1: 127, 2: 32639}


def magnitudes(pieces: Sequence[jax.Array]) -> jax.Array:
    """The largest magnitude of each of the rows ``[64]`` that float32 pieces ``[64, columns]`` make up, by its bits.

    As int32 bits order NaN above Inf above all numbers.
    """
    tops = [jnp.max(lax.bitcast_convert_type(piece, jnp.int32) & 0x7FFFFFFF, axis=1) for piece in pieces]
    return functools.reduce(jnp.maximum, tops)


def encode(pieces: Sequence[jax.Array], top: jax.Array, words: int) -> tuple[list[tuple[jax.Array, ...]], jax.Array]:
    """Words of float32 pieces whose rows have the magnitudes ``top``.

    Args:
      pieces: float32 ``[64, columns]`` each.
      top: int32 ``[64]``: bits of the largest magnitude of the block that a row lies in.
      words: 1 or 2.

    Returns:
      For each piece its word, or word and low word, int8 of the piece's shape; and the scales ``[64]``.
    """
    levels = _LEVELS[words]
    amax = lax.bitcast_convert_type(top, jnp.float32)
    finite = top < 0x7F800000
    coded = finite & (top >= 0x00800000)
    scale = jnp.where(coded, jnp.maximum(amax * (1 / levels), _TINY), 1.0)
    inverse = jnp.where(coded, 1.0 / scale, 0.0)
    # In a block too small for a normal scale words stay at or below amax / scale, so that it decodes within its own amax.
    limit = jnp.where(amax < levels * _TINY, (amax * inverse).astype(jnp.int32), levels)
    limit = jnp.where(coded, limit, 0)
    made: list[tuple[jax.Array, ...]] = []
    for piece in pieces:
        wide_inverse, wide_limit = (lax.broadcast_in_dim(v, piece.shape, [0]) for v in (inverse, limit))
        # Adding 3 * 2^22 rounds to the nearest integer, which then stands in the low bits.
        rounded = lax.bitcast_convert_type(piece * wide_inverse + 12582912.0, jnp.int32) - 0x4B400000
        v = jnp.maximum(jnp.minimum(rounded, wide_limit), 0 - wide_limit)
        if words == 1:
            made.append((v.astype(jnp.int8),))
        else:
            word = (v + 128) >> 8
            made.append((word.astype(jnp.int8), (v - word * 256).astype(jnp.int8)))
    return made, jnp.where(finite, jnp.where(coded, scale, 0.0), jnp.nan)


def write_identity(smem: Any) -> None:
    """Writes the identity into a bf16 tile ``[64, 64]``."""
    row, column = (plgpu.broadcasted_iota(jnp.int32, smem.shape, axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1))
    smem[...] = jnp.where(row == column, 1.0, 0.0).astype(smem.dtype)
    plgpu.commit_smem()


def transposed(smem: Any, identity_smem: Any) -> jax.Array:
    """A bf16 tile ``[64, 64]`` transposed, float32."""

    def product(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, smem.transpose((1, 0)), identity_smem)
        return accumulator[...]

    return pl.run_scoped(product, plgpu.ACC((64, 64), jnp.float32))
