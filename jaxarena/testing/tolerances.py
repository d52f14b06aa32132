"""How far from exact a right result may be.

The usual model of rounding (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 3.1 and 4.2): storing a value rounds it by
at most u, the unit round-off of its format; a sum of n products whose roundings behave like independent ones is off by about
u * sqrt(n) times the size of its terms, n * u at the worst.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

__all__ = ["tolerance", "unit_roundoff"]


def unit_roundoff(dtype: Any) -> float:
    """Half the distance from 1 to the next number of a floating-point ``dtype``: 2**-24 for float32, 2**-8 for bfloat16."""
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
    summing = 4 * stages * math.sqrt(terms) * unit_roundoff(compute_dtype)
    return 2 * (rounding + summing)
