"""Does it fit in this many bytes? A tree search that decides it, or gives up after so many nodes.

**Canonical placements.** Let a placement fit. Push everything down as far as it goes: now each item that is not pinned rests on offset 0
or on another. List the items by offset. So it is enough to try lists in which each next item comes to rest on those before it, nowhere
lower than the one before it. (This order, the sections and the decomposition are also those of MiniMalloc, Moffitt, ASPLOS 2023.)

**A node.** Each item has an offset at which it would come to *rest* on what is placed. Of the items that are *open*, take one whose rest
is lowest, ties by an order chosen beforehand. First it is placed there. If that fails it has to *wait*: it goes nowhere until its rest
has risen, as something is placed under it. Twins that rest equally low wait together.

**Floors.** The floor of an open item is its rest. An item that waits gets placed only after some other, an *intruder*, was placed that
reaches into where the item would have come to rest; so it will rest on one of these, and its floor is the lowest of their tops. Without
intruders the wait was in vain. If nothing can intrude on an open item, letting it wait is not even tried.

**Sections.** What is still to be placed in a section lies above the lowest floor there, and needs the sum of its sizes. If that goes
over the capacity, the node fails, and the section's count of *failures* goes up.

**Decomposition.** Where no unplaced item lives on both sides of a point of time, the two sides are pieces of their own. When one of them
fails there is no use in another solution of its siblings: the search returns to before the cut.

**Detours.** An item that waits although placing it did not fail at once is a detour from what the order advises. A search may be limited
to so many detours on the way to a placement (limited discrepancy search, Harvey and Ginsberg, IJCAI 1995): orders are mostly right.

**Pins.** A pinned item's rest and floor are its pin, and it never waits. An item that would come to rest across a pin which is still to
be placed waits at once.

What happens depends on the arguments alone: no clock, no random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxarena.planner.items import FREE, Bools, Ints, Items
from jaxarena.planner.piece import FAR, Piece, groups, make_piece

__all__ = ["Outcome", "decide"]

SHRUNK = 0.6
"""When no more than this share of a piece's items is unplaced, their tables are made anew, shorter."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a search found.

    Attributes:
      fits: True, False, or None when the nodes ran out first.
      offsets: [items] the placement, where it fits.
      nodes: how many were taken.
      failures: [times] how often the section at a time failed.
    """

    fits: bool | None
    offsets: Ints
    nodes: int
    failures: Ints


class _State(NamedTuple):
    """Of a piece's items where each would come to rest, the lowest it can still go (both FAR for placed ones), and whether it is open; of
    its sections the capacity less what is still to be placed."""

    rest: Ints
    floor: Ints
    open: Bools
    room: Ints


class _Cut(NamedTuple):
    """How many choices there were before a piece was begun, and before it was cut from its parent's."""

    begun: int
    made: int
    parent: _Cut | None


class _Task(NamedTuple):
    """A piece that is still to be placed, and what comes after it."""

    piece: Piece
    state: _State
    made: int
    parent: _Cut
    then: _Task | None


class _Choice(NamedTuple):
    """An item was placed in this state, at this node, after so many detours; what is left to try is to let it wait."""

    piece: Piece
    state: _State
    cut: _Cut
    then: _Task | None
    item: int
    node: int
    detours: int


def decide(
    items: Items, reach: Ints, capacity: int, order: str, weights: Ints, nodes: int, detours: int | None = None
) -> Outcome:
    """Looks for a placement of the items in ``capacity`` units, in no more than ``nodes`` nodes, with any number of detours or a limit.

    ``reach`` is :func:`~jaxarena.planner.piece.reaches` of the items; for ``order`` and ``weights`` see
    :func:`~jaxarena.planner.piece.make_piece`.
    """
    search = _Search(items, reach, capacity, order, weights, detours)
    fits = search.run(nodes)
    return Outcome(fits, search.offsets, search.nodes, search.failures)


