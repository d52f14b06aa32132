"""Tensor-core products of two shared-memory tiles in two steps: start one, settle it later.

:func:`start` issues ``a b^T`` for a tile ``a`` of 64 rows and a tile ``b``, both with 128 bytes of the contracted axis a row, and returns
an accumulator that is still being written. :func:`settle` waits until it is done and returns the numbers.
Between the two nothing may touch the accumulator.

Pallas' own ``wgmma`` adds to an accumulator that was cleared before; in a block-scaled product that is once for every 128 of the
contracted axis. Here the first instruction overwrites (its scale-d predicate is false), so nothing has to be cleared, and the
compiler has no cleared registers to keep.

In interpret mode :func:`start` computes the product at once and :func:`settle` hands it on.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from jaxarena.pallas.tiles import tile_transforms

__all__ = ["settle", "start"]

_RAW = plgpu.Layout._WGMMA_ACC_32BIT  # one register a value, as the instructions write them
_INSTRUCTIONS = 4  # of 32 bytes of the contracted axis each


def start(a_smem: Any, b_smem: Any, *, interpret: bool) -> jax.Array:
    """Starts ``a b^T``.

    Args:
      a_smem: int8 ``[64, 128]``, a swizzled tile.
      b_smem: int8 ``[n, 128]``, likewise; n a multiple of 16, at most 256.
      interpret: whether the kernel runs in interpret mode.

    Returns:
      The accumulator, int32 ``[64, n]``, for :func:`settle` alone.
    """
    rows, n = a_smem.shape[0], b_smem.shape[0]
    if interpret:

        def product(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, a_smem, b_smem.transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(product, plgpu.ACC((rows, n), jnp.int32))
    tile = plgpu.RefType(tile_transforms(jnp.int8))

    @plgpu.inline_mgpu(arg_types=(tile, tile), return_type=plgpu.ShapeDtypeStruct((rows, n), jnp.int32, layout=_RAW))
    def issue(_context: Any, a: Any, b: Any) -> Any:
        return _issue(a, b, n)

    return issue(a_smem, b_smem)


def settle(accumulator: jax.Array, *, pending: int, interpret: bool) -> jax.Array:
    """The numbers of a started product, int32 ``[64, n]``, once at most the ``pending`` youngest products still run."""
    if interpret:
        return accumulator

    @plgpu.inline_mgpu(arg_types=(_RAW,), return_type=plgpu.ShapeDtypeStruct(accumulator.shape, jnp.int32, layout=plgpu.Layout.WGMMA))
    def wait(_context: Any, registers: Any) -> Any:
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], f"wgmma.wait_group.sync.aligned {pending};", "", has_side_effects=True)
        # LLVM takes registers for values, and could else move what uses them before the wait.
        return mgpu.optimization_barrier(registers).to_layout(mgpu.WGMMA_LAYOUT)

    return wait(accumulator)


def _issue(a: Any, b: Any, n: int) -> Any:
    """The instructions for one tile pair, in one piece of PTX whose outputs are the accumulator's registers."""
    i32 = ir.IntegerType.get_signless(32)
    form: dict[str, Any] = {"swizzle": 128, "large_tile": (64, 128), "group_size": (64, 128)}
    (a_start, a_strides), _, _ = mgpu.mma_utils.create_descriptor(a, logical_k_major=False, **form)
    form |= {"large_tile": (128, 128), "group_size": (128, n)}
    transposed = mgpu.memref_transpose(b, (1, 0, 3, 2))
    (b_start, b_strides), _, _ = mgpu.mma_utils.create_descriptor(transposed, logical_k_major=True, **form)
    count = n // 2  # registers a thread: 64 n values over 128 threads
    registers = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    lines = [
        "{ .reg .pred add, overwrite; .reg .b64 a, b;",
        "setp.ne.b32 overwrite, 0, 0; setp.ne.b32 add, 1, 0;",
        "wgmma.fence.sync.aligned;",
    ]
    for i in range(_INSTRUCTIONS):
        # Descriptors count in 16 bytes.
        lines += [
            f"add.s64 a, ${count}, {i * a_strides[1][0] // 16}; add.s64 b, ${count + 1}, {i * b_strides[1][0] // 16};",
            f"wgmma.mma_async.sync.aligned.m64n{n}k32.s32.s8.s8 {registers}, a, b, {'add' if i else 'overwrite'};",
        ]
    lines.append("wgmma.commit_group.sync.aligned; }")
    outputs = llvm.inline_asm(
        llvm.StructType.get_literal([i32] * count),
        [a_start, b_start],
        "\n".join(lines),
        ",".join(["=r"] * count + ["l", "l"]),
        asm_dialect=0,
        has_side_effects=True,
    )
    raw = mgpu.fragmented_array.WGMMA_LAYOUT_ACC_32BIT
    array = mgpu.FragmentedArray.splat(mgpu.c(0, i32), (64, n), raw, is_signed=True).registers.copy()
    for i, index in enumerate(np.ndindex(array.shape)):
        array[index] = vector.broadcast(ir.VectorType.get((1,), i32), llvm.extractvalue(i32, outputs, [i]))
    return mgpu.FragmentedArray(_registers=array, _layout=raw, _is_signed=True)
