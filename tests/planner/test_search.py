"""The cheap placements and the search, on their own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from jaxarena.planner import Interval, faults
from jaxarena.planner.first_fit import ORDERS, first_fit, ordered
from jaxarena.planner.items import FREE, Items, normalise, sections
from jaxarena.planner.piece import reaches
from jaxarena.planner.search import decide
from jaxarena.planner.skyline import skyline
from tests.planner.problems import instance, intervals, least_peak, need_at

ANY = {"alignments": (1, 2, 3), "profiles": True}


def named(items: Items, offsets: np.ndarray) -> dict[str, int]:
    return {name: int(offset) * items.unit for name, offset in zip(items.names, offsets, strict=True)}


def kept(found: list[Interval]) -> list[Interval]:
    """Those that need bytes at some time."""
    return [i for i in found if any(size for *_, size in i.spans)]


@settings(max_examples=80, deadline=None)
@given(intervals(**ANY, pins=True))
def test_first_fit_is_valid_in_every_order(found):
    items = normalise(found)
    for order in ORDERS:
        for tightest in (False, True):
            offsets = first_fit(items, ordered(items, order), np.full(len(items), FREE), tightest=tightest)
            assert not faults(kept(found), named(items, offsets))


@settings(max_examples=80, deadline=None)
@given(intervals(**ANY))
def test_the_skyline_is_valid(found):
    items = normalise(found)
    for haste in (0.0, 0.3):
        assert not faults(kept(found), named(items, skyline(items, haste)))


@settings(max_examples=60, deadline=None)
@given(intervals())
def test_first_fit_takes_the_lowest_room(found):
    items = normalise(found)
    order = ordered(items, "size")
    offsets = first_fit(items, order, np.full(len(items), FREE))
    for k, i in enumerate(order):
        before = [o for o in order[:k] if items.first[o] < items.stop[i] and items.first[i] < items.stop[o]]
        for lower in range(offsets[i]):
            assert any(offsets[o] < lower + items.size[i] and lower < offsets[o] + items.size[o] for o in before)


def test_first_fit_takes_the_tightest_room():
    found = [Interval("a", 9, 0, 9, 1, 4), Interval("b", 9, 0, 9, 1, 15), Interval("c", 2, 3, 3, 1), Interval("d", 2, 3, 3, 1)]
    items = normalise(found)
    where = [named(items, first_fit(items, ordered(items, "size"), np.full(4, FREE), tightest=t)) for t in (False, True)]
    assert [where[0]["c"], where[0]["d"]] == [0, 2]
    assert [where[1]["c"], where[1]["d"]] == [13, 0]


@settings(max_examples=60, deadline=None)
@given(intervals(**ANY, pins=True))
def test_sections_hold_all_that_live_together(found):
    items = normalise(found)
    cuts = sections(items)
    if len(items):
        assert (cuts.begin < cuts.end).all()
        assert cuts.load.max() * items.unit >= max(sum(need_at(i, t) for i in found) for t in range(16))
    one, other = np.meshgrid(np.arange(len(items.span_item)), np.arange(len(items.span_item)))
    together = (items.span_first[one] < items.span_stop[other]) & (items.span_first[other] < items.span_stop[one])
    assert np.array_equal(together, (cuts.begin[one] < cuts.end[other]) & (cuts.begin[other] < cuts.end[one]))


def decided(found: list[Interval], capacity: int, order: str = "lds", detours: int | None = None) -> bool | None:
    items = normalise(found)
    outcome = decide(items, reaches(items), capacity // items.unit, order, np.zeros(items.times, np.int64), 100_000, detours)
    if outcome.fits:
        assert not faults(kept(found), named(items, outcome.offsets))
        assert int((outcome.offsets + items.size).max(initial=0)) * items.unit <= capacity
    return outcome.fits


@settings(max_examples=250, deadline=None)
@given(intervals(most=6, sizes=5, times=4, alignments=(1, 2, 3), pins=True, profiles=True))
def test_the_search_decides_rightly(found):
    found = kept(found)
    if not found:
        return
    least = least_peak(found)
    step = normalise(found).unit
    for order in ("lds", "c", "aps"):
        assert decided(found, -(-least // step) * step, order) is True
        assert decided(found, least - 1, order) is False
    # With a limit on detours it may not know, but is never wrong.
    assert decided(found, -(-least // step) * step, detours=0) is not False
    assert decided(found, least - 1, detours=1) is not True


def test_it_stops_at_its_limit():
    items = normalise(instance("D"))
    capacity = int(sections(items).load.max())
    outcome = decide(items, reaches(items), capacity, "lds", np.zeros(items.times, np.int64), 700)
    assert (outcome.fits, outcome.nodes) == (None, 700)
    assert outcome.failures.sum() > 0


@pytest.mark.parametrize(("name", "order"), [("C", "lds"), ("K", "lds"), ("B", "as")])
def test_instances_that_one_search_settles(name, order):
    items = normalise(instance(name))
    capacity = int(sections(items).load.max())
    outcome = decide(items, reaches(items), capacity, order, np.zeros(items.times, np.int64), 2000)
    assert outcome.fits is True
    assert not faults(instance(name), named(items, outcome.offsets))
