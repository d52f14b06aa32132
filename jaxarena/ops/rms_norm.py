"""Root-mean-square norm over the last axis, with an optional residual sum in front.

::

    r = 1 / sqrt(mean(x^2) + eps)            one number a row, float32
    y = x * r * (offset + weight)

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. ``offset = 1`` is the zero-centred weight of Gemma and
Qwen3-Next. With a residual, ``s = x + residual`` is rounded to the arrays' dtype first and then normed, so that the backward
pass, which reads the stored ``s``, differentiates exactly what the forward pass computed.

Gradient, with ``n = x * r`` and ``g = dy * (offset + weight)``::

    dx      = r * (g - n * mean(g * n))      (+ ds, the gradient of s, where there is a residual)
    dweight = sum over rows of dy * n

``r`` is not kept for the backward pass: it is one pass over a row that the backward pass reads in any case. The two gradients read the same
two arrays, one launch after the other, so that a planned step on the reference path reads those once; and each repeats the same sum for r.
"""

from __future__ import annotations

import functools
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from jaxarena.ops.checks import (
    check_axis,
    check_finite,
    check_float,
    check_ndim,
    check_nonnegative,
    check_same_dtype,
    check_same_shape,
    vary_together,
)
from jaxarena.ops.interface import PER_TOKEN, launch

__all__ = ["rms_norm"]


@overload
def rms_norm(x: Array, weight: Array, *, residual: None = None, eps: float = 1e-6, offset: float = 0.0) -> Array: ...


@overload
def rms_norm(x: Array, weight: Array, *, residual: Array, eps: float = 1e-6, offset: float = 0.0) -> tuple[Array, Array]: ...


