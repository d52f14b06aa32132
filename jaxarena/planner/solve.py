"""From intervals to offsets: cheap placements, a search around the peak, a search of everything, in the order of what they cost.

1. Largest first, then the other cheap placements of :mod:`~jaxarena.planner.skyline` and :mod:`~jaxarena.planner.first_fit`, until one
   meets the bound.
2. *Around the peak*: a search places what lives when nearly as much is live as ever is, in exactly the bound; the rest goes round it
   by first fit. For many arrays this comes before the other cheap placements, being quicker there, and most of those are left out.
3. The search of :mod:`jaxarena.planner.search` decides whether everything fits in exactly the bound, which is far more often quick
   than to improve a placement step by step. It is restarted over a few orders, with limits on its nodes and detours that grow; what
   lives in the sections in which an order failed often comes first when it is tried again.
4. Between the bound and the best placement, bisection. Where the search proves that a size is not enough, the bound rises.

The budget counts nodes of the search, never seconds, so that every host computes the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from jaxarena.planner.bound import bound, peak_time
from jaxarena.planner.first_fit import ORDERS, first_fit, ordered
from jaxarena.planner.items import FREE, Ints, Items, normalise, sections
from jaxarena.planner.piece import FAR, reaches
from jaxarena.planner.problem import Interval
from jaxarena.planner.search import decide
from jaxarena.planner.skyline import HASTES, skyline

__all__ = ["NODES", "Solution", "needs", "solve"]

NODES = 200_000
"""The search's budget when none is given: some 20 seconds of a hard instance."""

FEW = 1000
"""Up to so many items all cheap placements together take a fraction of a second."""

MOST = 2000
"""Items that the search takes on at once: its tables grow with their square."""

FITS = tuple(product(ORDERS, (False, True)))
"""Orders, and whether the tightest room is taken: the placements by first fit."""

SHARES = (0.95, 0.9, 0.8)
"""Around the peak: the sections where at least this share of the bound lives."""

SCHEDULE = (("lds", None), ("as", None), ("lps", 3), ("c", 3), ("ps", None), ("las", 3), ("ds", 5), ("lds", 2))
"""Orders and detours of one round of restarts."""

FIRST_LIMIT = 300
"""Nodes of each search of the first round."""

GROWTH = 1.25
"""What the limit grows by from round to round."""


@dataclass(frozen=True)
class Solution:
    """A placement and what is known about it.

    Attributes:
      offsets: bytes, by name.
      peak: bytes that the placement spans.
      bound: bytes that no placement can go below, as far as is known.
      nodes: nodes of the search that it took.
      verdict: ``optimal``, ``within 1.23 % of the bound``, or ``cannot fit: ...`` where the capacity that was asked for is below the bound.
    """

    offsets: dict[str, int]
    peak: int
    bound: int
    nodes: int
    verdict: str


