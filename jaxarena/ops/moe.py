"""A mixture of experts: each token goes through the ``k`` of ``e`` SwiGLU networks that a router finds best for it.

    y = residual + sum over choices j of w_j down_j^T (silu(gate_j^T x) * up_j^T x) + shared(x)

(Shazeer et al., "Outrageously Large Neural Networks", 2017.) Choices, weights and the losses that keep a router usable: ``route.py``.
It is dropless: no capacity, every choice is computed, in blocks of rows of one expert (``grouped.py``). A shared expert, which every
token goes through, may be added (``shared_expert.py``).

The forward pass is at most three launches: route, the shared expert, the experts. The experts' launch gathers the tokens' rows,
multiplies, activates, multiplies again, and sums each token's weighted results onto the residual and the shared expert's; of what it
makes on the way, only the rows before the activation are kept, and those only for a gradient. With x and the routing they are all
that the backward pass needs, however many experts a token chooses: with dy_j the gradient of choice j's row, a_j its activated row,
``dw_j = dy_j . (down_j^T a_j) = a_j . (down_j dy_j)`` needs no result of ``down``, and ``da_j = w_j down_j dy_j`` shares the product.

Shapes: x, residual (..., d), router (d, e), bias (e), gate_up (e, d, 2f) with the gate's columns first, down (e, f, d).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxarena.ops.checks import check_float, check_float32, check_ndim, check_same_dtype, check_same_shape, check_shape, vary_together
from jaxarena.ops.grouped import Groups, block_rows, grouped_weight_gradient, over_blocks, sum_choices, take_rows
from jaxarena.ops.interface import launch
from jaxarena.ops.route import Routing, check_routing, moe_dlogits, moe_drouter, moe_route
from jaxarena.ops.shared_expert import (
    SharedExpert,
    check_shared_expert,
    expert_gradient,
    shared_dx,
    shared_expert_ddown,
    shared_expert_dgate,
    shared_expert_dgate_up,
    shared_expert_dhidden,
    shared_rows,
)
from jaxarena.ops.swiglu import swiglu

__all__ = ["MoeResult", "SharedExpert", "moe"]

_OP = "moe"


class MoeResult(NamedTuple):
    """What a mixture of experts returns. Losses and load are float32, and 0 where there are no tokens."""

    y: Float[Array, "*rows d"]
    balance_loss: Float[Array, ""]  # 1 for a uniform router
    z_loss: Float[Array, ""]  # mean of the squared logsumexp of the router's logits
    load: Float[Array, " e"]  # the share of all choices that fell on each expert; no gradient


def moe(
    x: Float[Array, "*rows d"],
    router: Float[Array, "d e"],
    gate_up: Float[Array, "e d f2"],
    down: Float[Array, "e f d"],
    *,
    top_k: int,
    scoring: str = "softmax",
    bias: Float[Array, " e"] | None = None,
    groups: tuple[int, int] | None = None,
    renormalize: bool = True,
    scale: float = 1.0,
    shared: SharedExpert | None = None,
    residual: Float[Array, "*rows d"] | None = None,
) -> MoeResult:
    """Sends every token through its ``top_k`` experts, and through ``shared`` if given.

    With ``top_k=1`` and ``renormalize`` the weight is ``scale`` whatever the router says: only the losses train the router.

    Args:
      x: (..., d), bfloat16 or float32.
      router: (d, e), in the dtype of ``x`` or float32.
      gate_up: (e, d, 2f) in the dtype of ``x``; columns 0 to f - 1 are the gate.
      down: (e, f, d) in the dtype of ``x``.
      top_k: experts a token chooses, at most e. Equal scores are chosen by lower index; -0.0 equals 0.0.
      scoring: ``"softmax"`` or ``"sigmoid"`` of the router's logits.
      bias: (e), float32, added to the scores for the choice only; no gradient. Raise it for an expert whose ``load`` is low.
      groups: ``(n_groups, groups_per_token)``: experts form n_groups equal groups, and a token chooses within its best ones. Groups
        are ranked by their largest score (softmax without a bias) or the sum of their two largest scores with the bias.
      renormalize: make a token's weights sum to ``scale``.
      scale: multiplies the weights of the routed experts.
      shared: weights in the dtype of ``x``.
      residual: as ``x``; added to the result.

    Returns:
      A :class:`MoeResult`; y as ``x``.

    Raises:
      TypeError: a dtype is not supported.
      ValueError: shapes do not fit together, ``top_k`` is more than the experts a token may choose from, ``groups`` do not divide
        the experts, or ``scale`` is not positive.
    """
    check_float(_OP, "x", x)
    check_ndim(_OP, "x", x, "... d")
    check_float(_OP, "router", router)
    check_ndim(_OP, "router", router, "d experts")
    width, (_, experts) = x.shape[-1], router.shape
    check_shape(_OP, "router", router, (width, experts), "the last axis of x by the experts")
    if router.dtype != jnp.float32:
        check_same_dtype(_OP, "router", router, "x", x)
    for name, weight in (("gate_up", gate_up), ("down", down)):
        check_float(_OP, name, weight)
        check_same_dtype(_OP, name, weight, "x", x)
    check_ndim(_OP, "down", down, "experts f d")
    hidden = down.shape[1]
    check_shape(_OP, "down", down, (experts, hidden, width), "experts of the router by f by the last axis of x")
    check_shape(_OP, "gate_up", gate_up, (experts, width, 2 * hidden), "experts of the router by the last axis of x by twice f of down")
    if bias is not None:
        check_float32(_OP, "bias", bias)
        check_shape(_OP, "bias", bias, (experts,), "the experts of the router")
    routing = Routing(top_k, scoring, groups, renormalize, scale)
    check_routing(routing, experts)
    if shared is not None:
        check_shared_expert(shared, x)
    if residual is not None:
        check_float(_OP, "residual", residual)
        check_same_dtype(_OP, "residual", residual, "x", x)
        check_same_shape(_OP, "residual", residual, "x", x)

    rows = None if residual is None else residual.reshape(-1, width)
    (operands,) = vary_together(_Operands(x.reshape(-1, width), router, gate_up, down, bias, shared, rows))
    result = _moe(operands, routing)
    return result._replace(y=result.y.reshape(x.shape))


class _Operands(NamedTuple):
    x: Array
    router: Array
    gate_up: Array
    down: Array
    bias: Array | None
    shared: SharedExpert | None
    residual: Array | None


class _Kept(NamedTuple):
    """What is kept for the backward pass beside the operands."""

    weights: Array  # (n, k)
    choice: Array  # (n, k): the expert of each choice
    load: Array
    groups: Groups
    logit: tuple[Array, ...]  # (n,), of the shared expert's gate, if it has one
    hidden: Array  # the grouped rows before the activation
    shared_hidden: Array | None = None  # the shared expert's, if there is one


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _moe(operands: _Operands, routing: Routing) -> MoeResult:
    return _forward(operands, routing, keep=False)[0]


def _forward(operands: _Operands, routing: Routing, *, keep: bool) -> tuple[MoeResult, Any]:
    x, router, gate_up, down, bias, shared, residual = operands
    rows = block_rows(x.shape[0] * routing.top_k, router.shape[1])
    gate = None if shared is None else shared.gate
    weights, choice, load, balance, z, *vectors = moe_route(
        x, router, *_given(bias, gate), routing=routing, biased=bias is not None, rows=rows
    )
    groups, logit = Groups(*vectors[:3]), vectors[3:]
    of_shared = () if shared is None else (shared.gate_up, shared.down, *logit)
    y, *hidden = moe_experts(x, gate_up, down, *groups, weights, *_given(residual), *of_shared, residual=residual is not None, keep=keep)
    return MoeResult(y, balance, z, load), _Kept(weights, choice, load, groups, tuple(logit), *hidden) if keep else None


def _given(*optional: Array | None) -> list[Array]:
    return [a for a in optional if a is not None]


def _fwd(operands: _Operands, routing: Routing) -> tuple[MoeResult, tuple[_Operands, _Kept]]:
    result, kept = _forward(operands, routing, keep=True)
    return result, (operands._replace(residual=None), kept)


def _bwd(routing: Routing, saved: tuple[_Operands, _Kept], grads: MoeResult) -> tuple[_Operands]:
    (x, router, gate_up, down, _, shared, _), kept = saved
    source, place, expert = kept.groups
    dy, experts = grads.y, router.shape[1]
    # Launches that read the same arrays follow each other: a planned step then reads those once.
    ddown = moe_ddown(kept.hidden, dy, kept.weights, source, expert, experts=experts)
    dhidden, dweights = moe_dhidden(dy, kept.hidden, kept.weights, source, down, expert)
    dshared, of_shared = None, []
    if shared is not None:
        dshared_down = shared_expert_ddown(kept.shared_hidden, dy, *kept.logit)
        dshared_hidden, dlogit = shared_expert_dhidden(dy, kept.shared_hidden, shared.down, *kept.logit)
        dgate = None if shared.gate is None else shared_expert_dgate(x, dlogit)
        dshared = SharedExpert(shared_expert_dgate_up(x, dshared_hidden), dshared_down, dgate)
        of_shared = [dshared_hidden, shared.gate_up, *([] if shared.gate is None else [dlogit, shared.gate])]
    dlogits = moe_dlogits(
        x, router, kept.weights, kept.choice, kept.load, dweights, place, grads.balance_loss, grads.z_loss, routing=routing
    )
    drouter = moe_drouter(x, dlogits, router)
    dgate_up = moe_dgate_up(x, dhidden, source, expert, experts=experts, top_k=routing.top_k)
    dx = moe_dx(dhidden, gate_up, place, expert, dlogits, router, *of_shared)
    return (_Operands(dx, drouter, dgate_up, ddown, None, dshared, dy),)


_moe.defvjp(_fwd, _bwd)


@launch("moe_experts")
def moe_experts(
    x: Float[Array, "n d"],
    gate_up: Float[Array, "e d f2"],
    down: Float[Array, "e f d"],
    source: Int[Array, " padded"],
    place: Int[Array, "n k"],
    expert: Int[Array, " blocks"],
    weights: Float[Array, "n k"],
    *optional: Array,
    residual: bool,
    keep: bool,
) -> tuple[Float[Array, "_ _"], ...]:
    """The residual, the shared expert's rows and the weighted results of every token's choices in their order, summed in float32.

    ``optional`` are the residual, if ``residual``, and what :func:`shared_rows` takes beside x, if there is a shared expert. With
    ``keep`` also the grouped rows before the activation, and those of the shared expert.
    """

    def block(gate_up: Array, down: Array, rows: Array) -> tuple[Array, ...]:
        hidden = jnp.dot(rows, gate_up, preferred_element_type=jnp.float32)
        result = jnp.dot(swiglu(hidden).astype(x.dtype), down, preferred_element_type=jnp.float32)
        return (result, hidden.astype(x.dtype)) if keep else (result,)

    results, *hidden = over_blocks(block, (gate_up, down), expert, take_rows(x, source // place.shape[1]))
    total = optional[0].astype(jnp.float32) if residual else jnp.zeros_like(x, dtype=jnp.float32)
    shared = optional[1:] if residual else optional
    if shared:
        rows, shared_hidden = shared_rows(x, *shared)
        total = total + rows
        hidden.append(shared_hidden)
    return (sum_choices(total, results, place, weights).astype(x.dtype), *(hidden if keep else ()))


@launch("moe_ddown")
def moe_ddown(
    hidden: Float[Array, "padded f2"],
    dy: Float[Array, "n d"],
    weights: Float[Array, "n k"],
    source: Int[Array, " padded"],
    expert: Int[Array, " blocks"],
    *,
    experts: int,
) -> Float[Array, "e f d"]:
    """The gradient of ``down``."""
    weighted = take_rows(weights.reshape(-1), source)[:, None] * swiglu(hidden)
    return grouped_weight_gradient(weighted.astype(dy.dtype), take_rows(dy, source // weights.shape[1]), expert, experts=experts)


@launch("moe_dhidden", row_ndim=(1, 0))
def moe_dhidden(
    dy: Float[Array, "n d"],
    hidden: Float[Array, "padded f2"],
    weights: Float[Array, "n k"],
    source: Int[Array, " padded"],
    down: Float[Array, "e f d"],
    expert: Int[Array, " blocks"],
) -> tuple[Float[Array, "padded f2"], Float[Array, " padded"]]:
    """The gradients of the grouped rows before the activation and of the rows' weights."""

    def block(down: Array, dy: Array, hidden: Array, weight: Array) -> tuple[Array, Array]:
        dhidden, dweight = expert_gradient(dy, hidden, weight, down)
        return dhidden.astype(dy.dtype), dweight

    rows = take_rows(dy, source // weights.shape[1])
    return over_blocks(block, (down,), expert, rows, hidden, take_rows(weights.reshape(-1), source))


@launch("moe_dgate_up")
def moe_dgate_up(
    x: Float[Array, "n d"],
    dhidden: Float[Array, "padded f2"],
    source: Int[Array, " padded"],
    expert: Int[Array, " blocks"],
    *,
    experts: int,
    top_k: int,
) -> Float[Array, "e d f2"]:
    """The gradient of ``gate_up``."""
    return grouped_weight_gradient(take_rows(x, source // top_k), dhidden, expert, experts=experts)


@launch("moe_dx")
def moe_dx(
    dhidden: Float[Array, "padded f2"],
    gate_up: Float[Array, "e d f2"],
    place: Int[Array, "n k"],
    expert: Int[Array, " blocks"],
    dlogits: Float[Array, "n e"],
    router: Float[Array, "d e"],
    *shared: Array,
) -> Float[Array, "n d"]:
    """The gradient of x: through the router, the shared expert (operands of :func:`shared_dx`), and the choices in their order."""

    def block(gate_up: Array, dhidden: Array) -> Array:
        return lax.dot_general(dhidden, gate_up, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    total = jnp.dot(dlogits, router.astype(jnp.float32).T)
    if shared:
        total = total + shared_dx(*shared)
    return sum_choices(total, over_blocks(block, (gate_up,), expert, dhidden), place).astype(dhidden.dtype)
