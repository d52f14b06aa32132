"""The same op in JAX's other modes and under its transformations: nothing may change but rounding, and no dtype or type at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxarena.testing.oracles import value_and_gradients

__all__ = ["check_modes", "check_shard_map", "check_vmap"]


def check_modes(op: Callable[..., Any], args: Sequence[Any], argnums: Sequence[int]) -> None:
    """Strict promotion and ``jax_enable_x64`` change neither a bit nor a dtype; two runs give the same bits."""
    run = jax.jit(lambda *arrays: value_and_gradients(op, arrays, argnums))
    plain = run(*args)
    chex.assert_trees_all_equal(plain, run(*args))
    with jax.numpy_dtype_promotion("strict"):
        strict = run(*args)
    with jax.enable_x64(True):
        wide = run(*args)
    for other in (strict, wide):
        chex.assert_trees_all_equal_dtypes(plain, other)
        chex.assert_trees_all_equal(plain, other)


def check_vmap(op: Callable[..., Any], args: Sequence[Any], argnums: Sequence[int], in_axes: Sequence[int | None]) -> None:
    """Mapping over a leading axis gives what a loop over it gives, gradients too.

    ``in_axes`` is 0 or None for each of ``args``, as in ``jax.vmap``.
    """
    sizes = {a.shape[0] for a, axis in zip(args, in_axes, strict=True) if axis == 0}
    (size,) = sizes

    def run(*arrays: Any) -> Any:
        return value_and_gradients(op, arrays, argnums)

    mapped = jax.vmap(run, in_axes=tuple(in_axes))(*args)
    one_by_one = [run(*(a[i] if axis == 0 else a for a, axis in zip(args, in_axes, strict=True))) for i in range(size)]
    looped = jax.tree.map(lambda *parts: jnp.stack(parts), *one_by_one)
    chex.assert_trees_all_equal_dtypes(mapped, looped)
    chex.assert_trees_all_close(mapped, looped, rtol=1e-5, atol=1e-5)


def check_shard_map(op: Callable[..., Any], args: Sequence[Any], argnums: Sequence[int], sharded: Sequence[bool]) -> None:
    """Inside ``shard_map(check_vma=True)`` gradients are typed as their arguments, those of replicated ones summed over devices.

    ``sharded`` says for each of ``args`` whether its leading axis is. The mesh has one device: what is checked is types.
    """
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = tuple(PartitionSpec("data") if s else PartitionSpec() for s in sharded)

    def loss(*arrays: Any) -> Any:
        return sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in jax.tree.leaves(op(*arrays)))

    gradients = jax.grad(loss, argnums=tuple(argnums))
    mapped = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=tuple(specs[i] for i in argnums)))
    # Another fusion may round float32 intermediates otherwise.
    chex.assert_trees_all_close(mapped(*args), jax.jit(gradients)(*args), rtol=1e-5, atol=1e-5)
