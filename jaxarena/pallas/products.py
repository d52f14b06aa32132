"""Tensor-core products of shared-memory tiles in two steps: start them, settle them later.

:func:`start` issues ``a b^T`` for a tile ``a`` of 64 rows and a tile ``b``, both with 128 bytes of the contracted axis a row, or the sum of
such products, and returns an accumulator that is still being written. :func:`settle` waits until it is done and returns the numbers.
Between the two nothing may touch the accumulator.

Pallas' own ``wgmma`` adds to an accumulator that was cleared before; in a block-scaled product that is once for every 128 of the
contracted axis. Here the first instruction overwrites (its scale-d predicate is false), so nothing has to be cleared, and the
compiler has no cleared registers to keep. Given numbers to add to, it adds to them in their registers.

In interpret mode :func:`start` computes the product at once and :func:`settle` hands it on.
"""

from __future__ import annotations

from collections.abc import Sequence
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
_ROWS = 64
_INSTRUCTIONS = 4  # of 32 bytes of the contracted axis each


def start(pairs: Sequence[tuple[Any, Any]], onto: jax.Array | None = None, *, interpret: bool) -> jax.Array:
    """Starts ``onto + sum of a b^T``.

    Args:
      pairs: of tiles a, int8 ``[64, 128]``, and b, int8 ``[n, 128]``, swizzled; n a multiple of 16, at most 256.
      onto: int32 ``[64, n]`` that the products are added to; None: zero.
      interpret: whether the kernel runs in interpret mode.

    Returns:
      The accumulator, int32 ``[64, n]``, for :func:`settle` alone.
    """
    n = pairs[0][1].shape[0]
    if interpret:

        def product(acc: Any) -> jax.Array:
            for a_smem, b_smem in pairs:
                plgpu.wgmma(acc, a_smem, b_smem.transpose((1, 0)))
            return acc[...]

        total = pl.run_scoped(product, plgpu.ACC((_ROWS, n), jnp.int32))
        return total if onto is None else onto + total
    tile = plgpu.RefType(tile_transforms(jnp.int8))
    numbers = () if onto is None else (onto,)

    @plgpu.inline_mgpu(
        arg_types=(*[tile] * (2 * len(pairs)), *[plgpu.Layout.WGMMA] * len(numbers)),
        return_type=plgpu.ShapeDtypeStruct((_ROWS, n), jnp.int32, layout=_RAW),
    )
    def issue(_context: Any, *args: Any) -> Any:
        tiles = args[: 2 * len(pairs)]
        return _issue(list(zip(tiles[::2], tiles[1::2], strict=True)), n, args[-1] if numbers else None)

    return issue(*[t for pair in pairs for t in pair], *numbers)


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


def _issue(pairs: Sequence[tuple[Any, Any]], n: int, onto: Any) -> Any:
    """The instructions for all tile pairs, in one piece of PTX whose outputs are the accumulator's registers."""
    i32 = ir.IntegerType.get_signless(32)
    raw = mgpu.fragmented_array.WGMMA_LAYOUT_ACC_32BIT
    count = n // 2  # registers a thread: 64 n values over 128 threads
    registers = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    lines = [
        "{ .reg .pred add, overwrite; .reg .b64 a, b;",
        "setp.ne.b32 overwrite, 0, 0; setp.ne.b32 add, 1, 0;",
        "wgmma.fence.sync.aligned;",
    ]
    operands: list[Any] = []
    first = onto is None
    for a, b in pairs:
        form: dict[str, Any] = {"swizzle": 128, "large_tile": (64, 128), "group_size": (64, 128)}
        (a_start, a_strides), _, _ = mgpu.mma_utils.create_descriptor(a, logical_k_major=False, **form)
        form |= {"large_tile": (128, 128), "group_size": (128, n)}
        transposed = mgpu.memref_transpose(b, (1, 0, 3, 2))
        (b_start, b_strides), _, _ = mgpu.mma_utils.create_descriptor(transposed, logical_k_major=True, **form)
        at = count + len(operands)
        operands += [a_start, b_start]
        for i in range(_INSTRUCTIONS):
            # Descriptors count in 16 bytes.
            lines += [
                f"add.s64 a, ${at}, {i * a_strides[1][0] // 16}; add.s64 b, ${at + 1}, {i * b_strides[1][0] // 16};",
                f"wgmma.mma_async.sync.aligned.m64n{n}k32.s32.s8.s8 {registers}, a, b, {'overwrite' if first else 'add'};",
            ]
            first = False
    lines.append("wgmma.commit_group.sync.aligned; }")
    tied: list[str] = []
    if onto is not None:
        # The numbers come in the registers that the sums leave in.
        operands += [vector.extract(register, [], [0]) for register in onto.to_layout(raw).registers.flat]
        tied = [str(i) for i in range(count)]
    outputs = llvm.inline_asm(
        llvm.StructType.get_literal([i32] * count),
        operands,
        "\n".join(lines),
        ",".join(["=r"] * count + ["l", "l"] * len(pairs) + tied),
        asm_dialect=0,
        has_side_effects=True,
    )
    array = mgpu.FragmentedArray.splat(mgpu.c(0, i32), (_ROWS, n), raw, is_signed=True).registers.copy()
    for i, index in enumerate(np.ndindex(array.shape)):
        array[index] = vector.broadcast(ir.VectorType.get((1,), i32), llvm.extractvalue(i32, outputs, [i]))
    return mgpu.FragmentedArray(_registers=array, _layout=raw, _is_signed=True)
