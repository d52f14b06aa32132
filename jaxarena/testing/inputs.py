"""Arrays for tests: random by seed, so that a failure comes back, and poisoned, so that what nobody wrote is seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["integers", "normal", "poison"]


def normal(seed: int, shape: Sequence[int], dtype: Any = jnp.float32, *, scale: float = 1.0) -> jax.Array:
    """Standard normal numbers times ``scale``, rounded to ``dtype``."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, dtype)


def integers(seed: int, shape: Sequence[int], low: int, high: int, dtype: Any = jnp.int32) -> jax.Array:
    """Whole numbers in ``low .. high - 1``. As floats: sums and products of a few small ones are exact, in any order."""
    return jnp.asarray(np.random.default_rng(seed).integers(low, high, shape), dtype)


def poison(shape: Sequence[int], dtype: Any) -> jax.Array:
    """An array of 0xFF bytes: NaN as float32 and bfloat16, -1 as an integer."""
    nbytes = math.prod(shape) * jnp.dtype(dtype).itemsize
    return jnp.asarray(np.full(nbytes, 0xFF, np.uint8).view(jnp.dtype(dtype)).reshape(shape))
