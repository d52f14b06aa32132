"""The lower bound of every placement: the largest sum of bytes live at one time (the *load*), and where that is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

from jaxarena._arena_types import round_up
from jaxarena.planner.problem import Interval, unit

__all__ = ["bound", "peak_time"]


def bound(intervals: Sequence[Interval]) -> int:
    """Bytes that no placement can go below: the peak load, each interval rounded up to the :func:`~jaxarena.planner.problem.unit`, or
    the end of a pinned interval that lies higher."""
    pinned = (i.offset + i.needed for i in intervals if i.offset is not None and i.needed)
    loads = _loads(intervals)
    return max(max(loads.values(), default=0), round_up(max(pinned, default=0), unit(intervals)))


def peak_time(intervals: Sequence[Interval]) -> int:
    """The first time at which the load is highest; 0 without intervals."""
    loads = _loads(intervals)
    return max(loads, key=lambda t: (loads[t], -t), default=0)


def _loads(intervals: Sequence[Interval]) -> dict[int, int]:
    """The load from each time at which it changes."""
    step = unit(intervals)
    change: defaultdict[int, int] = defaultdict(int)
    for interval in intervals:
        for start, stop, size in interval.spans:
            change[start] += round_up(size, step)
            change[stop] -= round_up(size, step)
    times = sorted(change)
    return dict(zip(times, accumulate(change[t] for t in times), strict=True))
