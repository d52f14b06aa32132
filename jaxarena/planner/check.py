"""Whether offsets are right, found out by a sweep that knows nothing of how they were made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from jaxarena.planner.problem import Interval

__all__ = ["faults"]


def faults(intervals: Sequence[Interval], offsets: Mapping[str, int]) -> list[str]:
    """What is wrong with a placement, in words; empty when it is right.

    Looked for are intervals without an offset, offsets below 0, misaligned or not where they are pinned, and two intervals that share a
    byte at one time: at each time at which a need changes, all that live then are sorted by offset, and no two next to each other overlap.
    """
    found = []
    placed = []
    for interval in intervals:
        if interval.name not in offsets:
            found.append(f"{interval.name!r} has no offset")
            continue
        offset = offsets[interval.name]
        if offset < 0 or offset % interval.alignment:
            found.append(f"{interval.name!r} is at {offset}, no multiple of {interval.alignment} from 0 up")
        if interval.offset is not None and offset != interval.offset:
            found.append(f"{interval.name!r} is at {offset}, pinned to {interval.offset}")
        placed.append((interval, offset))
    changes: defaultdict[int, tuple[list[tuple[int, int, str]], list[tuple[int, int, str]]]] = defaultdict(lambda: ([], []))
    for interval, offset in placed:
        for start, stop, size in interval.spans:
            if size:
                span = offset, offset + size, interval.name
                changes[start][0].append(span)
                changes[stop][1].append(span)
    live: set[tuple[int, int, str]] = set()
    for time in sorted(changes):
        begins, ends = changes[time]
        live -= set(ends)
        live |= set(begins)
        if not begins:
            continue
        top, below = 0, ""
        for base, end, name in sorted(live):
            if base < top:
                found.append(f"{below!r} and {name!r} share bytes {base} to {min(top, end)} at time {time}")
            if end > top:
                top, below = end, name
    return found
