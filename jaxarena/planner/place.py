"""From a form to its arena: arrays and scratch in one placement problem."""

from __future__ import annotations

from itertools import accumulate

from jaxarena._arena_types import ALIGN, MAX_ROWS, ROW_BYTES, Arena, Placed, PlacedScratch, round_up
from jaxarena.lifetime import Form, live_ranges, placeable
from jaxarena.planner.bound import bound, peak_time
from jaxarena.planner.problem import Interval, height
from jaxarena.planner.solve import needs, solve

__all__ = ["STEP_NODES", "intervals_of", "place"]

STEP_NODES = 8000
"""The search's budget for a step: most meet the bound without any; the others take well under a second."""

CAPACITY = MAX_ROWS * ROW_BYTES
"""Bytes of the largest arena."""


def place(form: Form, *, reuse: bool = True, nodes: int = STEP_NODES, capacity: int = CAPACITY) -> Arena:
    """Places the arrays that live within the step, and the launches' scratch.

    Placed is every home that :func:`jaxarena.lifetime.placeable` names, for as long as :func:`jaxarena.lifetime.live_ranges` says, and
    every scratch that is no counter, while its launch runs.

    Args:
      reuse: False gives every interval bytes of its own, to find out whether a wrong result comes from sharing them.
      nodes: the planner's budget, see :func:`~jaxarena.planner.solve.solve`.
      capacity: bytes that the arena must not exceed; by default those of ``2**31 - 1`` rows, the most that can be addressed.

    Raises:
      ValueError: when the arena would exceed the capacity; names the launch with the most bytes, and the largest arrays there.
    """
    arrays, scratch = intervals_of(form)
    intervals = [*arrays, *(interval for _, interval in scratch)]
    offsets = solve(intervals, nodes=nodes).offsets if reuse else _stacked(intervals)
    total = height(intervals, offsets)
    if total > capacity:
        least, t = bound(intervals), peak_time(intervals)
        shown = [Interval(_shown(i.name), i.bytes, i.first, i.last) for i in intervals]
        raise ValueError(
            f"place: form {form.name!r} {'cannot' if least > capacity else 'was not found to'} fit in {capacity} bytes: it needs at least "
            f"{least}, and {total} as planned. Launch {t} ({form.launches[t].name}) needs the most: {needs(shown)}"
        )
    counters = (sum(round_up(s.bytes, ALIGN) for s in launch.scratch if s.counter) for launch in form.launches)
    return Arena(
        placed=tuple(Placed(i.name, i.bytes, offsets[i.name], i.first, i.last) for i in arrays),
        scratch=tuple(PlacedScratch(tag, i.bytes, offsets[i.name], i.first) for tag, i in scratch),
        counters=max(counters, default=0),
        bytes=total,
    )


def intervals_of(form: Form) -> tuple[list[Interval], list[tuple[str, Interval]]]:
    """The form's placement problem: its arrays, and its scratch with the tags."""
    ranges = live_ranges(form)
    arrays = [Interval(name, form.parts[name].bytes, *ranges[name]) for name in placeable(form)]
    # "\0" keeps a scratch's name apart from every array's.
    asked = [(t, s) for t, launch in enumerate(form.launches) for s in launch.scratch if not s.counter]
    return arrays, [(s.tag, Interval(f"\0{t}\0{s.tag}", s.bytes, t, t)) for t, s in asked]


def _shown(name: str) -> str:
    """An interval's name as users know it."""
    return f"scratch {name.split(chr(0))[2]!r}" if name.startswith("\0") else name


def _stacked(intervals: list[Interval]) -> dict[str, int]:
    starts = accumulate((round_up(i.bytes, ALIGN) for i in intervals), initial=0)
    return {i.name: start for i, start in zip(intervals, starts, strict=False)}
