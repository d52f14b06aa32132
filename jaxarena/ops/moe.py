"""A mixture of experts: each token goes through the ``k`` of ``e`` SwiGLU networks that a router finds best for it.

    p = softmax(x router)                                    in float32
    choices = the k largest p, equal ones by lower index     weights w = p of the choices, if renormalised over their sum
    y = sum over choices j of w_j down_j^T (silu(gate_j^T x) * up_j^T x)

(Shazeer et al., "Outrageously Large Neural Networks", 2017.) It is dropless: no capacity, every choice is computed. A shared
expert, which every token goes through, may be added (``shared_expert.py``). The balance loss is that of Fedus et al. ("Switch
Transformers", 2021, eq. 4) with f taken over all k choices: e * sum over experts of f_e P_e, with f_e the share of choices that
fell on expert e and P_e the mean of its p. It is 1 for a uniform router; its gradient flows through P only.

The launches are those of ``grouped.py`` (group, gather) and, here: route, the two grouped products, combine, and one for each
gradient. With dy_j the gradient of choice j's row and a_j its hidden row, the weight w_j need not see the result of ``down``:
``dw_j = dy_j . (down_j^T a_j) = a_j . (down_j dy_j)``, and ``da_j = w_j down_j dy_j`` shares the product. So what is kept for the
backward pass is x, the rows before the activation, and the choices.

Shapes: x (..., d), router (d, e), gate_up (e, d, 2f) with the gate's columns first, down (e, f, d).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxarena.ops.checks import check_choice, check_float, check_ndim, check_positive_int, check_same_dtype, check_shape, vary_together
from jaxarena.ops.grouped import block_rows, grouped_weight_gradient, moe_gather, moe_group, over_blocks, take_choices
from jaxarena.ops.interface import launch
from jaxarena.ops.shared_expert import SharedExpert, add_shared_expert

__all__ = ["SharedExpert", "moe"]

_OP = "moe"


def moe(
    x: Float[Array, "*rows d"],
    router: Float[Array, "d e"],
    gate_up: Float[Array, "e d f2"],
    down: Float[Array, "e f d"],
    *,
    top_k: int,
    renormalize: bool = True,
    shared: SharedExpert | None = None,
) -> tuple[Float[Array, "*rows d"], Float[Array, ""]]:
    """Sends every token through its ``top_k`` experts, and through ``shared`` if given.

    With ``top_k=1`` and ``renormalize`` the weight is 1 whatever the router says, so only the balance loss trains the router.

    Args:
      x: (..., d), bfloat16 or float32.
      router: (d, e), in the dtype of ``x`` or float32.
      gate_up: (e, d, 2f) in the dtype of ``x``; columns 0 to f - 1 are the gate.
      down: (e, f, d) in the dtype of ``x``.
      top_k: experts a token chooses, at most e. Equal probabilities are chosen by lower index.
      renormalize: make a token's weights sum to 1.
      shared: weights in the dtype of ``x``.

    Returns:
      y, as ``x``, and the balance loss, a float32 scalar (1 for balanced experts, 0 without tokens).

    Raises:
      TypeError: a dtype is not supported.
      ValueError: shapes do not fit together, or ``top_k`` is more than the experts.
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
    check_positive_int(_OP, "top_k", top_k)
    if top_k > experts:
        raise ValueError(f"{_OP}: top_k must be at most the number of experts, {experts}, got {top_k}")

    check_choice(_OP, "renormalize", renormalize, (True, False))

    tokens = x.reshape(-1, width)
    y, balance = _routed(*vary_together(tokens, router, gate_up, down), top_k, bool(renormalize))
    if shared is not None:
        y = add_shared_expert(y, tokens, shared)
    return y.reshape(x.shape), balance


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _routed(x: Array, router: Array, gate_up: Array, down: Array, top_k: int, renormalize: bool) -> tuple[Array, Array]:
    y, balance, _ = _forward(x, router, gate_up, down, top_k, renormalize, keep=False)
    return y, balance


class _Kept(NamedTuple):
    """What routing leaves for the backward pass."""

    weights: Array  # (n, k)
    choice: Array  # (n, k): the expert of each choice
    source: Array  # as moe_group returns them
    place: Array
    expert: Array
    counts: Array
    hidden: tuple[Array, ...]  # the rows before the activation, if kept


def _forward(
    x: Array, router: Array, gate_up: Array, down: Array, top_k: int, renormalize: bool, *, keep: bool
) -> tuple[Array, Array, _Kept]:
    tokens, experts = x.shape[0], router.shape[1]
    weights, choice, load = moe_route(x, router, top_k=top_k, renormalize=renormalize)
    source, place, expert, counts = moe_group(choice, experts=experts, rows=block_rows(tokens * top_k, experts))
    activated, *hidden = moe_gate_up(moe_gather(x, source, top_k=top_k), gate_up, expert, keep=keep)
    y = moe_combine(moe_down(activated, down, expert), place, weights)
    balance = experts * jnp.sum(_share(counts, tokens * top_k) * load)
    return y, balance, _Kept(weights, choice, source, place, expert, counts, tuple(hidden))


