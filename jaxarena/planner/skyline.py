"""Lowest first: of all items the one that would come to rest lowest on what is placed goes there, then the next.

This leaves few holes, since what could go into one is asked before anything above it. Ties, of which there are many at the start, go
to the item beside which the most lives, then the longest, the largest. With *haste* an item beside which more lives may come before
others though it rests a little higher: at every level the busiest times are then behind by less.
"""

from __future__ import annotations

import numpy as np

from jaxarena.planner.items import Ints, Items, sections
from jaxarena.planner.piece import FAR

__all__ = ["HASTES", "skyline"]

HASTES = (0.0, 0.02, 0.05, 0.1)
"""How much higher an item may rest to come first, as a share of how much more lives beside it."""


def skyline(items: Items, haste: float = 0.0) -> Ints:
    """Offsets of the items, none of which may be pinned."""
    cuts = sections(items)
    load = np.zeros(len(items), np.int64)
    for i, begin, end in zip(items.span_item.tolist(), cuts.begin.tolist(), cuts.end.tolist(), strict=True):
        load[i] = max(load[i], cuts.load[begin:end].max())
    delay = ((load.max(initial=0) - load) * haste).astype(np.int64)
    by_rank = np.lexsort((np.arange(len(items)), -items.size, -items.duration, -load))
    rank = np.empty(len(items), np.int64)
    rank[by_rank] = np.arange(len(items))
    offsets = np.zeros(len(items), np.int64)
    rest = np.zeros(len(items), np.int64)
    # In the order of rank, so that of equals the first is found; FAR for what is placed.
    key = delay[by_rank]
    ranges = items.span_range.tolist()
    for _ in range(len(items)):
        at = int(key.argmin())
        item = int(by_rank[at])
        offsets[item], key[at] = rest[item], FAR
        for span in range(ranges[item], ranges[item + 1]):
            top = int(offsets[item] + items.span_size[span])
            together = (items.span_first < items.span_stop[span]) & (items.span_stop > items.span_first[span])
            beside = items.span_item[together]
            beside = beside[(rest[beside] < top) & (key[rank[beside]] < FAR)]
            rest[beside] = top if items.aligned else -(-top // items.align[beside]) * items.align[beside]
            key[rank[beside]] = rest[beside] + delay[beside]
    return offsets
