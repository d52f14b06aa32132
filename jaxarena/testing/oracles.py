"""Float64 oracles, and an op's values and gradients beside one.

An op is passed as a function of its arrays, ``argnums`` says which of them have a gradient, and ``naive`` is the same mathematics in
plain jnp. Gradients are pulled back from cotangents that are drawn once for each result and can be written in bfloat16, so that op and
oracle see the very same numbers in any format.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxarena.testing.inputs import normal
from jaxarena.testing.tolerances import tolerance

__all__ = ["assert_close_to_oracle", "assert_op_matches_reference", "check_against_oracle", "oracle", "value_and_gradients"]


def oracle(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a jnp ``function`` with every floating-point array of ``args`` widened to float64; returns numpy arrays."""

    def widen(a: Any) -> Any:
        a = np.asarray(a)
        return a.astype(np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a

    with jax.enable_x64(True):
        wide = jax.tree.map(widen, (args, kwargs))
        return jax.tree.map(np.asarray, function(*wide[0], **wide[1]))


def assert_close_to_oracle(actual: Any, expected: Any, *, dtype: Any, terms: int = 1, stages: int = 1, names: str = "result") -> None:
    """Asserts that every leaf of ``actual`` is within :func:`~jaxarena.testing.tolerance` of the float64 ``expected``, and as finite.

    The error of a leaf is its largest absolute difference over the largest magnitude of the expected leaf.

    Raises:
      AssertionError: names the leaf, the error and the limit.
    """
    limit = tolerance(dtype, terms, stages=stages)
    flat = jax.tree_util.tree_leaves_with_path(actual)
    for (path, a), e in zip(flat, jax.tree.leaves(jax.tree.map(lambda _, e: e, actual, expected)), strict=True):
        a, e = np.asarray(a).astype(np.float64), np.asarray(e).astype(np.float64)
        where = names + jax.tree_util.keystr(path)
        if a.shape != e.shape:
            raise AssertionError(f"{where}: shape {a.shape}, expected {e.shape}")
        if not np.array_equal(np.isfinite(a), np.isfinite(e)):
            raise AssertionError(f"{where}: {np.sum(~np.isfinite(a))} values are not finite, expected {np.sum(~np.isfinite(e))}")
        finite = np.isfinite(e)
        if not finite.any():
            continue
        scale = np.max(np.abs(e[finite])) or 1.0
        error = np.max(np.abs(a[finite] - e[finite])) / scale
        if not error <= limit:
            derived = f"{jnp.dtype(dtype).name}, sums of {terms}, {stages} roundings"
            raise AssertionError(f"{where}: error {error:.3g} of the largest value, limit {limit:.3g} ({derived})")


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
    return value, pull_back(jax.tree.unflatten(tree, cotangents))


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
    """Value and gradients are those of ``naive`` in float64; gradients have the dtype of their argument.

    Args:
      op: the function of arrays under test.
      naive: the same mathematics in plain jnp, differentiable by JAX.
      args: the arrays both are called with.
      argnums: the arguments that have a gradient.
      dtype: with ``terms`` and ``stages``, the :func:`~jaxarena.testing.tolerance` allowed.
      terms: the length of the longest sum.
      stages: how many times a value is rounded to ``dtype``.
      jit: whether ``op`` runs under ``jax.jit``.

    Raises:
      AssertionError: names the value or gradient, its error and the limit.
    """
    run = functools.partial(value_and_gradients, argnums=tuple(argnums))
    ours = functools.partial(run, op)
    value, gradients = (jax.jit(ours) if jit else ours)(list(args))
    expected_value, expected_gradients = oracle(functools.partial(run, naive), list(args))
    assert_close_to_oracle(value, expected_value, dtype=dtype, terms=terms, stages=stages, names="value")
    for number, got, wanted in zip(argnums, gradients, expected_gradients, strict=True):
        chex.assert_equal(got.dtype, args[number].dtype)
        assert_close_to_oracle(got, wanted, dtype=dtype, terms=terms, stages=stages, names=f"gradient of argument {number}")


def assert_op_matches_reference(
    op: Callable[..., Any],
    reference: Callable[..., Any],
    args: Sequence[Any],
    argnums: Sequence[int] = (),
    *,
    dtype: Any,
    terms: int = 1,
    stages: int = 1,
) -> None:
    """Value and gradients are those of ``reference`` run in the same formats, dtypes and structure too.

    For a reference that is no float64 oracle: another implementation, or the launch's own reference beside its kernel. Both may be off by
    :func:`~jaxarena.testing.tolerance` of the largest value, in opposite directions, so twice that is allowed.

    Args:
      op: the function of arrays under test.
      reference: what it is held to, called with the same arrays and differentiated by JAX.
      args: the arrays.
      argnums: the arguments that have a gradient.
      dtype: with ``terms`` and ``stages``, the tolerance of each.
      terms: the length of the longest sum.
      stages: how many times a value is rounded to ``dtype``.

    Raises:
      AssertionError: chex's, which names the leaf and its largest differences.
    """
    limit = 2 * tolerance(dtype, terms, stages=stages)
    run = functools.partial(value_and_gradients, argnums=tuple(argnums))
    actual = jax.jit(functools.partial(run, op))(list(args))
    expected = jax.jit(functools.partial(run, reference))(list(args))
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    # A leaf's largest value is its unit, so that one limit is right for all.
    units = jax.tree.map(lambda e: float(np.max(np.abs(np.asarray(e, np.float64)), initial=0.0)) or 1.0, expected)
    scaled = (jax.tree.map(lambda x, unit: np.asarray(x, np.float64) / unit, tree, units) for tree in (actual, expected))
    chex.assert_trees_all_close(*scaled, rtol=0, atol=limit)
