"""Small ops with exact arithmetic, and numbers to run them on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxarena.ops import launch


@launch("twice")
def twice_forward(x: Any) -> Any:
    return 2 * x


@launch("sum_of")
def sum_forward(x: Any, y: Any) -> Any:
    return x + y


@launch("both", row_ndim=(1, 0))
def both_forward(x: Any) -> Any:
    return x - 1, x.sum(axis=-1)


@jax.custom_vjp
def twice(x: Any) -> Any:
    return twice_forward(x)


twice.defvjp(lambda x: (twice_forward(x), None), lambda _, dy: (twice_forward(dy),))


@launch("times")
def times_forward(x: Any, y: Any) -> Any:
    return x * y


@jax.custom_vjp
def times(x: Any, y: Any) -> Any:
    """x * y, which keeps both for the backward pass: one launch a gradient."""
    return times_forward(x, y)


times.defvjp(lambda x, y: (times_forward(x, y), (x, y)), lambda kept, dz: (times_forward(kept[1], dz), times_forward(kept[0], dz)))


def integers(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Small integers as floats: sums and products of a few are exact, so that two ways to run a program agree in every bit."""
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), dtype)
