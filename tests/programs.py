"""Small ops with exact arithmetic, and the one comparison that every step must pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

import jaxarena as ja
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


def check_step(function: Callable[..., Any], *args: Any, exact: bool = True, **jit_options: Any) -> ja.Plan:
    """Runs ``function`` planned, with the arena filled with 0x00, with 0xFF (as bytes and as words) and with reuse off: all the same
    bits, and the plain result.

    Returns the plan. With ``exact=False`` the caller compares with the plain result itself.
    """
    step = ja.jit(function, **jit_options)
    plan = step.plan(*args)
    plan.verify()
    results = [step(plan.allocate(fill), *args)[0] for fill in (0, 255)]
    as_bytes = ja.ArenaBuffer(jnp.full((plan.arena.rows, 128), -1, jnp.int8), (plan.fingerprint,))
    results.append(step(as_bytes, *args)[0])
    no_reuse = ja.jit(function, reuse=False, **jit_options)
    results.append(no_reuse(no_reuse.plan(*args).allocate(255), *args)[0])
    for other in results[1:]:
        chex.assert_trees_all_equal(results[0], other, strict=True)
    if exact:
        chex.assert_trees_all_equal(results[0], jax.jit(function)(*args), strict=True)
    return plan
