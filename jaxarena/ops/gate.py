"""A gate: one array multiplied by an activation of another.

::

    y     = x * act(gate)            act is sigmoid, or silu(z) = z * sigmoid(z)
    dx    = dy * act(gate)
    dgate = dy * x * act'(gate)

with ``sigmoid'(z) = p (1 - p)`` and ``silu'(z) = p (1 + z (1 - p))``, where ``p = sigmoid(z)``. The output gate of gated
attention and of the gated delta rule (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024). All of it is computed in
float32 and rounded once.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxarena.ops.checks import check_choice, check_float, check_ndim, check_same_shape, vary_together
from jaxarena.ops.interface import PER_TOKEN, launch

__all__ = ["gate"]

ACTIVATIONS = ("sigmoid", "silu")


def gate(x: Float[Array, "*rows d"], gate: Float[Array, "*rows d"], *, activation: str = "sigmoid") -> Float[Array, "*rows d"]:
    """Multiplies ``x`` by ``activation(gate)``, element by element.

    Args:
      x: ``[..., d]``, bfloat16 or float32.
      gate: of the shape of ``x``, bfloat16 or float32 whatever the dtype of ``x``; before its activation.
      activation: ``"sigmoid"`` or ``"silu"``.

    Returns:
      ``[..., d]`` in the dtype of ``x``, within ``tolerance(dtype, stages=2)`` of float64 (:func:`jaxarena.testing.tolerance`).

    Raises:
      TypeError: an array is not bfloat16 or float32.
      ValueError: the shapes differ, or ``activation`` is none of the two.
    """
    check_float("gate", "x", x)
    check_float("gate", "gate", gate)
    check_ndim("gate", "x", x, "... d")
    check_same_shape("gate", "gate", gate, "x", x)
    check_choice("gate", "activation", activation, ACTIVATIONS)
    return _gate(*vary_together(x, gate), activation)


def _activate(z: Array, activation: str) -> tuple[Array, Array]:
    """The activation of ``z`` and its slope, in float32."""
    z = z.astype(jnp.float32)
    p = jax.nn.sigmoid(z)
    if activation == "sigmoid":
        return p, p * (1 - p)
    return z * p, p * (1 + z * (1 - p))


@launch("gate", row_ndim=PER_TOKEN)
def gate_forward(x: Float[Array, "*rows d"], gate: Float[Array, "*rows d"], *, activation: str) -> Float[Array, "*rows d"]:
    value, _ = _activate(gate, activation)
    return (x.astype(jnp.float32) * value).astype(x.dtype)


@launch("gate_dx", row_ndim=PER_TOKEN)
def gate_dx(gate: Float[Array, "*rows d"], dy: Float[Array, "*rows d"], *, activation: str) -> Float[Array, "*rows d"]:
    value, _ = _activate(gate, activation)
    return (dy.astype(jnp.float32) * value).astype(dy.dtype)


@launch("gate_dgate", row_ndim=PER_TOKEN)
def gate_dgate(
    x: Float[Array, "*rows d"], gate: Float[Array, "*rows d"], dy: Float[Array, "*rows d"], *, activation: str
) -> Float[Array, "*rows d"]:
    _, slope = _activate(gate, activation)
    return (dy.astype(jnp.float32) * x.astype(jnp.float32) * slope).astype(gate.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gate(x: Array, gate: Array, activation: str) -> Array:
    return gate_forward(x, gate, activation=activation)


def _gate_fwd(x: Array, gate: Array, activation: str) -> tuple[Array, tuple[Array, Array]]:
    return _gate(x, gate, activation), (x, gate)


def _gate_bwd(activation: str, kept: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, gate = kept
    return gate_dx(gate, dy, activation=activation), gate_dgate(x, gate, dy, activation=activation)


_gate.defvjp(_gate_fwd, _gate_bwd)
