"""Planned steps: nothing they compute may depend on what the arena held, on the reuse of memory, or on being planned at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jaxarena.arena import ROW_BYTES
from jaxarena.plan import ArenaBuffer, Plan
from jaxarena.program import ProgramPlan
from jaxarena.report.units import human
from jaxarena.step import Step, jit

__all__ = ["assert_arena_at_most", "assert_step_repeatable", "check_step", "poisoned_arenas"]

# Bytes whose floats are NaN, and bytes whose floats are finite and huge (3.4e38): a product with zero hides one of them, a comparison
# or a maximum the other.
_FILLS = (0xFF, 0x7F)


def poisoned_arenas(plan: Plan) -> list[ArenaBuffer]:
    """Arenas for ``plan`` filled with what no step may see: NaN, huge finite numbers, and NaN in the other element type of an arena."""
    as_bytes = ArenaBuffer(jnp.full((plan.arena.rows, ROW_BYTES), -1, jnp.int8), (plan.fingerprint,))
    return [*(plan.allocate(fill) for fill in _FILLS), as_bytes]


def assert_step_repeatable(function: Callable[..., Any], *args: Any, **options: Any) -> Plan:
    """Asserts that ``function``, planned, gives the same bits on an arena of zeros, on each of :func:`poisoned_arenas`, and with reuse of
    memory switched off, and that its plan is valid.

    Args:
      function: what would be given to :func:`jaxarena.jit`.
      *args: its arguments; donated ones are copied first.
      **options: of :func:`jaxarena.jit`.

    Returns:
      The plan.

    Raises:
      AssertionError: names the leaf that differs.
      jaxarena.planner.PlanError: names the fault in the plan.
    """
    return _repeat(function, args, options)[1]


def check_step(function: Callable[..., Any], *args: Any, rtol: float = 0.0, atol: float = 0.0, **options: Any) -> Plan:
    """:func:`assert_step_repeatable`, and the result is that of plain ``jax.jit(function)``: every bit of it, unless a tolerance is given.

    XLA may round a step's float sums and fused products otherwise when arrays lie in an arena; give a tolerance for those.

    Returns:
      The plan.

    Raises:
      AssertionError: names the leaf that differs.
      jaxarena.planner.PlanError: names the fault in the plan.
    """
    result, plan = _repeat(function, args, options)
    static = {name: options[name] for name in ("static_argnums", "static_argnames") if name in options}
    plain = jax.jit(function, **static)(*args)
    if rtol or atol:
        chex.assert_trees_all_close(result, plain, rtol=rtol, atol=atol)
    else:
        chex.assert_trees_all_equal(result, plain, strict=True)
    return plan


def _repeat(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Plan]:
    """The result on an arena of zeros, after the others proved equal, and the plan."""
    step = jit(function, **options)
    plan = step.plan(*args)
    plan.verify()
    first = step(plan.allocate(), *_copied(args))[0]
    for arena in poisoned_arenas(plan):
        chex.assert_trees_all_equal(first, step(arena, *_copied(args))[0], strict=True)
    no_reuse = jit(function, **{**options, "reuse": False})
    arena = no_reuse.plan(*args).allocate(0xFF)
    chex.assert_trees_all_equal(first, no_reuse(arena, *_copied(args))[0], strict=True)
    return first, plan


def _copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arrays that a step may take for itself."""
    return jax.tree.map(lambda a: a.copy() if isinstance(a, jax.Array) else a, args)


def assert_arena_at_most(step_or_plan: Step | Plan | ProgramPlan, bytes: int, *args: Any) -> None:
    """Asserts that the arena takes no more than ``bytes``. Nothing is compiled.

    Args:
      step_or_plan: a step, then planned for ``args``, or the plan of a step or program.
      bytes: the limit.
      *args: a step's arguments: arrays or ``jax.ShapeDtypeStruct``.

    Raises:
      AssertionError: says what the arena takes, what no plan could go below, and the arrays that live at the peak.
    """
    plan = step_or_plan.plan(*args) if isinstance(step_or_plan, Step) else step_or_plan
    if plan.bytes <= bytes:
        return
    largest = max(plan.forms.values(), key=lambda p: p.bytes) if isinstance(plan, ProgramPlan) else plan
    live = sorted(largest.live_at(largest.peak_launch), key=lambda placed: -placed.bytes)
    names = ", ".join(f"{getattr(p, 'name', None) or getattr(p, 'tag', '')} ({human(p.bytes)})" for p in live[:5])
    raise AssertionError(
        f"arena of {plan.bytes:,} bytes, limit {bytes:,}, no plan below {plan.bound:,}; most lives at launch {largest.peak_launch}: {names}"
    )
