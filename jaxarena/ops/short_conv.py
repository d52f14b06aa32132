"""Short causal depthwise convolution over time, with an optional SiLU.

::

    z[t, c] = sum_j weight[j, c] * x[t - k + 1 + j, c]        j = 0 .. k - 1, x before the start is zero
    y       = z, or silu(z) = z * sigmoid(z)

so tap ``k - 1`` multiplies the present row. The mixing of neighbouring rows in front of a linear-attention layer (Poli et al.,
"Hyena Hierarchy", 2023; Gu and Dao, "Mamba", 2023).

Gradient, with ``dz = dy * act'(z)``, where z is computed again from x (k products an element) rather than kept::

    dx[s, c]      = sum_j weight[j, c] * dz[s + k - 1 - j, c]
    dweight[j, c] = sum over batch and t of dz[t, c] * x[t - k + 1 + j, c]
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxarena.ops.checks import check_axis, check_choice, check_float, check_ndim, vary_together
from jaxarena.ops.interface import launch

__all__ = ["short_conv"]

ACTIVATIONS = ("silu", None)


def short_conv(x: Float[Array, "b t c"], weight: Float[Array, "k c"], *, activation: str | None = "silu") -> Float[Array, "b t c"]:
    """Convolves each channel of ``x`` with its own ``k`` taps over the present row and the ``k - 1`` rows before it.

    Args:
      x: ``[batch, time, channels]``, bfloat16 or float32.
      weight: ``[taps, channels]``, bfloat16 or float32 whatever the dtype of ``x``; the last tap multiplies the present row.
      activation: ``"silu"``, or None for none.

    Returns:
      ``[batch, time, channels]`` in the dtype of ``x``; sums are float32, rounded once. Within ``tolerance(dtype, taps, stages=2)``
      of float64, the weight's gradient ``tolerance(dtype, batch * time, stages=2)`` (:func:`jaxarena.testing.tolerance`).

    Raises:
      TypeError: an array is not bfloat16 or float32.
      ValueError: the channels differ, there is no tap, or ``activation`` is not supported.
    """
    check_float("short_conv", "x", x)
    check_float("short_conv", "weight", weight)
    check_ndim("short_conv", "x", x, "batch time channels")
    check_ndim("short_conv", "weight", weight, "taps channels")
    check_axis("short_conv", "weight", weight, 1, x.shape[2], "the channels of x")
    if weight.shape[0] == 0:
        raise ValueError(f"short_conv: weight must have at least one tap, got shape {tuple(weight.shape)}")
    check_choice("short_conv", "activation", activation, ACTIVATIONS)
    return _short_conv(*vary_together(x, weight), activation)


def _taps(x: Array, taps: int, *, ahead: bool = False) -> list[Array]:
    """For each tap the rows of ``x`` it multiplies, in float32: ``x[t - k + 1 + j]``, or ``x[t + k - 1 - j]`` when ``ahead``."""
    t = x.shape[1]
    pad = (0, taps - 1) if ahead else (taps - 1, 0)
    padded = jnp.pad(x.astype(jnp.float32), ((0, 0), pad, (0, 0)))
    starts = [taps - 1 - j if ahead else j for j in range(taps)]
    return [padded[:, start : start + t] for start in starts]


def _convolve(rows: list[Array], weight: Array) -> Array:
    total = rows[0] * weight[0].astype(jnp.float32)
    for j in range(1, len(rows)):
        total = total + rows[j] * weight[j].astype(jnp.float32)
    return total


def _dz(x: Array, weight: Array, dy: Array, activation: str | None) -> Array:
    """The gradient before the activation, in float32."""
    dy = dy.astype(jnp.float32)
    if activation is None:
        return dy
    z = _convolve(_taps(x, weight.shape[0]), weight)
    p = jax.nn.sigmoid(z)
    return dy * p * (1 + z * (1 - p))


@launch("short_conv")
def short_conv_forward(x: Float[Array, "b t c"], weight: Float[Array, "k c"], *, activation: str | None) -> Float[Array, "b t c"]:
    z = _convolve(_taps(x, weight.shape[0]), weight)
    return (z if activation is None else jax.nn.silu(z)).astype(x.dtype)


@launch("short_conv_dx")
def short_conv_dx(
    x: Float[Array, "b t c"], weight: Float[Array, "k c"], dy: Float[Array, "b t c"], *, activation: str | None
) -> Float[Array, "b t c"]:
    dz = _dz(x, weight, dy, activation)
    return _convolve(_taps(dz, weight.shape[0], ahead=True), weight).astype(x.dtype)


@launch("short_conv_dweight")
def short_conv_dweight(
    x: Float[Array, "b t c"], weight: Float[Array, "k c"], dy: Float[Array, "b t c"], *, activation: str | None
) -> Float[Array, "k c"]:
    dz = _dz(x, weight, dy, activation)
    return jnp.stack([jnp.sum(dz * rows, axis=(0, 1)) for rows in _taps(x, weight.shape[0])]).astype(weight.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _short_conv(x: Array, weight: Array, activation: str | None) -> Array:
    return short_conv_forward(x, weight, activation=activation)


def _short_conv_fwd(x: Array, weight: Array, activation: str | None) -> tuple[Array, tuple[Array, Array]]:
    return _short_conv(x, weight, activation), (x, weight)


def _short_conv_bwd(activation: str | None, kept: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, weight = kept
    return short_conv_dx(x, weight, dy, activation=activation), short_conv_dweight(x, weight, dy, activation=activation)


_short_conv.defvjp(_short_conv_fwd, _short_conv_bwd)
