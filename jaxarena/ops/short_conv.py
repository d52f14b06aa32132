"""Short causal depthwise convolution over time, with an optional SiLU, carried state and packed sequences.

::

    z[t, c] = sum_j weight[j, c] * x[t - k + 1 + j, c]        j = 0 .. k - 1
    y       = z, or silu(z) = z * sigmoid(z)

so tap ``k - 1`` multiplies the present row. Rows of x before the start are the state's ``k - 1`` rows, or zero without one; rows of another
segment count as zero. The mixing of neighbouring rows in front of a linear-attention layer (Poli et al., "Hyena Hierarchy", 2023; Gu and
Dao, "Mamba", 2023).

Gradient, with ``dz = dy * act'(z)``, where z is computed again from x (k products an element) rather than kept::

    dx[s, c]      = sum_j weight[j, c] * dz[s + k - 1 - j, c]        s = -(k - 1) .. -1 is the state's gradient
    dweight[j, c] = sum over batch and t of dz[t, c] * x[t - k + 1 + j, c]

where the gradient of a state that is returned is added to that of the rows it holds. Every element is one float32 sum in the order of the
taps, whatever the number of rows, so a sequence taken in pieces, each from the state that the one before it left, has the bits of one pass.
(With fewer than 8 channels, XLA on the CPU may fuse multiplications and additions otherwise for another number of rows.)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxarena.ops.checks import check_axis, check_choice, check_float, check_int, check_ndim, check_same_dtype, check_shape, vary_together
from jaxarena.ops.interface import launch

__all__ = ["short_conv"]

ACTIVATIONS = ("silu", None)


@overload
def short_conv(
    x: Array,
    weight: Array,
    *,
    activation: str | None = "silu",
    state: Array | None = None,
    return_state: Literal[False] = False,
    segment_ids: Array | None = None,
) -> Array: ...


@overload
def short_conv(
    x: Array,
    weight: Array,
    *,
    activation: str | None = "silu",
    state: Array | None = None,
    return_state: Literal[True],
    segment_ids: Array | None = None,
) -> tuple[Array, Array]: ...


def short_conv(
    x: Float[Array, "b t c"],
    weight: Float[Array, "k c"],
    *,
    activation: str | None = "silu",
    state: Float[Array, "b k-1 c"] | None = None,
    return_state: bool = False,
    segment_ids: Int[Array, "b t"] | None = None,
) -> Float[Array, "b t c"] | tuple[Float[Array, "b t c"], Float[Array, "b k-1 c"]]:
    """Convolves each channel of ``x`` with its own ``k`` taps over the present row and the ``k - 1`` rows before it.

    Args:
      x: ``[batch, time, channels]``, bfloat16 or float32.
      weight: ``[taps, channels]``, bfloat16 or float32 whatever the dtype of ``x``; the last tap multiplies the present row.
      activation: ``"silu"``, or None for none.
      state: ``[batch, taps - 1, channels]`` in the dtype of ``x``: the rows before ``x``, the latest last; zeros if None.
      return_state: whether to return the state after the last row too, with its gradient.
      segment_ids: int32 ``[batch, time]``, for packed sequences: wherever the id changes, the rows before count as zero. The state is the
        first segment's, the state that is returned the last one's.

    Returns:
      ``[batch, time, channels]`` in the dtype of ``x``; sums are float32, rounded once. With ``return_state`` also
      ``[batch, taps - 1, channels]`` in the dtype of ``x``: the last rows of ``state`` and ``x`` in a row, exactly. Within
      ``tolerance(dtype, taps, stages=2)`` of float64, the weight's gradient ``tolerance(dtype, batch * time, stages=2)``
      (:func:`jaxarena.testing.tolerance`).

    Raises:
      TypeError: an array is not bfloat16 or float32, ``state`` has another dtype than ``x``, or ``segment_ids`` is not int32.
      ValueError: a shape does not fit, there is no tap, or ``activation`` or ``return_state`` is not supported.
    """
    check_float("short_conv", "x", x)
    check_float("short_conv", "weight", weight)
    check_ndim("short_conv", "x", x, "batch time channels")
    check_ndim("short_conv", "weight", weight, "taps channels")
    b, t, c = x.shape
    taps = weight.shape[0]
    check_axis("short_conv", "weight", weight, 1, c, "the channels of x")
    if taps == 0:
        raise ValueError(f"short_conv: weight must have at least one tap, got shape {tuple(weight.shape)}")
    check_choice("short_conv", "activation", activation, ACTIVATIONS)
    check_choice("short_conv", "return_state", return_state, (True, False))
    if segment_ids is not None:
        check_int("short_conv", "segment_ids", segment_ids)
        check_shape("short_conv", "segment_ids", segment_ids, (b, t), "batch and time of x")
    if state is not None:
        check_float("short_conv", "state", state)
        check_same_dtype("short_conv", "state", state, "x", x)
        check_shape("short_conv", "state", state, (b, taps - 1, c), "batch, taps - 1 and channels")
    elif return_state:
        state = jnp.zeros_like(x, shape=(b, taps - 1, c))
    y, last = _short_conv(*vary_together(x, weight, state, segment_ids), activation)
    if not return_state:
        return y
    assert last is not None  # there is a state whenever one is asked for
    return y, last


def _given(*optional: Array | None) -> list[Array]:
    return [a for a in optional if a is not None]


def _optional(context: Sequence[Array], carried: bool) -> tuple[Array | None, Array | None]:
    """The state and the segment ids among a launch's last operands, which are those that were given."""
    state, *rest = context if carried else (None, *context)
    return state, (rest[0] if rest else None)


