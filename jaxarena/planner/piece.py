"""A piece: items that the search places on their own, with what does not change while it does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxarena.planner.items import FREE, Ints, Items, sections

__all__ = ["FAR", "Piece", "groups", "make_piece", "reaches"]

FAR = 1 << 60
"""Beyond every offset; ``-FAR`` is below every one, also with an offset added."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Tables over the piece's items, numbered within it by when they start, and over its sections.

    Attributes:
      ids: the items' numbers in the problem.
      size, align, pin: as in :class:`~jaxarena.planner.items.Items`; ``aligned`` too, and ``pinned`` tells whether any item is.
      reach: [items, items] how far above the base of item i the base of item j lies at least, if it lies above: the most that i needs
        while j needs something; ``-FAR`` where there is no such time. ``reached`` is its transpose.
      rank: the order in which items that could go equally low are tried.
      twin: equal for items that could change places: alike in size, sections and alignment, and free.
      begin, end: the sections an item covers; ``spans``: the same for each of its spans, with the span's size.
      member: the items of each section, section after section, those of a section from element ``start`` on.
      at: [sections] a time of each.
      room: [sections] the capacity less all that lives there.
    """

    ids: Ints
    size: Ints
    align: Ints
    pin: Ints
    aligned: bool
    pinned: bool
    reach: Ints
    reached: Ints
    rank: Ints
    twin: Ints
    begin: Ints
    end: Ints
    spans: tuple[tuple[tuple[int, int, int], ...], ...]
    member: Ints
    start: Ints
    at: Ints
    room: Ints


def make_piece(items: Items, ids: Ints, reach: Ints, capacity: int, order: str, weights: Ints) -> Piece:
    """The piece of the items ``ids``.

    Args:
      reach: :func:`reaches` of all items.
      order: what decides which of the items that could go equally low is tried first, the first letter deciding first: the largest
        load beside an item (``l``), the loads of its sections in sum (``c``), its area (``a``), duration (``d``), the points in it at
        which something starts or ends (``p``), its size (``s``).
      weights: [times] what decides before all of these: the largest in an item's sections.
    """
    part = items.subset(ids)
    cuts = sections(part)
    n = len(part)
    spans: list[list[tuple[int, int, int]]] = [[] for _ in range(n)]
    inside = np.zeros((n, len(cuts.at)), bool)
    for i, a, b, size in zip(part.span_item.tolist(), cuts.begin.tolist(), cuts.end.tolist(), part.span_size.tolist(), strict=True):
        spans[i].append((a, b, size))
        inside[i, a:b] = True
    section, member = np.nonzero(inside.T)
    load = np.where(inside, cuts.load, 0)
    keys = {
        "l": load.max(1),
        "a": (part.stop - part.first) * part.size,
        "d": part.duration,
        "p": part.stop - part.first,
        "c": load.sum(1),
        "s": part.size,
    }
    weight = np.where(inside, weights[cuts.at], 0).max(1)
    rank = np.empty(n, np.int64)
    rank[np.lexsort((np.arange(n), *(-keys[letter] for letter in reversed(order)), -weight))] = np.arange(n)
    own = reach[np.ix_(ids, ids)]
    return Piece(
        ids=ids,
        size=part.size,
        align=part.align,
        pin=part.pin,
        aligned=part.aligned,
        pinned=bool((part.pin != FREE).any()),
        reach=own,
        reached=np.ascontiguousarray(own.T),
        rank=rank,
        twin=_twins(part, spans),
        begin=np.array([found[0][0] for found in spans]),
        end=np.array([found[-1][1] for found in spans]),
        spans=tuple(map(tuple, spans)),
        member=member,
        start=np.searchsorted(section, np.arange(len(cuts.at))),
        at=cuts.at,
        room=capacity - cuts.load,
    )


def reaches(items: Items) -> Ints:
    """[items, items] the table :attr:`Piece.reach` of all items."""
    n = len(items)
    if items.single:
        beside = (items.first[:, None] < items.stop) & (items.first < items.stop[:, None])
        reach = np.where(beside, items.size[:, None], -FAR)
    else:
        reach = np.full((n, n), -FAR)
        for i, first, stop, size in zip(items.span_item, items.span_first, items.span_stop, items.span_size, strict=True):
            beside = items.span_item[(items.span_first < stop) & (first < items.span_stop)]
            reach[i, beside] = np.maximum(reach[i, beside], size)
    np.fill_diagonal(reach, -FAR)
    return reach


def groups(items: Items, ids: Ints) -> list[Ints]:
    """The items ``ids``, ascending, cut where time splits between them."""
    if not len(ids):
        return []
    reached = np.maximum.accumulate(items.stop[ids])
    return np.split(ids, np.flatnonzero(items.first[ids][1:] >= reached[:-1]) + 1)


def _twins(part: Items, spans: list[list[tuple[int, int, int]]]) -> Ints:
    """Equal numbers for twins."""
    seen: dict[object, int] = {}
    aligns, pins = part.align.tolist(), part.pin.tolist()
    return np.array([seen.setdefault((*spans[i], aligns[i]) if pins[i] == FREE else i, i) for i in range(len(part))])
