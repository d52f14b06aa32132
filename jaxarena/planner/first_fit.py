"""One after another, each where there is room: the cheap placements.

An order and a fit make a placement. Orders: by size (greedy by size, Pisarchyk and Lee, Efficient memory management for deep neural
net inference, 2020), by area, by duration, and by when an item starts or ends. Fits: the lowest room, or the tightest. No guarantee
beyond validity, within a few percent of the bound on most steps, and quick: for each item a pass in numpy over the spans placed before
it, which are kept sorted by offset.
"""

from __future__ import annotations

import numpy as np

from jaxarena.planner.items import FREE, Ints, Items

__all__ = ["ORDERS", "first_fit", "ordered"]

ORDERS = ("size", "area", "duration", "start", "end")
"""Largest, largest times longest, longest, earliest and latest first; ties go to the longer, larger, earlier."""


def ordered(items: Items, order: str) -> Ints:
    """The items' numbers in one of :data:`ORDERS`."""
    largest, longest, area = -items.size, -items.duration, -items.size * (items.stop - items.first)
    keys = {
        "size": (largest, longest),
        "area": (area, largest),
        "duration": (longest, largest),
        "start": (items.first, longest, largest),
        "end": (-items.stop, longest, largest),
    }[order]
    return np.lexsort((np.arange(len(items)), *reversed(keys)))


def first_fit(items: Items, order: Ints, placed: Ints, *, tightest: bool = False) -> Ints:
    """Offsets of all items: those ``placed`` (-1: not yet) and the pinned stay, the others go in one after another.

    Args:
      order: all items' numbers; those that have their place already are passed over.
      tightest: where there is least room to spare, instead of lowest.
    """
    offsets = np.where(items.pin == FREE, placed, items.pin)
    fixed = offsets != FREE
    n = len(items.span_item)
    rows = np.empty((4, n), np.int64)
    first, stop, base, top = rows
    spans = np.flatnonzero(fixed[items.span_item])
    spans = spans[np.argsort(offsets[items.span_item[spans]], kind="stable")]
    k = len(spans)
    low = offsets[items.span_item[spans]]
    rows[:, :k] = items.span_first[spans], items.span_stop[spans], low, low + items.span_size[spans]
    ranges, align = items.span_range.tolist(), items.align.tolist()
    span_first, span_stop, span_size = items.span_first.tolist(), items.span_stop.tolist(), items.span_size.tolist()
    for i in order.tolist():
        if fixed[i]:
            continue
        own = range(ranges[i], ranges[i + 1])
        # Of each span that one of ours meets: the offsets above which and below which we would overlap it.
        bars = []
        for s in own:
            beside = np.flatnonzero((first[:k] < span_stop[s]) & (stop[:k] > span_first[s]))
            bars.append((base[beside] - span_size[s], top[beside]))
        lows, highs = bars[0]
        if len(bars) > 1:
            lows, highs = (np.concatenate(side) for side in zip(*bars, strict=True))
            by_low = np.argsort(lows, kind="stable")
            lows, highs = lows[by_low], highs[by_low]
        offset = _room(lows, highs, align[i], tightest)
        offsets[i] = offset
        at = int(np.searchsorted(base[:k], offset))
        more = len(own)
        rows[:, at + more : k + more] = rows[:, at:k]
        for j, s in enumerate(own):
            rows[:, at + j] = span_first[s], span_stop[s], offset, offset + span_size[s]
        k += more
    return offsets


def _room(lows: Ints, highs: Ints, align: int, tightest: bool) -> int:
    """The lowest multiple of ``align`` outside all open intervals ``(lows, highs)``, sorted by low, or the one with least room above."""
    if not len(lows) or (lows[0] >= 0 and not tightest):
        return 0
    clear = np.maximum.accumulate(np.concatenate(([0], highs)))
    if align > 1:
        clear = -(-clear // align) * align
    spare = lows - clear[:-1]
    fits = np.flatnonzero(spare >= 0) if tightest else (spare >= 0).argmax().reshape(1)
    if not len(fits) or spare[fits[0]] < 0:
        return int(clear[-1])
    return int(clear[fits[spare[fits].argmin()]])
