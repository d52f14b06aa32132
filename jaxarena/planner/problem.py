"""The placement problem: intervals of time with a size, to be given offsets so that no two that share a time share a byte.

This is the dynamic storage allocation problem, NP-hard in the strong sense (Garey and Johnson, Computers and Intractability, 1979,
problem SR2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxarena._arena_types import ALIGN, round_up

__all__ = ["Interval", "Planner", "height"]


@dataclass(frozen=True)
class Interval:
    """``bytes`` that must keep one place from launch ``first`` to launch ``last``, both included.

    Raises:
      ValueError: for negative bytes or a last before the first.
    """

    name: str
    bytes: int
    first: int
    last: int

    def __post_init__(self) -> None:
        if self.bytes < 0 or self.last < self.first:
            raise ValueError(f"Interval {self.name!r}: needs bytes >= 0 and first <= last, got {self.bytes}, {self.first}, {self.last}")

    @property
    def aligned(self) -> int:
        """Its bytes, rounded up to ALIGN."""
        return round_up(self.bytes, ALIGN)


class Planner(Protocol):
    """Offsets by name: multiples of ALIGN, no two intervals that share a launch sharing a byte."""

    def __call__(self, intervals: Sequence[Interval], /) -> dict[str, int]: ...


def height(intervals: Sequence[Interval], offsets: Mapping[str, int]) -> int:
    """Bytes that a placement spans, a multiple of ALIGN."""
    return max((offsets[i.name] + i.aligned for i in intervals), default=0)
