"""The gate of the gated delta rule: how fast a head forgets, from its activation and two parameters.

    z = a + dt_bias        g = -exp(a_log) softplus(z)

The time step of Mamba-2, softplus(z), times the head's rate, exp(a_log) (Dao and Gu, "Transformers are SSMs", 2024; as in Yang, Kautz
and Hatamizadeh, "Gated Delta Networks", 2024): g is the log of a decay, at most 0. Its gradients, with s = -exp(a_log) sigmoid(z):

    da = dg s        da_log = sum of dg g        ddt_bias = sum of dg s

summed over all tokens. softplus(z) is formed as max(z, 0) + log1p(exp(-|z|)), which neither overflows nor loses small values. All of it
is float32: a gate is one number that scales a whole state. Shapes: a and g (..., heads); a_log and dt_bias (heads,).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxarena.ops.checks import check_float, check_float32, check_ndim, check_shape, vary_together
from jaxarena.ops.interface import launch

__all__ = ["delta_gate"]

_OP = "delta_gate"


def delta_gate(a: Float[Array, "*rows h"], a_log: Float[Array, " h"], dt_bias: Float[Array, " h"]) -> Float[Array, "*rows h"]:
    """The log gate ``-exp(a_log) * softplus(a + dt_bias)`` that :func:`jaxarena.ops.gated_delta_rule` takes as ``g``.

    Args:
      a: (..., heads), as a rule (batch, time, heads), bfloat16 or float32.
      a_log: (heads,), float32, log of each head's rate.
      dt_bias: (heads,), float32.

    Returns:
      (..., heads) float32, at most 0, within ``tolerance(float32, stages=4)`` of float64 (:func:`jaxarena.testing.tolerance`) for the
      given ``a``; finite for every finite ``a``.

    Raises:
      TypeError: an array is not of a dtype above.
      ValueError: ``a_log`` or ``dt_bias`` has not one element for each head.
    """
    check_float(_OP, "a", a)
    check_ndim(_OP, "a", a, "... heads")
    for name, parameter in (("a_log", a_log), ("dt_bias", dt_bias)):
        check_float32(_OP, name, parameter)
        check_shape(_OP, name, parameter, a.shape[-1:], "the heads of a")
    return _delta_gate(*vary_together(a, a_log, dt_bias))


@jax.custom_vjp
def _delta_gate(a: Array, a_log: Array, dt_bias: Array) -> Array:
    return delta_gate_forward(a, a_log, dt_bias)


def _fwd(a: Array, a_log: Array, dt_bias: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _delta_gate(a, a_log, dt_bias), (a, a_log, dt_bias)


def _bwd(kept: tuple[Array, Array, Array], dg: Array) -> tuple[Array, Array, Array]:
    return delta_gate_da(*kept, dg), *delta_gate_dparameters(*kept, dg)


_delta_gate.defvjp(_fwd, _bwd)


@launch("delta_gate", row_ndim=0)
def delta_gate_forward(a: Float[Array, "*rows h"], a_log: Float[Array, " h"], dt_bias: Float[Array, " h"]) -> Float[Array, "*rows h"]:
    # The product may overflow where a is near the largest float32; any gate so low is a full reset.
    return jnp.maximum(-jnp.exp(a_log) * jax.nn.softplus(a.astype(jnp.float32) + dt_bias), jnp.finfo(jnp.float32).min)


@launch("delta_gate_da")
def delta_gate_da(
    a: Float[Array, "*rows h"], a_log: Float[Array, " h"], dt_bias: Float[Array, " h"], dg: Float[Array, "*rows h"]
) -> Float[Array, "*rows h"]:
    return _dz(a, a_log, dt_bias, dg).astype(a.dtype)


@launch("delta_gate_dparameters")
def delta_gate_dparameters(
    a: Float[Array, "*rows h"], a_log: Float[Array, " h"], dt_bias: Float[Array, " h"], dg: Float[Array, "*rows h"]
) -> tuple[Float[Array, " h"], Float[Array, " h"]]:
    """da_log and ddt_bias."""
    tokens = tuple(range(a.ndim - 1))
    g = delta_gate_forward.reference(a, a_log, dt_bias)
    return jnp.sum(dg * g, axis=tokens), jnp.sum(_dz(a, a_log, dt_bias, dg), axis=tokens)


def _dz(a: Array, a_log: Array, dt_bias: Array, dg: Array) -> Array:
    return dg * -jnp.exp(a_log) * jax.nn.sigmoid(a.astype(jnp.float32) + dt_bias)
