"""From a form to its arena: arrays and scratch in one placement problem."""

from __future__ import annotations

from itertools import accumulate

from jaxarena._arena_types import ALIGN, Arena, Placed, PlacedScratch, round_up
from jaxarena.lifetime import Form, live_ranges, placeable
from jaxarena.planner.first_fit import first_fit
from jaxarena.planner.problem import Interval, Planner, height

__all__ = ["intervals_of", "place"]


def place(form: Form, *, reuse: bool = True, planner: Planner = first_fit) -> Arena:
    """Places the arrays that live within the step, and the launches' scratch.

    Placed is every home that :func:`jaxarena.lifetime.placeable` names, for as long as :func:`jaxarena.lifetime.live_ranges` says, and
    every scratch that is no counter, while its launch runs.

    Args:
      reuse: False gives every interval bytes of its own, to find out whether a wrong result comes from sharing them.
      planner: gives the offsets.

    Raises:
      ValueError: when the arena would have more than ``2**31 - 1`` rows.
    """
    arrays, scratch = intervals_of(form)
    intervals = [*arrays, *(interval for _, interval in scratch)]
    offsets = planner(intervals) if reuse else _stacked(intervals)
    counters = (sum(round_up(s.bytes, ALIGN) for s in launch.scratch if s.counter) for launch in form.launches)
    return Arena(
        placed=tuple(Placed(i.name, i.bytes, offsets[i.name], i.first, i.last) for i in arrays),
        scratch=tuple(PlacedScratch(tag, i.bytes, offsets[i.name], i.first) for tag, i in scratch),
        counters=max(counters, default=0),
        bytes=height(intervals, offsets),
    )


def intervals_of(form: Form) -> tuple[list[Interval], list[tuple[str, Interval]]]:
    """The form's placement problem: its arrays, and its scratch with the tags."""
    ranges = live_ranges(form)
    arrays = [Interval(name, form.parts[name].bytes, *ranges[name]) for name in placeable(form)]
    # "\0" keeps a scratch's name apart from every array's.
    asked = [(t, s) for t, launch in enumerate(form.launches) for s in launch.scratch if not s.counter]
    return arrays, [(s.tag, Interval(f"\0{t}\0{s.tag}", s.bytes, t, t)) for t, s in asked]


def _stacked(intervals: list[Interval]) -> dict[str, int]:
    starts = accumulate((i.aligned for i in intervals), initial=0)
    return {i.name: start for i, start in zip(intervals, starts, strict=False)}
