"""Shared-memory tiles that bulk copies fill and tensor cores read, and tiles that are bytes to one and numbers to the other.

A tile's rows are 128 bytes (a panel's; :mod:`jaxarena.panels`) or 64, swizzled within 8 rows: the form in which bulk copies write and
``wgmma`` reads without bank conflicts. The arena is int8, so what is copied out of it or into it is a tile of int8; a kernel reads or
writes the same bytes as another dtype through the second member of a union (:func:`viewed`).

In interpret mode a union's members would be separate buffers. There :func:`viewed` makes two, and the kernel carries the bytes from one
to the other: :func:`read_bytes` before it reads numbers, :func:`write_bytes` after it wrote them. On a GPU both do nothing.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["read_bytes", "tile", "tile_transforms", "viewed", "write_bytes"]


def tile_transforms(dtype: Any, row_bytes: int = 128) -> tuple[Any, ...]:
    """The memory form of a tile whose rows, or pieces of rows, are ``row_bytes`` (128 or 64) long."""
    return plgpu.TilingTransform((8, row_bytes // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(row_bytes)


def tile(shape: tuple[int, ...], dtype: Any, row_bytes: int = 128) -> Any:
    """Scratch for tiles of ``shape[-2:]``; as many as the leading axes say."""
    return plgpu.SMEM(shape, dtype, transforms=tile_transforms(dtype, row_bytes))


def viewed(as_bytes: Any, as_numbers: Any, *, interpret: bool) -> Any:
    """Scratch that is a pair of refs to the same memory: as bytes, and as numbers."""
    return (as_bytes, as_numbers) if interpret else plgpu.RefUnion(as_bytes, as_numbers)


def read_bytes(pair: Any, index: Any, *, interpret: bool) -> None:
    """Lets the numbers at ``index`` be read that were copied there as bytes."""
    if interpret:
        as_bytes, as_numbers = pair
        x = as_bytes[index]
        size = as_numbers.dtype.itemsize
        as_numbers[index] = lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, size), as_numbers.dtype)
        plgpu.commit_smem()


def write_bytes(pair: Any, index: Any, *, interpret: bool) -> None:
    """Lets the bytes at ``index`` be copied that were written there as numbers."""
    if interpret:
        as_bytes, as_numbers = pair
        x = lax.bitcast_convert_type(as_numbers[index], jnp.int8)
        as_bytes[index] = x.reshape(as_bytes[index].shape)
