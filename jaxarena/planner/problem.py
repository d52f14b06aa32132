"""The placement problem: intervals of time with a size, to be given offsets so that no two that share a time share a byte.

This is the dynamic storage allocation problem, NP-hard in the strong sense (Garey and Johnson, Computers and Intractability, 1979,
problem SR2). An interval may be pinned to an offset, and may need less than its bytes in parts of its life: always the first so
many, so that what it does not need then lies at its top.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from jaxarena._arena_types import ALIGN, round_up

__all__ = ["Interval", "height", "unit"]


@dataclass(frozen=True)
class Interval:
    """``bytes`` that must keep one place from time ``first`` to time ``last``, both included.

    Attributes:
      alignment: its offset is a multiple of this many bytes.
      offset: where it must lie; None leaves that to the planner.
      profile: pairs of a time and how many of its first bytes are needed from then on, until the next pair's time; from ``first``
        on where empty.

    Raises:
      ValueError: for negative bytes, a last before the first, an alignment below 1, an offset that is negative or misaligned, a
        profile that does not start at ``first``, goes back in time, past ``last``, or asks for more than ``bytes``.
    """

    name: str
    bytes: int
    first: int
    last: int
    alignment: int = ALIGN
    offset: int | None = None
    profile: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.bytes < 0 or self.last < self.first:
            raise ValueError(f"Interval {self.name!r}: needs bytes >= 0 and first <= last, got {self.bytes}, {self.first}, {self.last}")
        if self.alignment < 1:
            raise ValueError(f"Interval {self.name!r}: alignment must be at least 1, got {self.alignment}")
        if self.offset is not None and (self.offset < 0 or self.offset % self.alignment):
            raise ValueError(f"Interval {self.name!r}: offset must be a multiple of {self.alignment} from 0 up, got {self.offset}")
        if self.profile:
            times = [t for t, _ in self.profile]
            rises = all(a < b for a, b in pairwise(times))
            if times[0] != self.first or not rises or times[-1] > self.last:
                raise ValueError(f"Interval {self.name!r}: profile must rise from time {self.first} to at most {self.last}, got {times}")
            if any(not 0 <= size <= self.bytes for _, size in self.profile):
                raise ValueError(f"Interval {self.name!r}: profile must ask for 0 to {self.bytes} bytes, got {self.profile}")

    @property
    def spans(self) -> tuple[tuple[int, int, int], ...]:
        """First time, the time after the last, and the bytes needed between: one triple a piece of its life."""
        steps = self.profile or ((self.first, self.bytes),)
        stops = [*(t for t, _ in steps[1:]), self.last + 1]
        return tuple((start, stop, size) for (start, size), stop in zip(steps, stops, strict=True))

    @property
    def needed(self) -> int:
        """The most bytes that it needs at any time. What needs none takes no part in a placement."""
        return max(size for *_, size in self.spans)


def unit(intervals: Iterable[Interval]) -> int:
    """Bytes that all alignments (of what needs bytes) are multiples of: offsets are, and sizes may be rounded up to, multiples of it."""
    return math.gcd(*(i.alignment for i in intervals if i.needed)) or 1


def height(intervals: Iterable[Interval], offsets: Mapping[str, int]) -> int:
    """Bytes that a placement spans, a multiple of the intervals' :func:`unit`."""
    intervals = list(intervals)
    return round_up(max((offsets[i.name] + i.needed for i in intervals if i.needed), default=0), unit(intervals))
