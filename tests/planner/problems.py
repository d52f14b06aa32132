"""Placement problems for tests: strategies, instances, and an oracle that tries everything."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from jaxarena.planner import Interval, minimalloc

PLACEMENT = Path(__file__).parents[2] / "benchmarks" / "placement"

MINIMALLOC = tuple("ABCDEFGHIJK")
GRAPHS = ("G_1", "resnet50", "pangu_2.6B")


def instance(name: str) -> list[Interval]:
    """One of minimalloc's instances by its letter, or a graph by its name."""
    return minimalloc.read(PLACEMENT / ("minimalloc" if name in MINIMALLOC else "graphs") / file_name(name))


def file_name(name: str) -> str:
    return f"{name}.1048576.csv" if name in MINIMALLOC else f"{name}.csv"


@st.composite
def intervals(draw, most=30, sizes=40, times=15, alignments: Sequence[int] = (1,), pins=False, profiles=False):
    """Intervals; with ``pins`` some are pinned where no other pinned one lives, with ``profiles`` the need of some varies."""
    found: list[Interval] = []
    for k in range(draw(st.integers(0, most))):
        first = draw(st.integers(0, times))
        last = draw(st.integers(first, times))
        size = draw(st.integers(0, sizes))
        profile: tuple[tuple[int, int], ...] = ()
        if profiles and draw(st.booleans()):
            turns = sorted(draw(st.sets(st.integers(first + 1, last), max_size=2))) if first < last else []
            profile = tuple((t, draw(st.integers(0, size))) for t in (first, *turns))
        alignment = draw(st.sampled_from(alignments))
        offset = draw(st.integers(0, sizes)) * alignment if pins and draw(st.integers(0, 3)) == 0 else None
        interval = Interval(f"i{k}", size, first, last, alignment, offset, profile)
        if offset is None or all(other.offset is None or apart(interval, other, offset, other.offset) for other in found):
            found.append(interval)
    return found


def apart(a: Interval, b: Interval, a_offset: int, b_offset: int) -> bool:
    """Whether two intervals at these offsets share no byte at any time; by looking at each time."""
    for time in range(max(a.first, b.first), min(a.last, b.last) + 1):
        need, other = need_at(a, time), need_at(b, time)
        if need and other and a_offset < b_offset + other and b_offset < a_offset + need:
            return False
    return True


def need_at(interval: Interval, time: int) -> int:
    """The bytes an interval needs at a time."""
    if not interval.first <= time <= interval.last:
        return 0
    need = interval.bytes
    for start, size in interval.profile:
        if start <= time:
            need = size
    return need


def least_peak(intervals: Sequence[Interval]) -> int:
    """The lowest peak of any placement of what needs bytes, rounded up to the gcd of the alignments: every offset is tried."""
    needy = [i for i in intervals if any(need_at(i, t) for t in range(i.first, i.last + 1))]
    step = math.gcd(*(i.alignment for i in needy)) if needy else 1
    peak = 0
    while not _fits(needy, peak, {}):
        peak += step
    return peak


def _fits(left: list[Interval], peak: int, offsets: dict[Interval, int]) -> bool:
    if not left:
        return True
    interval, *rest = left
    for offset in range(0, peak - max(need_at(interval, t) for t in range(interval.first, interval.last + 1)) + 1, interval.alignment):
        clear = all(apart(interval, other, offset, at) for other, at in offsets.items())
        if interval.offset in (None, offset) and clear and _fits(rest, peak, {**offsets, interval: offset}):
            return True
    return False


def random_intervals(kind: str, n: int, seed: int = 0) -> list[Interval]:
    """``n`` intervals with random lifetimes and sizes.

    Kinds: ``any`` (two random times), ``short`` (a 500th of the whole at most), ``long`` (a tenth at most), ``geometric`` (lifetimes),
    ``skewed`` (geometric lifetimes, lognormal sizes).
    """
    rng = np.random.default_rng(seed)
    first = rng.integers(0, 10_000, n)
    if kind == "any":
        first, last = np.sort(rng.integers(0, 10_000, (2, n)), axis=0)
    elif kind in ("short", "long"):
        last = first + rng.integers(0, 20 if kind == "short" else 1000, n)
    else:
        last = first + rng.geometric(1 / 100, n)
    size = rng.integers(1, 1 << 20, n) if kind != "skewed" else np.exp(rng.normal(10, 2, n)).astype(np.int64) + 1
    return [Interval(f"i{k}", int(size[k]), int(first[k]), int(last[k])) for k in range(n)]


def painted_faults(intervals: Sequence[Interval], offsets: dict[str, int]) -> Iterator[str]:
    """What is wrong with offsets, found by painting the bytes of small placements time by time."""
    for interval in intervals:
        offset = offsets[interval.name]
        if offset < 0 or offset % interval.alignment or interval.offset not in (None, offset):
            yield f"{interval.name} at {offset}"
    for time in sorted({t for i in intervals for t in range(i.first, i.last + 1)}):
        owner: dict[int, str] = {}
        for interval in intervals:
            for byte in range(offsets[interval.name], offsets[interval.name] + need_at(interval, time)):
                if byte in owner:
                    yield f"{owner[byte]} and {interval.name} at byte {byte}, time {time}"
                owner[byte] = interval.name