def rms_norm(
    x: Float[Array, "*rows d"],
    weight: Float[Array, " d"],
    *,
    residual: Float[Array, "*rows d"] | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> Float[Array, "*rows d"] | tuple[Float[Array, "*rows d"], Float[Array, "*rows d"]]:
    """Norms each row of ``x`` (or of ``x + residual``) to root mean square 1 and multiplies it by ``offset + weight``.

    Args:
      x: ``[..., d]``, bfloat16 or float32, ``d`` at least 1.
      weight: ``[d]``, bfloat16 or float32 whatever the dtype of ``x``.
      residual: of the shape and dtype of ``x``, or None.
      eps: added to the mean square; at least 0 (0 makes a row of zeros NaN).
      offset: added to the weight, e.g. 1.0 for a weight stored around zero.

    Returns:
      ``y``, shape and dtype of ``x``; with a residual the pair ``(y, s)``, where ``s = x + residual`` is what was normed.
      Sums are float32; ``y`` is rounded once. Within ``tolerance(dtype, d)`` of float64 (:func:`jaxarena.testing.tolerance`),
      the weight's gradient ``tolerance(dtype, number of rows)``.

    Raises:
      TypeError: an array is not bfloat16 or float32, ``residual`` has another dtype than ``x``, ``eps`` or ``offset`` is not a
        Python number.
      ValueError: the shapes do not fit, or ``eps`` is negative.
    """
    check_float("rms_norm", "x", x)
    check_float("rms_norm", "weight", weight)
    check_ndim("rms_norm", "x", x, "... d")
    check_ndim("rms_norm", "weight", weight, "d")
    check_axis("rms_norm", "weight", weight, 0, x.shape[-1], "the last axis of x")
    check_nonnegative("rms_norm", "eps", eps)
    check_finite("rms_norm", "offset", offset)
    if residual is None:
        return _rms_norm(*vary_together(x, weight), float(eps), float(offset))
    check_float("rms_norm", "residual", residual)
    check_same_shape("rms_norm", "residual", residual, "x", x)
    check_same_dtype("rms_norm", "residual", residual, "x", x)
    return _add_rms_norm(*vary_together(x, residual, weight), float(eps), float(offset))


def _normed(x: Array, eps: float) -> tuple[Array, Array]:
    """``x`` normed without its weight, and the factor of each row, in float32."""
    wide = x.astype(jnp.float32)
    r = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide * r, r


@launch("rms_norm", row_ndim=PER_TOKEN)
def rms_norm_forward(x: Float[Array, "*rows d"], weight: Float[Array, " d"], *, eps: float, offset: float) -> Float[Array, "*rows d"]:
    normed, _ = _normed(x, eps)
    return (normed * (offset + weight.astype(jnp.float32))).astype(x.dtype)


@launch("add_rms_norm", row_ndim=PER_TOKEN)
def add_rms_norm_forward(
    x: Float[Array, "*rows d"], residual: Float[Array, "*rows d"], weight: Float[Array, " d"], *, eps: float, offset: float
) -> tuple[Float[Array, "*rows d"], Float[Array, "*rows d"]]:
    finfo = jnp.finfo(x.dtype)
    # XLA drops a rounding to bfloat16 that is widened again, unless the rounding is an operation of its own.
    s = jax.lax.reduce_precision(x.astype(jnp.float32) + residual.astype(jnp.float32), finfo.nexp, finfo.nmant).astype(x.dtype)
    normed, _ = _normed(s, eps)
    return (normed * (offset + weight.astype(jnp.float32))).astype(x.dtype), s


def _dnormed(x: Array, weight: Array, dy: Array, eps: float, offset: float) -> Array:
    """The gradient that reaches the normed rows, in float32."""
    normed, r = _normed(x, eps)
    g = dy.astype(jnp.float32) * (offset + weight.astype(jnp.float32))
    return r * (g - normed * jnp.mean(g * normed, axis=-1, keepdims=True))


@launch("rms_norm_dx", row_ndim=PER_TOKEN)
def rms_norm_dx(
    x: Float[Array, "*rows d"], weight: Float[Array, " d"], dy: Float[Array, "*rows d"], *, eps: float, offset: float
) -> Float[Array, "*rows d"]:
    return _dnormed(x, weight, dy, eps, offset).astype(x.dtype)


@launch("add_rms_norm_dx", row_ndim=PER_TOKEN)
def add_rms_norm_dx(
    s: Float[Array, "*rows d"],
    weight: Float[Array, " d"],
    dy: Float[Array, "*rows d"],
    ds: Float[Array, "*rows d"],
    *,
    eps: float,
    offset: float,
) -> Float[Array, "*rows d"]:
    return (_dnormed(s, weight, dy, eps, offset) + ds.astype(jnp.float32)).astype(s.dtype)


@launch("rms_norm_dweight")
def rms_norm_dweight(
    x: Float[Array, "*rows d"], weight: Float[Array, " d"], dy: Float[Array, "*rows d"], *, eps: float
) -> Float[Array, " d"]:
    normed, _ = _normed(x, eps)
    return jnp.sum(dy.astype(jnp.float32) * normed, axis=tuple(range(x.ndim - 1))).astype(weight.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rms_norm(x: Array, weight: Array, eps: float, offset: float) -> Array:
    return rms_norm_forward(x, weight, eps=eps, offset=offset)


def _rms_norm_fwd(x: Array, weight: Array, eps: float, offset: float) -> tuple[Array, tuple[Array, Array]]:
    return _rms_norm(x, weight, eps, offset), (x, weight)


def _rms_norm_bwd(eps: float, offset: float, kept: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, weight = kept
    return rms_norm_dx(x, weight, dy, eps=eps, offset=offset), rms_norm_dweight(x, weight, dy, eps=eps)


_rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _add_rms_norm(x: Array, residual: Array, weight: Array, eps: float, offset: float) -> tuple[Array, Array]:
    return add_rms_norm_forward(x, residual, weight, eps=eps, offset=offset)


def _add_rms_norm_fwd(x: Any, residual: Any, weight: Any, eps: float, offset: float) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    y, s = _add_rms_norm(x.value, residual.value, weight.value, eps, offset)
    return (y, s), (s, weight.value)


def _add_rms_norm_bwd(
    eps: float, offset: float, kept: tuple[Array, Array], gradients: tuple[Array | SymbolicZero, Array | SymbolicZero]
) -> tuple[Any, Any, Array | None]:
    # Where only one of the results is used, the other's gradient is not an array of zeros to be read.
    s, weight = kept
    dy, ds = gradients
    if isinstance(dy, SymbolicZero):
        return ds, ds, None
    if isinstance(ds, SymbolicZero):
        dx = rms_norm_dx(s, weight, dy, eps=eps, offset=offset)
    else:
        dx = add_rms_norm_dx(s, weight, dy, ds, eps=eps, offset=offset)
    return dx, dx, rms_norm_dweight(s, weight, dy, eps=eps)


_add_rms_norm.defvjp(_add_rms_norm_fwd, _add_rms_norm_bwd, symbolic_zeros=True)
