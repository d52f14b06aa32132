"""SwiGLU on rows that hold a gate's columns first, then as many of an up projection (Shazeer, "GLU Variants Improve Transformer", 2020).

    swiglu([a | u]) = silu(a) * u,    silu(a) = a p,    p = sigmoid(a)

and with dy the gradient of that, ``d[a | u] = [dy u p (1 + a (1 - p)) | dy a p]``. All of it is float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["swiglu", "swiglu_gradient"]


def swiglu(z: Float[Array, "*rows columns"]) -> Float[Array, "*rows n"]:
    """The activated rows of ``[a | u]``."""
    a, u = _halves(z)
    return jax.nn.silu(a) * u


def swiglu_gradient(z: Float[Array, "*rows columns"], dy: Float[Array, "*rows n"]) -> Float[Array, "*rows columns"]:
    """The gradient of ``z``, from that of ``swiglu(z)``."""
    a, u = _halves(z)
    dy = dy.astype(jnp.float32)
    p = jax.nn.sigmoid(a)
    return jnp.concatenate([dy * u * p * (1 + a * (1 - p)), dy * a * p], axis=-1)


def _halves(z: Array) -> tuple[Array, Array]:
    a, u = jnp.split(z.astype(jnp.float32), 2, axis=-1)
    return a, u
