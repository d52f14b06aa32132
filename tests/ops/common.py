"""What the tests of every op share: random inputs, gradients by a fixed cotangent, and the checks that hold for any op.

An op is passed as a function of its arrays, ``argnums`` says which of them have a gradient, and ``naive`` is the same mathematics
in plain jnp, which runs in float64 as the oracle.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from jaxarena.ops.interface import launch_of
from jaxarena.testing import assert_close_to_oracle, oracle

DTYPES = (jnp.float32, jnp.bfloat16)


def normal(seed: int, shape: Sequence[int], dtype: Any = jnp.float32, *, scale: float = 1.0) -> jax.Array:
    """Standard normal numbers times ``scale``, rounded to ``dtype``."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, dtype)


def integers(seed: int, shape: Sequence[int], low: int, high: int) -> jax.Array:
    """int32 numbers in ``low .. high - 1``."""
    return jnp.asarray(np.random.default_rng(seed).integers(low, high, shape), jnp.int32)


@contextlib.contextmanager
def raises(error: type[Exception], *texts: str) -> Iterator[None]:
    """Expects ``error`` with a message that holds every one of ``texts``, with the run-time annotation checker out of the way."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(error) as caught:
            yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    for text in texts:
        assert text in str(caught.value)


def value_and_gradients(op: Callable[..., Any], args: Sequence[Any], argnums: Sequence[int]) -> tuple[Any, tuple[Any, ...]]:
    """The result of ``op(*args)`` and its gradients with respect to ``argnums``, for cotangents drawn once for each result."""

    def of_differentiable(*chosen: Any) -> Any:
        full = list(args)
        for number, value in zip(argnums, chosen, strict=True):
            full[number] = value
        return op(*full)

    value, pull_back = jax.vjp(of_differentiable, *(args[i] for i in argnums))
    leaves, tree = jax.tree.flatten(value)
    cotangents = [_cotangent(i, leaf) for i, leaf in enumerate(leaves)]
    return value, pull_back(tree.unflatten(cotangents))


def _cotangent(seed: int, like: jax.Array) -> jax.Array:
    # Rounded to bfloat16 for every dtype, so that the oracle in float64 draws the very same numbers.
    return normal(1000 + seed, like.shape, jnp.bfloat16).astype(like.dtype)


def check_against_oracle(
    op: Callable[..., Any],
    naive: Callable[..., Any],
    args: Sequence[Any],
    argnums: Sequence[int],
    *,
    dtype: Any,
    terms: int,
    stages: int = 1,
    jit: bool = True,
) -> None:
    """Value and gradients are those of ``naive`` in float64; gradients have the dtype of their argument."""
    run = functools.partial(value_and_gradients, argnums=tuple(argnums))
    ours = functools.partial(run, op)
    value, gradients = (jax.jit(ours) if jit else ours)(list(args))
    expected_value, expected_gradients = oracle(functools.partial(run, naive), list(args))
    assert_close_to_oracle(value, expected_value, dtype=dtype, terms=terms, stages=stages, names="value")
    for number, got, wanted in zip(argnums, gradients, expected_gradients, strict=True):
        chex.assert_equal(got.dtype, args[number].dtype)
        assert_close_to_oracle(got, wanted, dtype=dtype, terms=terms, stages=stages, names=f"gradient of argument {number}")


def check_modes(op: Callable[..., Any], args: Sequence[Any], argnums: Sequence[int]) -> None:
    """J5, J8: strict promotion and ``jax_enable_x64`` change neither a bit nor a dtype; two runs give the same bits."""
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
    """Mapping over a leading axis gives what a loop over it gives, gradients too."""
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
    """J3: inside ``shard_map(check_vma=True)`` gradients are typed as their arguments, those of replicated ones summed over devices."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = tuple(PartitionSpec("data") if s else PartitionSpec() for s in sharded)

    def loss(*arrays: Any) -> Any:
        return sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in jax.tree.leaves(op(*arrays)))

    gradients = jax.grad(loss, argnums=tuple(argnums))
    mapped = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=tuple(specs[i] for i in argnums)))
    # Another fusion may round float32 intermediates otherwise.
    chex.assert_trees_all_close(mapped(*args), jax.jit(gradients)(*args), rtol=1e-5, atol=1e-5)


def live_launches(function: Callable[..., Any], *args: Any) -> list[str]:
    """The names of the launches left in ``function``'s jaxpr after dead-code elimination, in order."""
    closed = jax.make_jaxpr(function)(*args)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return list(_launch_names(jaxpr))


def _launch_names(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        launch = launch_of(eqn.primitive)
        if launch is not None:
            yield launch.name
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "jaxpr") or hasattr(p, "eqns")):
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                yield from _launch_names(getattr(inner, "jaxpr", inner))


def gradient_launches(op: Callable[..., Any], args: Sequence[Any], argnums: Sequence[int]) -> list[str]:
    """The launches of a step that takes the gradient with respect to ``argnums`` only: a frozen weight's must not be among them."""
    return live_launches(lambda *arrays: value_and_gradients(op, arrays, argnums)[1], *args)