def _fwd(
    x: Array, router: Array, gate_up: Array, down: Array, top_k: int, renormalize: bool
) -> tuple[tuple[Array, Array], tuple[Array, Array, Array, Array, _Kept]]:
    y, balance, kept = _forward(x, router, gate_up, down, top_k, renormalize, keep=True)
    return (y, balance), (x, router, gate_up, down, kept)


def _bwd(
    top_k: int, renormalize: bool, saved: tuple[Array, Array, Array, Array, _Kept], grads: tuple[Array, Array]
) -> tuple[Array, Array, Array, Array]:
    x, router, gate_up, down, kept = saved
    dy, dbalance = grads
    experts = router.shape[1]
    weights, choice, source, place, expert, counts, (hidden,) = kept
    dy_rows = moe_gather(dy, source, top_k=top_k)
    dhidden, weighted, dweight_rows = moe_dhidden(dy_rows, hidden, weights, source, down, expert)
    ddown = moe_ddown(weighted, dy_rows, expert, experts=experts)
    dgate_up = moe_dgate_up(moe_gather(x, source, top_k=top_k), dhidden, expert, experts=experts)
    dlogits = moe_dlogits(x, router, weights, choice, dweight_rows, place, counts, dbalance, renormalize=renormalize)
    dx = moe_dx(moe_drows(dhidden, gate_up, expert), place, dlogits, router)
    return dx, moe_drouter(x, dlogits, router), dgate_up, ddown


_routed.defvjp(_fwd, _bwd)


def _share(counts: Int[Array, " e"], choices: int) -> Float[Array, " e"]:
    return counts.astype(jnp.float32) / max(choices, 1)


