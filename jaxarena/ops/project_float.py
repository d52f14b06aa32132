"""Projections of floating-point arrays: launches and gradients of :func:`jaxarena.ops.project`, whose module states the formulas."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxarena.ops.interface import launch
from jaxarena.ops.swiglu import swiglu, swiglu_gradient

__all__ = ["dot", "project_add", "project_dweight", "project_dx", "project_plain", "project_swiglu", "swiglu_dz"]


def dot(a: Array, b: Array, axes_a: tuple[int, ...], axes_b: tuple[int, ...]) -> Array:
    """The product of ``a`` and ``b`` summed over these axes, in float32."""
    return jax.lax.dot_general(a, b, ((axes_a, axes_b), ((), ())), preferred_element_type=jnp.float32)


def _rows(x: Array, weight: Array) -> Array:
    """``x @ weight`` in float32."""
    return dot(x, weight, (x.ndim - 1,), (0,))


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
    return swiglu(_rows(x, weight)).astype(x.dtype)


@launch("project_swiglu_kept")
def project_swiglu_kept_forward(
    x: Float[Array, "*rows k"], weight: Float[Array, "k columns"]
) -> tuple[Float[Array, "*rows n"], Float[Array, "*rows columns"]]:
    z = _rows(x, weight)
    return swiglu(z).astype(x.dtype), z.astype(x.dtype)


@launch("swiglu_dz")
def swiglu_dz(z: Float[Array, "*rows columns"], dy: Float[Array, "*rows n"]) -> Float[Array, "*rows columns"]:
    return swiglu_gradient(z, dy).astype(z.dtype)


@launch("project_dx")
def project_dx(weight: Float[Array, "k n"], dy: Float[Array, "*rows n"]) -> Float[Array, "*rows k"]:
    return dot(dy, weight, (dy.ndim - 1,), (1,)).astype(dy.dtype)


@launch("project_dweight")
def project_dweight(x: Float[Array, "*rows k"], dy: Float[Array, "*rows n"]) -> Float[Array, "k n"]:
    rows = tuple(range(x.ndim - 1))
    return dot(x, dy, rows, rows).astype(x.dtype)


@jax.custom_vjp
def project_plain(x: Array, weight: Array) -> Array:
    return project_forward(x, weight)


def _project_fwd(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return project_plain(x, weight), (x, weight)


def _project_bwd(kept: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, weight = kept
    return project_dx(weight, dy), project_dweight(x, dy)


project_plain.defvjp(_project_fwd, _project_bwd)


@jax.custom_vjp
def project_add(x: Array, weight: Array, residual: Array) -> Array:
    return project_add_forward(x, weight, residual)


def _project_add_fwd(x: Array, weight: Array, residual: Array) -> tuple[Array, tuple[Array, Array]]:
    return project_add(x, weight, residual), (x, weight)


def _project_add_bwd(kept: tuple[Array, Array], dy: Array) -> tuple[Array, Array, Array]:
    return *_project_bwd(kept, dy), dy


project_add.defvjp(_project_add_fwd, _project_add_bwd)


@jax.custom_vjp
def project_swiglu(x: Array, weight: Array) -> Array:
    return project_swiglu_forward(x, weight)


def _project_swiglu_fwd(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    y, z = project_swiglu_kept_forward(x, weight)
    return y, (x, weight, z)


def _project_swiglu_bwd(kept: tuple[Array, Array, Array], dy: Array) -> tuple[Array, Array]:
    x, weight, z = kept
    dz = swiglu_dz(z, dy)
    return project_dx(weight, dz), project_dweight(x, dz)


project_swiglu.defvjp(_project_swiglu_fwd, _project_swiglu_bwd)