def _seen(ids: Array | None, taps: int) -> Bool[Array, "k b t 1"] | None:
    """Whether the row that each tap multiplies is of the present row's segment; None where there is no other."""
    if ids is None or ids.shape[1] == 0:
        return None
    t = ids.shape[1]
    before = jnp.pad(ids, ((0, 0), (taps - 1, 0)), mode="edge")
    seen = [jnp.ones_like(ids, dtype=bool)]
    for j in reversed(range(taps - 1)):
        seen.append(seen[-1] & (before[:, j : j + t] == ids))
    return jnp.stack(seen[::-1])[..., None]


def _masked(seen: Array | None, j: int, rows: Array) -> Array:
    return rows if seen is None else jnp.where(seen[j], rows, 0)


def _with_past(x: Array, state: Array | None, taps: int) -> Array:
    """``x`` with the ``taps - 1`` rows before it in front."""
    return jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0))) if state is None else jnp.concatenate([state, x], axis=1)


def _tap_rows(x: Array, state: Array | None, seen: Array | None, taps: int) -> list[Array]:
    """For each tap the rows it multiplies, ``x[t - k + 1 + j]``, in float32."""
    t, past = x.shape[1], _with_past(x, state, taps).astype(jnp.float32)
    return [_masked(seen, j, past[:, j : j + t]) for j in range(taps)]


def _held(rows: Array, seen: Array | None) -> Array:
    """The rows that the state after the last row of ``x`` holds: zero where they are of an earlier segment."""
    return rows if seen is None else jnp.where(jnp.moveaxis(seen[1:, :, -1], 0, 1), rows, 0)


def _convolve(rows: Sequence[Array], weight: Array) -> Array:
    total = rows[0] * weight[0].astype(jnp.float32)
    for j in range(1, len(rows)):
        total = total + rows[j] * weight[j].astype(jnp.float32)
    return total


def _dz(rows: Sequence[Array], weight: Array, dy: Array, activation: str | None) -> Array:
    """The gradient before the activation, in float32."""
    dy = dy.astype(jnp.float32)
    if activation is None:
        return dy
    z = _convolve(rows, weight)
    p = jax.nn.sigmoid(z)
    return dy * p * (1 + z * (1 - p))


