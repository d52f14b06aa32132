"""The placement problem in arrays: what every part of the planner works on.

Normalising does four things. Sizes and offsets are counted in the largest unit that all offsets are multiples of. Time is compressed
to the numbers of the points where something starts or ends. What needs no bytes is left out. The rest is sorted, so that the order in
which a caller lists the intervals changes nothing.

An interval whose need varies over its life is one **item** of several **spans**; of every other interval there is one span.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxarena.planner.problem import Interval, unit

__all__ = ["Bools", "Ints", "Items", "Sections", "normalise", "sections"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

FREE = -1
"""The pin of an item that has none."""


@dataclass(frozen=True, eq=False)
class Items:
    """Normalised intervals; all arrays have an element an item, or an element a span.

    Attributes:
      names: the items' names.
      unit: bytes of one unit of size and offset.
      size, first, stop: units, and the compressed times from which and before which an item lives.
      duration: how long it lives in the caller's time.
      align: units that the item's offset is a multiple of.
      pin: the offset it must have, or -1.
      span_item, span_first, span_stop, span_size: the spans, sorted by item, then time; those that need nothing are left out.
      times: the number of compressed times.
    """

    names: tuple[str, ...]
    unit: int
    size: Ints
    first: Ints
    stop: Ints
    duration: Ints
    align: Ints
    pin: Ints
    span_item: Ints
    span_first: Ints
    span_stop: Ints
    span_size: Ints
    times: int

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def single(self) -> bool:
        """Whether every item has one span."""
        return len(self.span_item) == len(self)

    @cached_property
    def aligned(self) -> bool:
        """Whether every sum of sizes is a valid offset."""
        return bool((self.align == 1).all())

    @cached_property
    def span_range(self) -> Ints:
        """[items + 1]: the spans of item i are those from element i to before element i + 1."""
        return np.searchsorted(self.span_item, np.arange(len(self) + 1))

    def subset(self, ids: Ints) -> Items:
        """The items ``ids`` alone, in that order, on the same times."""
        spans = _concatenated_ranges(self.span_range[ids], self.span_range[ids + 1])
        counts = self.span_range[ids + 1] - self.span_range[ids]
        own: dict[str, Any] = {name: getattr(self, name)[ids] for name in ("size", "first", "stop", "duration", "align", "pin")}
        own |= {name: getattr(self, name)[spans] for name in ("span_first", "span_stop", "span_size")}
        names = tuple(self.names[i] for i in ids)
        return Items(names=names, unit=self.unit, times=self.times, span_item=np.repeat(np.arange(len(ids)), counts), **own)


@dataclass(frozen=True, eq=False)
class Sections:
    """Stretches of time in which as many items as possible live together: every set of items that live together is within one.

    Attributes:
      at: [sections] a compressed time of each.
      begin, end: [spans] the sections a span covers.
      load: [sections] units live in each.
    """

    at: Ints
    begin: Ints
    end: Ints
    load: Ints


def normalise(intervals: Sequence[Interval]) -> Items:
    """The intervals that need bytes as :class:`Items`.

    Raises:
      ValueError: for a name used twice; for sizes past 2**59 bytes in sum.
    """
    if len({i.name for i in intervals}) < len(intervals):
        raise ValueError(f"solve: {len(intervals) - len({i.name for i in intervals})} interval names are used twice")
    if sum(i.bytes for i in intervals) + max((i.offset or 0 for i in intervals), default=0) >= 2**59:
        raise ValueError("solve: the intervals have 2**59 bytes or more in sum; fewer are supported")
    kept = [i for i in intervals if i.needed]
    kept.sort(key=lambda i: (*_needed_from_to(i), -i.bytes, i.name))
    step = unit(kept)
    spans = [(k, start, stop, -(-size // step)) for k, i in enumerate(kept) for start, stop, size in i.spans if size]
    span_item, span_first, span_stop, span_size = np.array(spans, np.int64).reshape(-1, 4).T
    align = np.array([i.alignment // step for i in kept], np.int64)
    pin = np.array([FREE if i.offset is None else i.offset // step for i in kept], np.int64)
    if (align == 1).all():
        # Offsets are then sums of sizes, above a pin or 0.
        common = math.gcd(*span_size.tolist(), *(p for p in pin.tolist() if p != FREE)) or 1
        span_size, step = span_size // common, step * common
        pin = np.where(pin == FREE, FREE, pin // common)
    duration = np.array([i.last - i.first + 1 for i in kept], np.int64)
    points = np.unique(np.concatenate([span_first, span_stop]))
    span_first, span_stop = np.searchsorted(points, span_first), np.searchsorted(points, span_stop)
    n = len(kept)
    size, first, stop = np.zeros(n, np.int64), np.full(n, len(points)), np.zeros(n, np.int64)
    np.maximum.at(size, span_item, span_size)
    np.minimum.at(first, span_item, span_first)
    np.maximum.at(stop, span_item, span_stop)
    names = tuple(i.name for i in kept)
    return Items(names, step, size, first, stop, duration, align, pin, span_item, span_first, span_stop, span_size, len(points))


def _needed_from_to(interval: Interval) -> tuple[int, int]:
    """When an interval first needs bytes, and, negated, until when: items stand in the order of the former (pieces are cut by it)."""
    spans = [(start, stop) for start, stop, size in interval.spans if size]
    return spans[0][0], -spans[-1][1]


def sections(items: Items) -> Sections:
    """The sections of the items.

    What lives at a time at which nothing starts lived before it too; so the last time at which something starts before something else
    ends, for each such end, is enough.
    """
    ends = np.unique(items.span_stop)
    starts = np.unique(items.span_first)
    before = np.searchsorted(ends, starts, side="right")
    at = starts[np.append(before[1:] != before[:-1], True)] if len(starts) else starts
    begin, end = np.searchsorted(at, items.span_first), np.searchsorted(at, items.span_stop)
    change = np.zeros(len(at) + 1, np.int64)
    np.add.at(change, begin, items.span_size)
    np.add.at(change, end, -items.span_size)
    return Sections(at, begin, end, np.cumsum(change)[:-1])


def _concatenated_ranges(start: Ints, stop: Ints) -> Ints:
    """``start[0] ... stop[0] - 1, start[1] ... stop[1] - 1, ...``."""
    counts = stop - start
    skipped = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(start - skipped, counts)
