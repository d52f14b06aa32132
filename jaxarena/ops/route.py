"""Routing of a mixture of experts: which experts a token chooses, the weights of their results, and the router's two losses.

With logits l = x router in float32, of a token and its ``e`` experts::

    scores         s = softmax(l)  or  sigmoid(l)
    choices        the k experts of largest s + bias, equal ones by lower index
    weights        w = scale * s of the choices, if renormalised over their sum (without the bias)
    balance loss   e * sum over experts of f_e P_e     f_e = share of all choices, P_e = mean over tokens of s / sum(s)
    z loss         mean over tokens of logsumexp(l)^2

Balance loss: Fedus et al., "Switch Transformers", 2021, eq. 4, with f over all k choices; the gradient flows through P only. It is 1
for a uniform router. For sigmoid scores P is that of DeepSeek-V3 (arXiv:2412.19437, eqs. 17 to 20). z loss: Zoph et al.,
"ST-MoE", 2022, eq. 5. The bias steers the choice without a loss (DeepSeek-V3, section 2.1.2): a user raises it for experts whose load
is low. It has no gradient.

Groups of experts: only the ``groups_per_token`` best of ``n_groups`` equal, contiguous groups are open to a token. A group's score is
its largest s for softmax without a bias (DeepSeek-V2, arXiv:2405.04434, section 2.2.2), else the sum of its two largest s + bias
(DeepSeek-V3's published code; its paper sums the k / groups_per_token largest).

Scores are held as logarithms u = log s, so that weights are right where every score underflows: renormalised, w = scale * softmax of
the chosen u. Without a bias experts are ranked by l, which orders as s does, also where scores underflow or saturate.

Gradients, with q = softmax(u), v = w / scale and c = dbalance * e * f / n::

    du of the choices   w (dw - sum v dw) if renormalised, else w dw
    du of all           softmax: q c;  sigmoid: q (c - sum q c)
    dl                  softmax: du - q sum(du);  sigmoid: du * sigmoid(-l);  both: + dz * 2 logsumexp(l) softmax(l) / n

Shapes: x (n, d), router (d, e), bias (e), weights and choices (n, k).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxarena.ops.checks import check_choice, check_finite, check_positive_int
from jaxarena.ops.grouped import group_choices, over_rows
from jaxarena.ops.interface import launch

__all__ = ["Routing", "check_routing", "moe_dlogits", "moe_drouter", "moe_route"]

SCORINGS = ("softmax", "sigmoid")


class Routing(NamedTuple):
    """How tokens are routed: the static options of :func:`jaxarena.ops.moe`."""

    top_k: int
    scoring: str
    groups: tuple[int, int] | None  # (n_groups, groups_per_token)
    renormalize: bool
    scale: float


def check_routing(routing: Routing, experts: int) -> None:
    """The options are supported, and fit ``experts`` experts."""
    check_positive_int("moe", "top_k", routing.top_k)
    if routing.top_k > experts:
        raise ValueError(f"moe: top_k must be at most the number of experts, {experts}, got {routing.top_k}")
    check_choice("moe", "scoring", routing.scoring, SCORINGS)
    check_choice("moe", "renormalize", routing.renormalize, (True, False))
    check_finite("moe", "scale", routing.scale)
    if routing.scale <= 0:
        raise ValueError(f"moe: scale must be positive, got {routing.scale}")
    if routing.groups is None:
        return
    if not isinstance(routing.groups, tuple) or len(routing.groups) != 2:
        raise TypeError(f"moe: groups must be a tuple (n_groups, groups_per_token) or None, got {routing.groups!r}")
    groups, per_token = routing.groups
    check_positive_int("moe", "groups[0]", groups)
    check_positive_int("moe", "groups[1]", per_token)
    if experts % groups:
        raise ValueError(f"moe: groups[0] must divide the number of experts, {experts}, got {groups}")
    if per_token > groups:
        raise ValueError(f"moe: groups[1] must be at most groups[0] = {groups}, got {per_token}")
    open_experts = per_token * (experts // groups)
    if routing.top_k > open_experts:
        raise ValueError(
            f"moe: top_k must be at most the {open_experts} experts of the groups open to a token (groups={routing.groups}), "
            f"got {routing.top_k}"
        )


class _Scores(NamedTuple):
    logits: Array  # (n, e)
    log_sum: Array  # (n, 1): logsumexp of the logits
    softmax: Array  # (n, e), of the logits
    log_scores: Array  # (n, e)
    normalized: Array  # (n, e): the scores over their sum


def _scores(x: Float[Array, "n d"], router: Float[Array, "d e"], scoring: str) -> _Scores:
    # Two experts may differ by less than what a product in reduced precision resolves.
    logits = jnp.dot(x.astype(router.dtype), router, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    top = jnp.max(logits, axis=-1, keepdims=True)
    shifted = logits - top
    log_sum = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True))
    log_softmax = shifted - log_sum  # not logits - (top + log_sum): next to a large top the logarithm is lost
    softmax = jnp.exp(log_softmax)
    if scoring == "softmax":
        return _Scores(logits, top + log_sum, softmax, log_softmax, softmax)
    log_sigmoid = jax.nn.log_sigmoid(logits)
    return _Scores(logits, top + log_sum, softmax, log_sigmoid, jax.nn.softmax(log_sigmoid, axis=-1))


def _choose(scores: _Scores, bias: Array | None, routing: Routing) -> Int[Array, "n k"]:
    # -0.0 is 0.0: equal scores.
    value = jnp.where(scores.logits == 0, 0.0, scores.logits) if bias is None else jnp.exp(scores.log_scores) + bias
    if routing.groups is not None:
        groups, per_token = routing.groups
        tokens, experts = value.shape
        if bias is None and routing.scoring == "softmax":
            group_value = jnp.max(value.reshape(tokens, groups, experts // groups), axis=-1)
        else:
            biased = jnp.exp(scores.log_scores) if bias is None else value
            best, _ = lax.top_k(biased.reshape(tokens, groups, experts // groups), min(2, experts // groups))
            group_value = jnp.sum(best, axis=-1)
        _, chosen = lax.top_k(group_value, per_token)
        is_open = jnp.any(chosen[:, :, None] == lax.iota(jnp.int32, groups), axis=1)
        value = jnp.where(jnp.repeat(is_open, experts // groups, axis=1), value, -jnp.inf)
    return lax.top_k(value, routing.top_k)[1]


@launch("moe_route", row_ndim=0)
def moe_route(
    x: Float[Array, "n d"], router: Float[Array, "d e"], *optional: Array, routing: Routing, biased: bool, rows: int
) -> tuple[Array, ...]:
    """Routes every token and groups the choices by expert, in blocks of ``rows``.

    ``optional`` are the bias (e), if ``biased``, and the gate (d, 1) of the shared expert, if it has one.

    Returns:
      the weights (n, k) and the experts (n, k) of the choices; each expert's share of the choices (e); balance and z loss; the fields
      of :class:`jaxarena.ops.grouped.Groups`; and the shared expert's gate logits (n), if there are such.
    """
    bias, gates = (optional[0], optional[1:]) if biased else (None, optional)
    tokens, experts = x.shape[0], router.shape[1]
    scores = _scores(x, router, routing.scoring)
    choice = _choose(scores, bias, routing)
    chosen = jnp.take_along_axis(scores.log_scores, choice, axis=-1)
    weights = routing.scale * (jax.nn.softmax(chosen, axis=-1) if routing.renormalize else jnp.exp(chosen))
    groups, counts = group_choices(choice, experts=experts, rows=rows)
    load = counts.astype(jnp.float32) / max(choice.size, 1)
    balance = experts * jnp.sum(load * jnp.sum(scores.normalized, axis=0)) / max(tokens, 1)
    z = jnp.sum(scores.log_sum**2) / max(tokens, 1)
    gate_logits = (jnp.dot(x, gate, preferred_element_type=jnp.float32)[:, 0] for gate in gates)
    return weights, choice, load, balance, z, *groups, *gate_logits


@launch("moe_dlogits")
def moe_dlogits(
    x: Float[Array, "n d"],
    router: Float[Array, "d e"],
    weights: Float[Array, "n k"],
    choice: Int[Array, "n k"],
    load: Float[Array, " e"],
    dweight_rows: Float[Array, " padded"],
    place: Int[Array, "n k"],
    dbalance: Float[Array, ""],
    dz: Float[Array, ""],
    *,
    routing: Routing,
) -> Float[Array, "n e"]:
    """The gradient of the router's logits: from the choices' weights, given for each grouped row, and from the losses."""
    tokens, experts = max(x.shape[0], 1), router.shape[1]
    scores = _scores(x, router, routing.scoring)
    dchosen = dweight_rows[place]
    if routing.renormalize:
        dchosen = dchosen - jnp.sum(dchosen * (weights / routing.scale), axis=-1, keepdims=True)
    dchosen = weights * dchosen
    every = lax.iota(jnp.int32, experts)
    of_balance = dbalance * experts * load / tokens
    softmax = routing.scoring == "softmax"
    if not softmax:
        of_balance = of_balance - jnp.sum(scores.normalized * of_balance, axis=-1, keepdims=True)
    dscores = scores.normalized * of_balance
    for j in range(choice.shape[1]):
        dscores = dscores + jnp.where(choice[:, j, None] == every, dchosen[:, j, None], 0.0)
    if softmax:
        dlogits = dscores - scores.normalized * jnp.sum(dscores, axis=-1, keepdims=True)
    else:
        dlogits = dscores * jax.nn.sigmoid(-scores.logits)
    return dlogits + (2.0 * dz / tokens) * scores.log_sum * scores.softmax


@launch("moe_drouter")
def moe_drouter(x: Float[Array, "n d"], dlogits: Float[Array, "n e"], router: Float[Array, "d e"]) -> Float[Array, "d e"]:
    """The gradient of the router."""
    return over_rows(x.astype(jnp.float32), dlogits).astype(router.dtype)
