"""What our own tests use, for users too: tolerances derived from a dtype and the length of a sum, and a float64 oracle runner.

The tolerance follows the usual model of rounding (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 3.1 and
4.2): storing a value rounds it by at most u, the unit round-off of its format; a sum of n products whose roundings behave
like independent ones is off by about u * sqrt(n) times the size of its terms, n * u at the worst.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["assert_close_to_oracle", "oracle", "poison", "tolerance", "unit_roundoff"]


def unit_roundoff(dtype: Any) -> float:
    """Half the distance from 1 to the next number of a floating-point ``dtype``: 2**-24 for float32, 2**-9 for bfloat16."""
    return float(jnp.finfo(dtype).eps) / 2


def tolerance(dtype: Any, terms: int = 1, *, stages: int = 1, compute_dtype: Any = jnp.float32) -> float:
    """How far, relative to the largest value of an array, a right result may lie from the exact one.

    Args:
      dtype: the format that the operands and the result are stored in.
      terms: the length of the longest sum behind one element.
      stages: how many times a value is rounded to ``dtype`` on its way (operands, intermediates, result).
      compute_dtype: the format that sums are formed in.
    """
    rounding = (stages + 1) * unit_roundoff(dtype)
    summing = 4 * stages * float(np.sqrt(terms)) * unit_roundoff(compute_dtype)
    return 2 * (rounding + summing)


def oracle(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a jnp ``function`` with every floating-point array of ``args`` widened to float64; returns numpy arrays."""

    def widen(a: Any) -> Any:
        a = np.asarray(a)
        return a.astype(np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a

    with jax.enable_x64(True):
        wide = jax.tree.map(widen, (args, kwargs))
        return jax.tree.map(np.asarray, function(*wide[0], **wide[1]))


def poison(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array of 0xFF bytes: NaN as float32 and bfloat16, -1 as an integer."""
    nbytes = int(np.prod(shape)) * jnp.dtype(dtype).itemsize
    return jnp.asarray(np.full(nbytes, 0xFF, np.uint8).view(jnp.dtype(dtype)).reshape(shape))


def assert_close_to_oracle(actual: Any, expected: Any, *, dtype: Any, terms: int = 1, stages: int = 1, names: str = "result") -> None:
    """Asserts that every leaf of ``actual`` is within :func:`tolerance` of the float64 ``expected``, and as finite as it is.

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
