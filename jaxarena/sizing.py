"""How large a batch may be: plans for abstract shapes, bisected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxarena.step import Step, jit

__all__ = ["max_batch"]


def max_batch(function: Callable[..., Any] | Step, bytes: int, arguments: Callable[[int], tuple[Any, ...]], *, limit: int = 65536) -> int:
    """The largest batch for which a step's arena and estimated XLA temporaries fit in ``bytes``. Nothing is compiled.

    Example::

        ja.max_batch(train_step, 20 * ja.GiB, lambda n: (params, opt_state, jax.ShapeDtypeStruct((n, 4097), jnp.int32)))

    Args:
      function: what would be given to :func:`jaxarena.jit`, or a step.
      bytes: the memory for what the step needs beside its arguments and results.
      arguments: from a batch to the step's positional arguments: arrays or ``jax.ShapeDtypeStruct``.
      limit: no larger batch is tried.

    Returns:
      0 when not even a batch of 1 fits. A larger batch is taken to need more.

    Raises:
      TypeError: ``arguments`` does not return a tuple.
      ValueError: ``limit`` is below 1.
    """
    if limit < 1:
        raise ValueError(f"max_batch: limit must be at least 1, got {limit}")
    step = function if isinstance(function, Step) else jit(function)

    def fits(batch: int) -> bool:
        args = arguments(batch)
        if not isinstance(args, tuple):
            raise TypeError(f"max_batch: arguments must return a tuple, got {type(args).__name__}")
        return step.plan(*args).fits(bytes)

    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