def _router_logits(x: Float[Array, "n d"], router: Float[Array, "d e"]) -> Float[Array, "n e"]:
    # Two experts may differ by less than what a product in reduced precision resolves.
    return jnp.dot(x.astype(router.dtype), router, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


@launch("moe_route", row_ndim=(0, 0, 0))
def moe_route(
    x: Float[Array, "n d"], router: Float[Array, "d e"], *, top_k: int, renormalize: bool
) -> tuple[Float[Array, "n k"], Int[Array, "n k"], Float[Array, " e"]]:
    """The weights and the experts of every token's choices, and the mean probability of every expert."""
    probability = jax.nn.softmax(_router_logits(x, router), axis=-1)
    weights, choice = lax.top_k(probability, top_k)
    if renormalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, choice, jnp.sum(probability, axis=0) / max(x.shape[0], 1)


@launch("moe_gate_up")
def moe_gate_up(
    rows: Float[Array, "padded d"], gate_up: Float[Array, "e d f2"], expert: Int[Array, " blocks"], *, keep: bool
) -> tuple[Float[Array, "padded _"], ...]:
    """The activated rows and, if ``keep``, the rows before the activation."""

    def block(matrix: Array, rows: Array) -> tuple[Array, ...]:
        hidden = jnp.dot(rows, matrix, preferred_element_type=jnp.float32)
        gate, up = jnp.split(hidden, 2, axis=-1)
        activated = (jax.nn.silu(gate) * up).astype(rows.dtype)
        return (activated, hidden.astype(rows.dtype)) if keep else (activated,)

    return over_blocks(block, gate_up, expert, rows)


@launch("moe_down")
def moe_down(activated: Float[Array, "padded f"], down: Float[Array, "e f d"], expert: Int[Array, " blocks"]) -> Float[Array, "padded d"]:
    """The choices' results, not yet weighted."""

    def block(matrix: Array, activated: Array) -> Array:
        return jnp.dot(activated, matrix, preferred_element_type=jnp.float32).astype(activated.dtype)

    return over_blocks(block, down, expert, activated)


@launch("moe_combine")
def moe_combine(results: Float[Array, "padded d"], place: Int[Array, "n k"], weights: Float[Array, "n k"]) -> Float[Array, "n d"]:
    """The weighted sum of every token's results, in float32 and in the order of its choices."""
    total = jnp.zeros_like(results, shape=(place.shape[0], results.shape[1]), dtype=jnp.float32)
    for j in range(place.shape[1]):
        total = total + weights[:, j, None] * results[place[:, j]].astype(jnp.float32)
    return total.astype(results.dtype)


@launch("moe_dhidden", row_ndim=(1, 1, 0))
def moe_dhidden(
    dy_rows: Float[Array, "padded d"],
    hidden: Float[Array, "padded f2"],
    weights: Float[Array, "n k"],
    source: Int[Array, " padded"],
    down: Float[Array, "e f d"],
    expert: Int[Array, " blocks"],
) -> tuple[Float[Array, "padded f2"], Float[Array, "padded f"], Float[Array, " padded"]]:
    """The gradient of the rows before the activation, the weighted activated rows, and the gradient of the rows' weights."""

    def block(matrix: Array, dy: Array, hidden: Array, weight: Array) -> tuple[Array, Array, Array]:
        unweighted = lax.dot_general(dy, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        gate, up = jnp.split(hidden.astype(jnp.float32), 2, axis=-1)
        sigmoid = jax.nn.sigmoid(gate)
        activated = gate * sigmoid * up
        dactivated = weight[:, None] * unweighted
        dgate = dactivated * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        dhidden = jnp.concatenate([dgate, dactivated * gate * sigmoid], axis=-1)
        return dhidden.astype(dy.dtype), (weight[:, None] * activated).astype(dy.dtype), jnp.sum(activated * unweighted, axis=-1)

    return over_blocks(block, down, expert, dy_rows, hidden, take_choices(weights, source))


@launch("moe_ddown")
def moe_ddown(
    weighted: Float[Array, "padded f"], dy_rows: Float[Array, "padded d"], expert: Int[Array, " blocks"], *, experts: int
) -> Float[Array, "e f d"]:
    """The gradient of ``down``."""
    return grouped_weight_gradient(weighted, dy_rows, expert, experts=experts)


@launch("moe_dgate_up")
def moe_dgate_up(
    rows: Float[Array, "padded d"], dhidden: Float[Array, "padded f2"], expert: Int[Array, " blocks"], *, experts: int
) -> Float[Array, "e d f2"]:
    """The gradient of ``gate_up``."""
    return grouped_weight_gradient(rows, dhidden, expert, experts=experts)


@launch("moe_drows")
def moe_drows(
    dhidden: Float[Array, "padded f2"], gate_up: Float[Array, "e d f2"], expert: Int[Array, " blocks"]
) -> Float[Array, "padded d"]:
    """The gradient of the gathered rows."""

    def block(matrix: Array, dhidden: Array) -> Array:
        return lax.dot_general(dhidden, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32).astype(dhidden.dtype)

    return over_blocks(block, gate_up, expert, dhidden)


@launch("moe_dlogits")
def moe_dlogits(
    x: Float[Array, "n d"],
    router: Float[Array, "d e"],
    weights: Float[Array, "n k"],
    choice: Int[Array, "n k"],
    dweight_rows: Float[Array, " padded"],
    place: Int[Array, "n k"],
    counts: Int[Array, " e"],
    dbalance: Float[Array, ""],
    *,
    renormalize: bool,
) -> Float[Array, "n e"]:
    """The gradient of the router's logits, from the choices' weights and from the balance loss."""
    (tokens, top_k), experts = weights.shape, router.shape[1]
    probability = jax.nn.softmax(_router_logits(x, router), axis=-1)
    dchosen = dweight_rows[place]
    if renormalize:
        chosen = jnp.take_along_axis(probability, choice, axis=-1)
        centred = dchosen - jnp.sum(dchosen * weights, axis=-1, keepdims=True)
        dchosen = centred / jnp.sum(chosen, axis=-1, keepdims=True)
    every = lax.iota(jnp.int32, experts)
    dprobability = jnp.broadcast_to(dbalance * experts * _share(counts, tokens * top_k) / max(tokens, 1), probability.shape)
    for j in range(top_k):
        dprobability = dprobability + jnp.where(choice[:, j, None] == every, dchosen[:, j, None], 0.0)
    return probability * (dprobability - jnp.sum(probability * dprobability, axis=-1, keepdims=True))


@launch("moe_dx")
def moe_dx(
    drows: Float[Array, "padded d"], place: Int[Array, "n k"], dlogits: Float[Array, "n e"], router: Float[Array, "d e"]
) -> Float[Array, "n d"]:
    """The gradient of x: of its choices in their order, and through the router."""
    total = jnp.dot(dlogits, router.astype(jnp.float32).T)
    for j in range(place.shape[1]):
        total = total + drows[place[:, j]].astype(jnp.float32)
    return total.astype(drows.dtype)


@launch("moe_drouter")
def moe_drouter(x: Float[Array, "n d"], dlogits: Float[Array, "n e"], router: Float[Array, "d e"]) -> Float[Array, "d e"]:
    """The gradient of the router."""
    return jnp.dot(x.astype(jnp.float32).T, dlogits).astype(router.dtype)