@launch("short_conv")
def short_conv_forward(
    x: Float[Array, "b t c"], weight: Float[Array, "k c"], *context: Array, activation: str | None, carried: bool
) -> tuple[Float[Array, "b _ c"], ...]:
    """``context``: the state, if ``carried``, then the segment ids, if any. ``carried`` also returns the state after the last row."""
    (state, ids), taps = _optional(context, carried), weight.shape[0]
    seen = _seen(ids, taps)
    z = _convolve(_tap_rows(x, state, seen, taps), weight)
    y = (z if activation is None else jax.nn.silu(z)).astype(x.dtype)
    return (y, _held(_with_past(x, state, taps)[:, x.shape[1] :], seen)) if carried else (y,)


@launch("short_conv_dx")
def short_conv_dx(
    x: Float[Array, "b t c"],
    weight: Float[Array, "k c"],
    dy: Float[Array, "b t c"],
    *context: Array,
    activation: str | None,
    carried: bool,
) -> tuple[Float[Array, "b _ c"], ...]:
    """``context``: the gradient of the last state and the state, if ``carried``, then the segment ids. ``carried`` also returns the state's
    gradient."""
    dlast = context[0] if carried else None
    context_of_forward = context[1:] if carried else context
    (state, ids), taps, t = _optional(context_of_forward, carried), weight.shape[0], x.shape[1]
    seen = _seen(ids, taps)
    dz = _dz(_tap_rows(x, state, seen, taps), weight, dy, activation)
    # Tap j takes row s, counted from the first row that has a gradient, to row s - j of dz.
    lead = taps - 1 if carried else 0
    padded = (jnp.pad(_masked(seen, j, dz), ((0, 0), (lead, taps - 1), (0, 0))) for j in range(taps))
    dpast = _convolve([rows[:, taps - 1 - j :][:, : t + lead] for j, rows in enumerate(padded)], weight)
    if dlast is None:
        return (dpast.astype(x.dtype),)
    dpast = (dpast + jnp.pad(_held(dlast.astype(jnp.float32), seen), ((0, 0), (t, 0), (0, 0)))).astype(x.dtype)
    return dpast[:, taps - 1 :], dpast[:, : taps - 1]


@launch("short_conv_dweight")
def short_conv_dweight(
    x: Float[Array, "b t c"],
    weight: Float[Array, "k c"],
    dy: Float[Array, "b t c"],
    *context: Array,
    activation: str | None,
    carried: bool,
) -> Float[Array, "k c"]:
    (state, ids), taps = _optional(context, carried), weight.shape[0]
    rows = _tap_rows(x, state, _seen(ids, taps), taps)
    dz = _dz(rows, weight, dy, activation)
    return jnp.stack([jnp.sum(dz * r, axis=(0, 1)) for r in rows]).astype(weight.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _short_conv(x: Array, weight: Array, state: Array | None, ids: Array | None, activation: str | None) -> tuple[Array, Array | None]:
    y, *last = short_conv_forward(x, weight, *_given(state, ids), activation=activation, carried=state is not None)
    return y, (last[0] if last else None)


_Kept = tuple[Array, Array, Array | None, Array | None]


def _short_conv_fwd(
    x: Array, weight: Array, state: Array | None, ids: Array | None, activation: str | None
) -> tuple[tuple[Array, Array | None], _Kept]:
    return _short_conv(x, weight, state, ids, activation), (x, weight, state, ids)


def _short_conv_bwd(activation: str | None, kept: _Kept, gradients: tuple[Array, Array | None]) -> tuple[Array, Array, Array | None, None]:
    x, weight, state, ids = kept
    dy, dlast = gradients
    carried = state is not None
    dx, *dstate = short_conv_dx(x, weight, dy, *_given(dlast, state, ids), activation=activation, carried=carried)
    dweight = short_conv_dweight(x, weight, dy, *_given(state, ids), activation=activation, carried=carried)
    return dx, dweight, (dstate[0] if dstate else None), None


_short_conv.defvjp(_short_conv_fwd, _short_conv_bwd)
