"""One expert: a SwiGLU network; and the shared expert of a mixture, which every token goes through.

    h = x gate_up,  a = silu(gate columns of h) * (up columns of h),  r = a down

A routed expert's result is weighted by the router, the shared one's by a gate of its own, if it has one (Dai et al., "DeepSeekMoE",
2024, has none; Qwen2-MoE and its successors do)::

    y = residual + sigmoid(x gate) r

Gradients of weight * r, with t = down dy: the weight's is ``dy . r = a . t``, so that r need not be kept, and

    dh = weight * (the gradient of SwiGLU from t)

(:mod:`jaxarena.ops.swiglu`). The gate's logit z then has ``dz = (a . t) s (1 - s)``, s = sigmoid(z). Kept for the backward pass are x,
h in the dtype of x, and z.

Shapes: x, residual (n, d); gate_up (d, 2s) with the gate's columns first, down (s, d), gate (d, 1).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxarena.ops.checks import check_float, check_ndim, check_same_dtype, check_shape
from jaxarena.ops.grouped import over_rows
from jaxarena.ops.interface import launch
from jaxarena.ops.swiglu import swiglu, swiglu_gradient

__all__ = [
    "SharedExpert",
    "check_shared_expert",
    "expert_gradient",
    "shared_dx",
    "shared_expert_ddown",
    "shared_expert_dgate",
    "shared_expert_dgate_up",
    "shared_expert_dhidden",
    "shared_rows",
]


class SharedExpert(NamedTuple):
    """The weights of an expert that every token goes through."""

    gate_up: Float[Array, "d s2"]  # the gate's columns first
    down: Float[Array, "s d"]
    gate: Float[Array, "d 1"] | None = None  # its sigmoid scales the expert's result


def check_shared_expert(shared: SharedExpert, x: Float[Array, "*rows d"]) -> None:
    """The weights are in the dtype of ``x`` and their shapes fit it."""
    width = x.shape[-1]
    given = {name: weight for name, weight in zip(shared._fields, shared, strict=True) if name != "gate" or weight is not None}
    for name, weight in given.items():
        check_float("moe", f"shared.{name}", weight)
        check_same_dtype("moe", f"shared.{name}", weight, "x", x)
    check_ndim("moe", "shared.down", shared.down, "s d")
    hidden = shared.down.shape[0]
    check_shape("moe", "shared.down", shared.down, (hidden, width), "s by the last axis of x")
    check_shape("moe", "shared.gate_up", shared.gate_up, (width, 2 * hidden), "the last axis of x by twice s of down")
    if shared.gate is not None:
        check_shape("moe", "shared.gate", shared.gate, (width, 1), "the last axis of x by 1")


def expert_gradient(
    dy: Float[Array, "n d"], hidden: Float[Array, "n s2"], weight: Float[Array, " n"] | None, down: Float[Array, "s d"]
) -> tuple[Float[Array, "n s2"], Float[Array, " n"]]:
    """The gradients of ``hidden`` and of the rows' weights (of 1 if None), from that of the weighted results; float32."""
    unweighted = lax.dot_general(dy, down, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    dactivated = unweighted if weight is None else weight[:, None] * unweighted
    return swiglu_gradient(hidden, dactivated), jnp.sum(swiglu(hidden) * unweighted, axis=-1)


def shared_rows(
    x: Float[Array, "n d"], gate_up: Float[Array, "d s2"], down: Float[Array, "s d"], *logit: Float[Array, " n"]
) -> tuple[Float[Array, "n d"], Float[Array, "n s2"]]:
    """The scaled rows, float32, and the rows before the activation."""
    hidden = jnp.dot(x, gate_up, preferred_element_type=jnp.float32)
    rows = jnp.dot(swiglu(hidden).astype(x.dtype), down, preferred_element_type=jnp.float32)
    for z in logit:
        rows = jax.nn.sigmoid(z)[:, None] * rows
    return rows, hidden.astype(x.dtype)


def shared_dx(dhidden: Float[Array, "n s2"], gate_up: Float[Array, "d s2"], *gate: Array) -> Float[Array, "n d"]:
    """The gradient of x, float32; ``gate`` are the gradient of its logits and the gate, if there is one."""
    dx = jnp.dot(dhidden, gate_up.T, preferred_element_type=jnp.float32)
    if not gate:
        return dx
    dlogit, column = gate
    return dx + dlogit[:, None] * column[:, 0].astype(jnp.float32)


@launch("shared_expert_ddown")
def shared_expert_ddown(hidden: Float[Array, "n s2"], dy: Float[Array, "n d"], *logit: Float[Array, " n"]) -> Float[Array, "s d"]:
    """The gradient of ``down``."""
    activated = swiglu(hidden)
    for z in logit:
        activated = jax.nn.sigmoid(z)[:, None] * activated
    return over_rows(activated.astype(dy.dtype), dy).astype(dy.dtype)


@launch("shared_expert_dhidden", row_ndim=(1, 0))
def shared_expert_dhidden(
    dy: Float[Array, "n d"], hidden: Float[Array, "n s2"], down: Float[Array, "s d"], *logit: Float[Array, " n"]
) -> tuple[Float[Array, "n s2"], Float[Array, " n"]]:
    """The gradients of the rows before the activation and of the gate's logits (without a gate, of a scale of 1)."""
    if not logit:
        dhidden, dscale = expert_gradient(dy, hidden, None, down)
        return dhidden.astype(dy.dtype), dscale
    scale = jax.nn.sigmoid(logit[0])
    dhidden, dscale = expert_gradient(dy, hidden, scale, down)
    return dhidden.astype(dy.dtype), dscale * scale * (1.0 - scale)


@launch("shared_expert_dgate")
def shared_expert_dgate(x: Float[Array, "n d"], dlogit: Float[Array, " n"]) -> Float[Array, "d 1"]:
    """The gradient of the gate."""
    return over_rows(x.astype(jnp.float32), dlogit[:, None]).astype(x.dtype)


@launch("shared_expert_dgate_up")
def shared_expert_dgate_up(x: Float[Array, "n d"], dhidden: Float[Array, "n s2"]) -> Float[Array, "d s2"]:
    """The gradient of ``gate_up``."""
    return over_rows(x, dhidden).astype(x.dtype)
