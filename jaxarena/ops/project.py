"""A linear projection, with an optional residual sum or SwiGLU behind it.

::

    y = x @ weight                          plain
    y = x @ weight + residual               residual
    [a | u] = x @ weight,  y = silu(a) * u  swiglu: the gate's columns first, then as many of the up projection

Shazeer, "GLU Variants Improve Transformer", 2020; ``silu(z) = z * sigmoid(z)``. Products are summed in float32; the residual and
the activation are applied to that sum, which is rounded once, to the dtype of x. Products of float32 arrays follow
``jax.default_matmul_precision``.

Gradient::

    dx = dy @ weight^T,  dweight = x^T @ dy,  dresidual = dy

and with swiglu, ``dz = [dy * u * silu'(a) | dy * silu(a)]`` takes the place of dy, where
``silu'(z) = p (1 + z (1 - p))``, ``p = sigmoid(z)``. For that the rows ``z = [a | u]`` are kept, rounded to the dtype of x.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxarena.ops.checks import (
    check_axis,
    check_choice,
    check_float,
    check_ndim,
    check_same_dtype,
    check_shape,
    vary_together,
)
from jaxarena.ops.interface import launch

__all__ = ["project"]

ACTIVATIONS = (None, "swiglu")


def project(
    x: Float[Array, "*rows k"],
    weight: Float[Array, "k columns"],
    *,
    residual: Float[Array, "*rows n"] | None = None,
    activation: str | None = None,
) -> Float[Array, "*rows n"]:
    """Multiplies each row of ``x`` by ``weight``, then adds ``residual`` or applies ``activation``.

    Args:
      x: ``[..., k]``, bfloat16 or float32.
      weight: ``[k, n]``, or ``[k, 2 n]`` with ``"swiglu"`` (gate columns first), in the dtype of ``x``.
      residual: ``[..., n]`` in the dtype of ``x``, or None. Not together with an activation.
      activation: None or ``"swiglu"``.

    Returns:
      ``[..., n]`` in the dtype of ``x``. Within ``tolerance(dtype, length of the sum)`` of float64, gradients too; with swiglu
      ``stages=3`` for gradients, as kept rows are rounded (:func:`jaxarena.testing.tolerance`).

    Raises:
      TypeError: an array is not bfloat16 or float32, or ``weight`` or ``residual`` has another dtype than ``x``.
      ValueError: the shapes do not fit, ``activation`` is not supported, or both ``residual`` and ``activation`` are given.
    """
    check_float("project", "x", x)
    check_float("project", "weight", weight)
    check_ndim("project", "x", x, "... k")
    check_ndim("project", "weight", weight, "k n")
    check_same_dtype("project", "weight", weight, "x", x)
    check_axis("project", "weight", weight, 0, x.shape[-1], "the last axis of x")
    check_choice("project", "activation", activation, ACTIVATIONS)
    if activation == "swiglu":
        if residual is not None:
            raise ValueError("project: residual must be None with activation 'swiglu', got an array: add it to the next projection")
        if weight.shape[1] % 2:
            raise ValueError(
                f"project: weight must have an even number of columns with activation 'swiglu' (gate, then up), got {weight.shape[1]}"
            )
        return _project_swiglu(*vary_together(x, weight))
    if residual is None:
        return _project(*vary_together(x, weight))
    check_float("project", "residual", residual)
    check_same_dtype("project", "residual", residual, "x", x)
    check_shape("project", "residual", residual, (*x.shape[:-1], weight.shape[1]), "the rows of x by the columns of weight")
    return _project_add(*vary_together(x, weight, residual))


def _dot(a: Array, b: Array, axes_a: tuple[int, ...], axes_b: tuple[int, ...]) -> Array:
    return jax.lax.dot_general(a, b, ((axes_a, axes_b), ((), ())), preferred_element_type=jnp.float32)


def _rows(x: Array, weight: Array) -> Array:
    """``x @ weight`` in float32."""
    return _dot(x, weight, (x.ndim - 1,), (0,))


def _halves(z: Array) -> tuple[Array, Array]:
    n = z.shape[-1] // 2
    return z[..., :n].astype(jnp.float32), z[..., n:].astype(jnp.float32)


@launch("project")
def project_forward(x: Float[Array, "*rows k"], weight: Float[Array, "k n"]) -> Float[Array, "*rows n"]:
    return _rows(x, weight).astype(x.dtype)


@launch("project_add")
def project_add_forward(
    x: Float[Array, "*rows k"], weight: Float[Array, "k n"], residual: Float[Array, "*rows n"]
) -> Float[Array, "*rows n"]:
    return (_rows(x, weight) + residual.astype(jnp.float32)).astype(x.dtype)


@launch("project_swiglu")
def project_swiglu_forward(x: Float[Array, "*rows k"], weight: Float[Array, "k columns"]) -> Float[Array, "*rows n"]:
    a, u = _halves(_rows(x, weight))
    return (jax.nn.silu(a) * u).astype(x.dtype)


@launch("project_swiglu_kept")
def project_swiglu_kept_forward(
    x: Float[Array, "*rows k"], weight: Float[Array, "k columns"]
) -> tuple[Float[Array, "*rows n"], Float[Array, "*rows columns"]]:
    z = _rows(x, weight)
    a, u = _halves(z)
    return (jax.nn.silu(a) * u).astype(x.dtype), z.astype(x.dtype)


@launch("swiglu_dz")
def swiglu_dz(z: Float[Array, "*rows columns"], dy: Float[Array, "*rows n"]) -> Float[Array, "*rows columns"]:
    a, u = _halves(z)
    dy = dy.astype(jnp.float32)
    p = jax.nn.sigmoid(a)
    return jnp.concatenate([dy * u * p * (1 + a * (1 - p)), dy * a * p], axis=-1).astype(z.dtype)


@launch("project_dx")
def project_dx(weight: Float[Array, "k n"], dy: Float[Array, "*rows n"]) -> Float[Array, "*rows k"]:
    return _dot(dy, weight, (dy.ndim - 1,), (1,)).astype(dy.dtype)


@launch("project_dweight")
def project_dweight(x: Float[Array, "*rows k"], dy: Float[Array, "*rows n"]) -> Float[Array, "k n"]:
    rows = tuple(range(x.ndim - 1))
    return _dot(x, dy, rows, rows).astype(x.dtype)


@jax.custom_vjp
def _project(x: Array, weight: Array) -> Array:
    return project_forward(x, weight)


def _project_fwd(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return _project(x, weight), (x, weight)


def _project_bwd(kept: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, weight = kept
    return project_dx(weight, dy), project_dweight(x, dy)


_project.defvjp(_project_fwd, _project_bwd)


@jax.custom_vjp
def _project_add(x: Array, weight: Array, residual: Array) -> Array:
    return project_add_forward(x, weight, residual)


def _project_add_fwd(x: Array, weight: Array, residual: Array) -> tuple[Array, tuple[Array, Array]]:
    return _project_add(x, weight, residual), (x, weight)


def _project_add_bwd(kept: tuple[Array, Array], dy: Array) -> tuple[Array, Array, Array]:
    return *_project_bwd(kept, dy), dy


_project_add.defvjp(_project_add_fwd, _project_add_bwd)


@jax.custom_vjp
def _project_swiglu(x: Array, weight: Array) -> Array:
    return project_swiglu_forward(x, weight)


def _project_swiglu_fwd(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    y, z = project_swiglu_kept_forward(x, weight)
    return y, (x, weight, z)


def _project_swiglu_bwd(kept: tuple[Array, Array, Array], dy: Array) -> tuple[Array, Array]:
    x, weight, z = kept
    dz = swiglu_dz(z, dy)
    return project_dx(weight, dz), project_dweight(x, dz)


_project_swiglu.defvjp(_project_swiglu_fwd, _project_swiglu_bwd)
