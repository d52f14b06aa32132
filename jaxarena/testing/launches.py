"""The launches that a function, or its gradient, is made of: what nobody reads is dropped first, as XLA and the planner drop it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import partial_eval

from jaxarena.ops.interface import launches_in
from jaxarena.testing.oracles import value_and_gradients

__all__ = ["gradient_launches", "live_launches"]


def live_launches(function: Callable[..., Any], *args: Any) -> list[str]:
    """The names of the launches left in ``function``'s jaxpr after dead-code elimination, in order."""
    closed = jax.make_jaxpr(function)(*args)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return [launch.name for launch in launches_in(jaxpr)]


def gradient_launches(op: Callable[..., Any], args: Sequence[Any], argnums: Sequence[int]) -> list[str]:
    """The launches of a step that takes the gradient with respect to ``argnums`` only: a frozen weight's must not be among them."""
    return live_launches(lambda *arrays: value_and_gradients(op, arrays, argnums)[1], *args)
