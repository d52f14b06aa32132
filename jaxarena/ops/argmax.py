"""The index of the largest element along the last axis, as greedy decoding takes the next token.

::

    y = min { i : x[i] = max_j x[j] }

The lowest index among equals (-0 and +0 are equal); where a row holds a NaN, the index of its first NaN, as in ``jnp.argmax``. The result
is an integer, through which no gradient flows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxarena.ops.checks import check_float, check_ndim
from jaxarena.ops.interface import launch

__all__ = ["argmax"]


def argmax(logits: Float[Array, "*rows v"]) -> Int[Array, "*rows"]:
    """The lowest index of each row's largest element.

    Args:
      logits: ``[..., v]``, bfloat16 or float32, ``v`` at least 1. Its gradient is zero.

    Returns:
      int32 ``[...]``. A row's index does not depend on the other rows.

    Raises:
      TypeError: ``logits`` is not bfloat16 or float32.
      ValueError: ``logits`` has no axis, or its last axis no element.
    """
    check_float("argmax", "logits", logits)
    check_ndim("argmax", "logits", logits, "... v")
    if logits.shape[-1] == 0:
        raise ValueError(f"argmax: logits must have at least one element along the last axis, got shape {tuple(logits.shape)}")
    return _argmax(logits)


@launch("argmax", row_ndim=0)
def argmax_forward(logits: Float[Array, "*rows v"]) -> Int[Array, "*rows"]:
    return lax.argmax(logits, logits.ndim - 1, jnp.int32)


@jax.custom_vjp
def _argmax(logits: Array) -> Array:
    return argmax_forward(logits)


_argmax.defvjp(lambda logits: (argmax_forward(logits), None), lambda kept, dy: (None,))
