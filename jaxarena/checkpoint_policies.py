"""Policies for ``jax.checkpoint`` that know our launches, beside those of ``jax.checkpoint_policies``.

``jax.checkpoint`` computes a function again in the backward pass instead of keeping what it made; a policy says which results are kept
after all. JAX's own (``dots_saveable`` and its kin) know JAX's primitives: to them a launch is none, so under them every op runs twice.
Here a policy keeps the results of launches, of all or of those it names; the rest (casts, activations, residual sums that XLA makes) is
computed again. Of what a policy allows, JAX keeps only what the backward pass reads.

::

    layer = jax.checkpoint(layer, policy=ja.checkpoint_policies.launches_saveable)
    layer = jax.checkpoint(layer, policy=ja.checkpoint_policies.save_only_launches("attention_*", "gated_delta_rule_*"))

The names are those that a plan lists. Results do not change, but for the rounding of what XLA fuses otherwise. A policy here and one of
JAX's combine with ``jax.checkpoint_policies.save_from_both_policies``.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from jaxarena.ops.interface import launch_names, launch_of, launches_in

__all__ = ["launches_saveable", "save_only_launches"]

Policy = Callable[..., bool]


def launches_saveable(prim: Any, *_: Any, **params: Any) -> bool:
    """Keeps what the backward pass reads of the launches' results, users' own too: no launch of the forward pass runs twice."""
    return bool(_names(prim, params))


def _names(prim: Any, params: dict[str, Any]) -> list[str]:
    """The launch that an equation is, or those inside it where it is a call whose results JAX keeps as one.

    A forward rule that calls the ``jax.custom_vjp`` function itself shows as such a call.
    """
    if (launch := launch_of(prim)) is not None:
        return [launch.name]
    inner = params.get("call_jaxpr")
    return [] if inner is None else [launch.name for launch in launches_in(getattr(inner, "jaxpr", inner))]


def save_only_launches(*patterns: str) -> Policy:
    """Keeps what the backward pass reads of the results of these launches; every other launch of the forward pass runs again.

    Args:
      *patterns: names of launches as :func:`fnmatch.fnmatchcase` takes them: ``"attention_forward"``, ``"moe_*"``.

    Raises:
      TypeError: a pattern is no string.
      ValueError: a pattern matches no launch that has been declared.
    """
    names = launch_names()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"save_only_launches: patterns must be strings, got {type(pattern).__name__} {pattern!r}")
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"save_only_launches: {pattern!r} must match a launch that is declared, such as {', '.join(names)}")

    def policy(prim: Any, *_: Any, **params: Any) -> bool:
        return any(fnmatchcase(name, pattern) for name in _names(prim, params) for pattern in patterns)

    return policy
