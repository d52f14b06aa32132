"""The lower bound of every placement: the largest sum of bytes live at one launch (the *load*)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate

from jaxarena.planner.problem import Interval

__all__ = ["bound"]


def bound(intervals: Iterable[Interval]) -> int:
    """Bytes that no placement of ``intervals`` can go below, each rounded up to ALIGN."""
    change: defaultdict[int, int] = defaultdict(int)
    for interval in intervals:
        change[interval.first] += interval.aligned
        change[interval.last + 1] -= interval.aligned
    return max(accumulate(change[t] for t in sorted(change)), default=0)