def solve(intervals: Sequence[Interval], *, nodes: int = NODES, capacity: int | None = None) -> Solution:
    """Places the intervals in as few bytes as the budget finds. The order in which they are listed changes nothing.

    Args:
      nodes: the search's budget.
      capacity: bytes that are good enough: the first placement that fits is taken. None asks for the lowest.

    Raises:
      ValueError: for a negative budget, a name used twice, 2**59 bytes or more in sum, pinned intervals that overlap.
    """
    if nodes < 0:
        raise ValueError(f"solve: nodes must be at least 0, got {nodes}")
    items = normalise(intervals)
    _check_pins(items)
    load = bound(intervals)
    enough = load if capacity is None else max(capacity, load)
    planner = _Planner(items, -(-load // items.unit), enough // items.unit, nodes, stops=capacity is not None)
    planner.run()
    offsets = {i.name: i.offset or 0 for i in intervals}
    offsets |= {name: int(offset) * items.unit for name, offset in zip(items.names, planner.best, strict=True)}
    peak, lower = planner.height * items.unit, max(load, planner.lower * items.unit)
    return Solution(offsets, peak, lower, planner.nodes, _verdict(intervals, peak, lower, capacity))


def needs(intervals: Sequence[Interval], most: int = 5) -> str:
    """Says when the most bytes live, how many, and which are the largest: ``4096 bytes live at time 3: a (3072), b (1024)``."""
    time = peak_time(intervals)
    live = sorted(((i.name, size) for i in intervals for a, b, size in i.spans if a <= time < b), key=lambda found: (-found[1], found[0]))
    rest = f" and {len(live) - most} more" if len(live) > most else ""
    names = ", ".join(f"{name} ({size})" for name, size in live[:most])
    return f"{sum(size for _, size in live)} bytes live at time {time}: {names}{rest}"


def _verdict(intervals: Sequence[Interval], peak: int, lower: int, capacity: int | None) -> str:
    if capacity is not None and lower > capacity:
        return f"cannot fit in {capacity} bytes: {needs(intervals)}"
    return "optimal" if peak == lower else f"within {100 * (peak / lower - 1):.2f} % of the bound"


def _check_pins(items: Items) -> None:
    pinned = items.subset(np.flatnonzero(items.pin != FREE))
    base = pinned.pin[pinned.span_item]
    for k, (i, first, stop, size) in enumerate(
        zip(pinned.span_item, pinned.span_first, pinned.span_stop, pinned.span_size, strict=True)
    ):
        together = (pinned.span_first < stop) & (first < pinned.span_stop) & (base < base[k] + size) & (base[k] < base + pinned.span_size)
        for other in pinned.span_item[together & (pinned.span_item != i)]:
            raise ValueError(f"solve: {pinned.names[i]!r} and {pinned.names[other]!r} are pinned to bytes they share at one time")


class _Planner:
    """One call of :func:`solve`, in units. ``stops``: whether a placement in what is ``enough`` is all that is asked for."""

    def __init__(self, items: Items, lower: int, enough: int, budget: int, *, stops: bool):
        self.items, self.lower, self.enough, self.budget, self.stops = items, lower, enough, budget, stops
        self.nodes = 0
        self.best = np.zeros(len(items), np.int64)
        self.height = FAR if len(items) else 0  # until the first placement is offered

    @property
    def done(self) -> bool:
        return self.height <= max(self.enough, self.lower)

    def offer(self, offsets: Ints) -> None:
        height = int((offsets + self.items.size).max())
        if height < self.height:
            self.best, self.height = offsets, height

    def run(self) -> None:
        for offsets in self.placements():
            self.offer(offsets)
            if self.done:
                return
        if len(self.items) <= MOST:
            self.search()

    def placements(self) -> Iterator[Ints]:
        """Cheap ones, and those around the peak."""
        if not len(self.items):
            return
        unplaced = np.full(len(self.items), FREE)
        yield first_fit(self.items, ordered(self.items, "size"), unplaced)
        few = len(self.items) <= FEW
        if not few:
            yield from self.around_the_peak()
        if (self.items.pin == FREE).all():
            yield from (skyline(self.items, haste) for haste in HASTES)
        for order, tightest in FITS[1:] if few else FITS[2:4]:
            yield first_fit(self.items, ordered(self.items, order), unplaced, tightest=tightest)
        if few:
            yield from self.around_the_peak()

    def around_the_peak(self) -> Iterator[Ints]:
        items = self.items
        cuts = sections(items)
        before = 0
        for share in SHARES:
            hot = np.concatenate(([0], np.cumsum(cuts.load >= share * self.lower)))
            touched = items.span_item[hot[cuts.end] > hot[cuts.begin]]
            core = np.unique(np.concatenate((touched, np.flatnonzero(items.pin != FREE))))
            if not before < len(core) <= MOST or len(core) == len(items):
                continue
            before = len(core)
            part = items.subset(core)
            reach = reaches(part)
            for order in ("lds", "las"):
                limit = min(2 * len(core) + 500, self.budget - self.nodes)
                found = decide(part, reach, self.enough, order, np.zeros(items.times, np.int64), limit)
                self.nodes += found.nodes
                if found.fits is False:
                    self.lower = max(self.lower, self.enough + 1)
                    return
                if found.fits:
                    placed = np.full(len(items), FREE)
                    placed[core] = found.offsets
                    for fill in ("size", "area"):
                        yield first_fit(items, ordered(items, fill), placed)

    def search(self) -> None:
        """Decides at what is enough, with a quarter of the budget, then bisects, each time with a sixth of what is left."""
        restarts = _Restarts(self.items)
        low = target = max(self.enough, self.lower)
        share = self.budget - self.nodes if self.stops else (self.budget - self.nodes) // 4
        while target < self.height and self.nodes < self.budget:
            fits, offsets, nodes = restarts.fit(target, min(share, self.budget - self.nodes))
            self.nodes += nodes
            if fits:
                self.offer(offsets)
            else:
                low = target
                if fits is False:
                    self.lower = max(self.lower, target + 1)
            if self.done:
                return
            if self.height - low > 1:
                target, share = (low + self.height) // 2, (self.budget - self.nodes) // 6 + 1
            else:
                # Each size below has been given up on: a little less, with all that is left.
                target, share = self.height - 1 - (self.height - self.lower) // 16, self.budget - self.nodes


class _Restarts:
    """The search, time after time, with what its failures taught."""

    def __init__(self, items: Items):
        self.items = items
        self.reach = reaches(items)
        self.weights = {turn: np.zeros(items.times, np.int64) for turn in SCHEDULE}

    def fit(self, capacity: int, nodes: int) -> tuple[bool | None, Ints, int]:
        """Whether the items fit, the placement if so, and the nodes it took, at most ``nodes``."""
        used, limit = 0, float(FIRST_LIMIT)
        while True:
            for turn in SCHEDULE:
                order, detours = turn
                weights = self.weights[turn]
                found = decide(self.items, self.reach, capacity, order, weights, min(int(limit), nodes - used), detours)
                used += found.nodes
                if found.fits is not None or used >= nodes:
                    return found.fits, found.offsets, used
                self.weights[turn] = weights * 4 // 5 + found.failures * 1000 // max(int(found.failures.max()), 1)
            limit *= GROWTH
