"""The shared expert of a mixture: one SwiGLU network that every token goes through, scaled by a gate of its own.

    y = routed + sigmoid(x gate) * (silu(x gate_columns) * (x up_columns)) down

(Dai et al., "DeepSeekMoE", 2024.) Its products are projections; the launches here add the scaled rows to the routed experts' sum
and give the gradients of that: with z = x gate, s = sigmoid(z) and r the rows, drouted = dy, dr = s dy, dz = (dy . r) s (1 - s).

Shapes: x, routed (n, d); gate_up (d, 2s) with the gate's columns first, down (s, d), gate (d, 1).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxarena.ops.checks import check_float, check_ndim, check_same_dtype, check_shape, vary_together
from jaxarena.ops.interface import launch
from jaxarena.ops.project import project

__all__ = ["SharedExpert", "add_shared_expert"]


class SharedExpert(NamedTuple):
    """The weights of an expert that every token goes through."""

    gate_up: Float[Array, "d s2"]  # the gate's columns first
    down: Float[Array, "s d"]
    gate: Float[Array, "d 1"]  # its sigmoid scales the expert's result


def add_shared_expert(routed: Float[Array, "n d"], x: Float[Array, "n d"], shared: SharedExpert) -> Float[Array, "n d"]:
    """The routed experts' sum and the scaled result of the shared expert.

    Raises:
      TypeError: a weight is not in the dtype of ``x``.
      ValueError: a weight's shape does not fit.
    """
    width = x.shape[-1]
    for name, weight in zip(shared._fields, shared, strict=True):
        check_float("moe", f"shared.{name}", weight)
        check_same_dtype("moe", f"shared.{name}", weight, "x", x)
    check_ndim("moe", "shared.down", shared.down, "s d")
    hidden = shared.down.shape[0]
    check_shape("moe", "shared.down", shared.down, (hidden, width), "s by the last axis of x")
    check_shape("moe", "shared.gate_up", shared.gate_up, (width, 2 * hidden), "the last axis of x by twice s of down")
    check_shape("moe", "shared.gate", shared.gate, (width, 1), "the last axis of x by 1")
    rows = project(project(x, shared.gate_up, activation="swiglu"), shared.down)
    return _add_scaled(*vary_together(routed, rows, project(x, shared.gate)))


@jax.custom_vjp
def _add_scaled(routed: Array, rows: Array, logit: Array) -> Array:
    return shared_expert_add(routed, rows, logit)


def _fwd(routed: Array, rows: Array, logit: Array) -> tuple[Array, tuple[Array, Array]]:
    return shared_expert_add(routed, rows, logit), (rows, logit)


def _bwd(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array, Array]:
    rows, logit = saved
    return dy, shared_expert_drows(dy, logit), shared_expert_dlogit(dy, rows, logit)


_add_scaled.defvjp(_fwd, _bwd)


@launch("shared_expert_add")
def shared_expert_add(routed: Float[Array, "n d"], rows: Float[Array, "n d"], logit: Float[Array, "n 1"]) -> Float[Array, "n d"]:
    """The routed experts' sum and the scaled shared expert's rows."""
    scale = jax.nn.sigmoid(logit.astype(jnp.float32))
    return (routed.astype(jnp.float32) + scale * rows.astype(jnp.float32)).astype(routed.dtype)


@launch("shared_expert_drows")
def shared_expert_drows(dy: Float[Array, "n d"], logit: Float[Array, "n 1"]) -> Float[Array, "n d"]:
    """The gradient of the shared expert's rows."""
    return (jax.nn.sigmoid(logit.astype(jnp.float32)) * dy.astype(jnp.float32)).astype(dy.dtype)


@launch("shared_expert_dlogit")
def shared_expert_dlogit(dy: Float[Array, "n d"], rows: Float[Array, "n d"], logit: Float[Array, "n 1"]) -> Float[Array, "n 1"]:
    """The gradient of the logits of the shared expert's scale."""
    sigmoid = jax.nn.sigmoid(logit.astype(jnp.float32))
    along = jnp.sum(dy.astype(jnp.float32) * rows.astype(jnp.float32), axis=-1, keepdims=True)
    return (along * sigmoid * (1.0 - sigmoid)).astype(logit.dtype)