class _Search:
    def __init__(self, items: Items, reach: Ints, capacity: int, order: str, weights: Ints, detours: int | None):
        self.items, self.reach, self.capacity, self.order, self.weights = items, reach, capacity, order, weights
        self.most_detours = detours
        self.detours = 0
        self.left_out = False
        self.offsets = np.full(len(items), FREE)
        self.failures = np.zeros(items.times, np.int64)
        self.nodes = 0
        self.pieces: dict[bytes, Piece] = {}
        self.choices: list[_Choice] = []
        # Where the search is: the piece it places (None: it takes up the next task), its state and its cut, and the tasks that follow.
        self.piece: Piece | None = None
        self.state: _State
        self.cut = _Cut(0, 0, None)
        self.then: _Task | None = None

    def run(self, limit: int) -> bool | None:
        rest = np.where(self.items.pin == FREE, 0, self.items.pin)
        self.divide(np.arange(len(rest)), rest, rest, np.ones(len(rest), bool))
        task = self.then
        while task is not None:
            if not self.sections_hold(task.piece, task.state.floor, task.state.room):
                return False
            task = task.then
        while self.piece is not None or self.then is not None:
            if self.nodes >= limit:
                return None
            self.nodes += 1
            piece = self.take_up() if self.piece is None else self.piece
            if not self.descend(piece, self.state) and not self.retreat():
                return None if self.left_out else False
        return True

    def divide(self, ids: Ints, rest: Ints, floor: Ints, open: Bools) -> None:
        """Cuts what is unplaced of the items ``ids`` where time splits, and puts the parts before all else that is to be done."""
        left = rest < FAR
        ids, rest, floor, open = ids[left], rest[left], floor[left], open[left]
        # The smallest comes first: it fails soonest.
        for group in sorted(groups(self.items, ids), key=len, reverse=True):
            key = group.tobytes()
            if key not in self.pieces:
                self.pieces[key] = make_piece(self.items, group, self.reach, self.capacity, self.order, self.weights)
            piece = self.pieces[key]
            at = np.searchsorted(ids, group)
            self.then = _Task(piece, _State(rest[at], floor[at], open[at], piece.room), len(self.choices), self.cut, self.then)
        self.piece = None

    def take_up(self) -> Piece:
        assert self.then is not None
        self.piece, self.state, made, parent, self.then = self.then
        self.cut = _Cut(len(self.choices), made, parent)
        return self.piece

    def descend(self, piece: Piece, state: _State) -> bool:
        """Places the next item of the piece, or lets it wait where it must; False when neither leads to a placement."""
        candidates = np.where(state.open, state.rest, FAR)
        level = int(candidates.min())
        # An item that waits below the level has no intruders left.
        if level == FAR or int((state.rest + piece.size).min()) <= level:
            return False
        lowest = np.flatnonzero(candidates == level)
        item = int(lowest[piece.rank[lowest].argmin()])
        choice = _Choice(piece, state, self.cut, self.then, item, self.nodes, self.detours)
        nearest = state.floor - piece.reach[item]
        if piece.pinned and piece.pin[item] == FREE and bool(((piece.pin != FREE) & (nearest < level)).any()):
            return self.wait(choice)
        if int(nearest.min()) < level and piece.pin[item] == FREE:
            self.choices.append(choice)
        return self.place(piece, state, item, level)

    def place(self, piece: Piece, state: _State, item: int, level: int) -> bool:
        self.offsets[piece.ids[item]] = level
        rest = np.maximum(state.rest, piece.reach[item] + level)
        if not piece.aligned:
            rest = np.where(state.rest < FAR, -(-rest // piece.align) * piece.align, FAR)
        open = state.open | (rest > state.rest)
        open[item], rest[item] = False, FAR
        floor = np.maximum(state.floor, rest)
        np.maximum(floor, level, out=floor)
        waiting = np.flatnonzero(~open & (rest < FAR))
        if len(waiting):
            intrude = floor - piece.reach[waiting] < rest[waiting, None]
            tops = np.where(intrude, floor + piece.reached[waiting], FAR).min(1)
            if int(tops.max()) >= FAR:
                return False
            floor[waiting] = np.maximum(floor[waiting], tops)
        room = state.room.copy()
        for begin, end, size in piece.spans[item]:
            room[begin:end] += size
        if not self.sections_hold(piece, floor, room):
            return False
        self.state = _State(rest, floor, open, room)
        left = np.flatnonzero(rest < FAR)
        reached = np.maximum.accumulate(piece.end[left])
        if len(left) <= SHRUNK * len(rest) or bool((piece.begin[left[1:]] >= reached[:-1]).any()):
            self.divide(piece.ids, rest, floor, open)
        return True

    def wait(self, choice: _Choice) -> bool:
        """Lets an item wait, with its twins; False when that leads to no placement."""
        piece, state, self.cut, self.then, item, *_ = choice
        level = state.rest[item]
        twins = (piece.twin == piece.twin[item]) & state.open & (state.rest == level)
        intrude = (state.floor - piece.reach[item] < level) & ~twins
        lowest = int(np.where(intrude, state.floor + piece.reached[item], FAR).min())
        if lowest >= FAR:
            return False
        floor = np.where(twins, np.maximum(state.floor, lowest), state.floor)
        self.piece, self.state = piece, state._replace(floor=floor, open=state.open & ~twins)
        return self.sections_hold(piece, floor, state.room)

    def sections_hold(self, piece: Piece, floor: Ints, room: Ints) -> bool:
        """Whether what is still to be placed in each section can lie above the lowest floor there."""
        floors = np.minimum.reduceat(floor[piece.member], piece.start)
        failed = (floors > room) & (floors < FAR)
        if not failed.any():
            return True
        self.failures[piece.at[failed]] += 1
        return False

    def retreat(self) -> bool:
        """Goes back to the last choice whose other side may lead to a placement; False when there is none."""
        while True:
            while len(self.choices) <= self.cut.begun:
                if self.cut.parent is None:
                    return False
                del self.choices[self.cut.made :]
                self.cut = self.cut.parent
            choice = self.choices.pop()
            self.detours = choice.detours + (self.nodes > choice.node + 1)
            if self.most_detours is not None and self.detours > self.most_detours:
                self.cut, self.left_out = choice.cut, True
            elif self.wait(choice):
                return True
