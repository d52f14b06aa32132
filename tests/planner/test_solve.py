"""The planner as a whole: properties, instances, budgets."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxarena.arena import ALIGN, GiB
from jaxarena.planner import Interval, bound, faults, height, solve
from tests.planner.problems import GRAPHS, MINIMALLOC, instance, intervals, least_peak, random_intervals

CAPACITY = 1_048_576


def largest_first(found: list[Interval]) -> int:
    """The peak of the largest first, each at the lowest offset that is free: naive, for plain intervals."""
    placed: list[tuple[Interval, int]] = []
    for i in sorted(found, key=lambda i: (-i.bytes, i.first - i.last, i.first, -i.last, i.name)):
        beside = sorted((at, at + o.bytes) for o, at in placed if o.first <= i.last and i.first <= o.last and o.bytes)
        offset = 0
        for start, stop in beside:
            if offset + i.bytes <= start:
                break
            offset = max(offset, stop)
        placed.append((i, offset))
    return max((at + i.bytes for i, at in placed), default=0)


def check_properties(found: list[Interval], shuffle: random.Random) -> None:
    """No overlap, alignment and pins kept (by the check), the bound below, and the same whatever the order of the list."""
    solution = solve(found, nodes=300)
    assert faults(found, solution.offsets) == []
    assert bound(found) <= solution.bound <= solution.peak == height(found, solution.offsets)
    assert (solution.peak == solution.bound) == (solution.verdict == "optimal")
    assert solution.nodes <= 300
    assert solve(shuffle.sample(found, len(found)), nodes=300) == solution


properties = given(intervals(alignments=(1, 2, 8), pins=True, profiles=True), st.randoms(use_true_random=False))
above = given(intervals())


@settings(max_examples=60, deadline=None)
@properties
def test_properties(found, shuffle):
    check_properties(found, shuffle)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@properties
def test_properties_of_many(found, shuffle):
    check_properties(found, shuffle)


@settings(max_examples=60, deadline=None)
@above
def test_never_above_largest_first(found):
    assert solve(found, nodes=0).peak <= largest_first(found)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@above
def test_never_above_largest_first_of_many(found):
    assert solve(found, nodes=100).peak <= largest_first(found)


@settings(max_examples=60, deadline=None)
@given(intervals(most=6, sizes=5, times=4, alignments=(1, 2, 3), pins=True, profiles=True))
def test_small_problems_are_solved_and_proved(found):
    solution = solve(found)
    assert solution.peak == solution.bound == least_peak(found)
    assert solution.verdict == "optimal"


def test_a_proof_may_lift_the_bound():
    # At most three units live at once, yet no three-unit placement exists: the ring of lives leaves one of them without room.
    lives = [(1, 0, 1), (2, 0, 0), (2, 2, 2), (1, 1, 2), (1, 1, 1)]
    found = [Interval(f"i{k}", size, first, last, 1) for k, (size, first, last) in enumerate(lives)]
    solution = solve(found)
    assert bound(found) == 3
    assert (solution.peak, solution.bound, solution.verdict) == (least_peak(found), least_peak(found), "optimal")


def test_sizes_past_31_bits_P1():
    found = [Interval("a", 3 * GiB, 0, 1), Interval("b", 5, 1, 2), Interval("c", 2 * GiB, 1, 1)]
    solution = solve(found)
    assert solution.peak == 5 * GiB + ALIGN
    assert faults(found, solution.offsets) == []


def test_an_alignment_far_above_the_sizes():
    solution = solve([Interval("a", 1, 0, 0, 1, 0), Interval("b", 1, 0, 0, 8)])
    assert (solution.offsets, solution.peak) == ({"a": 0, "b": 8}, 9)


def test_less_room_in_part_of_a_life():
    # b goes where a no longer needs its bytes, and c below it where d did not yet.
    a = Interval("a", 10, 0, 9, 1, None, ((0, 10), (5, 4)))
    b = Interval("b", 6, 5, 9, 1)
    assert solve([a, b]).peak == 10
    assert solve([Interval("a", 10, 0, 9, 1), b]).peak == 16


def test_needing_nothing():
    assert solve([]).verdict == solve([Interval("a", 0, 0, 3)]).verdict == "optimal"
    solution = solve([Interval("a", 0, 0, 3, 4, 12), Interval("b", 0, 1, 2), Interval("c", 8, 0, 0, 4)])
    assert solution.offsets == {"a": 12, "b": 0, "c": 0}
    assert solution.peak == solution.bound == 8


def test_it_refuses():
    a = Interval("a", 4, 0, 2, 4, 8)
    with pytest.raises(ValueError, match="1 interval names are used twice"):
        solve([a, a])
    with pytest.raises(ValueError, match=r"'a' and 'b' are pinned to bytes they share at one time"):
        solve([a, Interval("b", 8, 2, 3, 4, 4)])
    with pytest.raises(ValueError, match="nodes must be at least 0, got -1"):
        solve([], nodes=-1)
    with pytest.raises(ValueError, match=r"2\*\*59 bytes or more in sum"):
        solve([Interval("a", 2**59, 0, 0)])


def test_a_capacity_that_cannot_be_met_names_what_lives_there():
    found = [Interval("a", 30, 0, 3, 1), Interval("b", 50, 2, 4, 1), Interval("c", 20, 4, 5, 1)]
    solution = solve(found, capacity=79)
    assert solution.peak == 80
    assert solution.verdict == "cannot fit in 79 bytes: 80 bytes live at time 2: b (50), a (30)"
    assert solve(found, capacity=80).verdict == "optimal"


def test_a_capacity_is_enough():
    assert solve(instance("C"), capacity=CAPACITY, nodes=0).peak > solve(instance("C")).peak


@pytest.mark.parametrize("name", ["B", "C", "G", "K", "G_1", "resnet50"])
def test_instances_at_the_bound(name):
    found = instance(name)
    solution = solve(found)
    assert faults(found, solution.offsets) == []
    assert (solution.peak, solution.verdict) == (bound(found), "optimal")


BEST = {"C": 1_039_360, "D": 1_029_120, "J": 1_035_264}


@pytest.mark.slow
@pytest.mark.parametrize("name", MINIMALLOC)
def test_minimalloc(name):
    found = instance(name)
    fits = solve(found, capacity=CAPACITY)
    assert fits.peak <= CAPACITY
    solution = solve(found)
    assert faults(found, solution.offsets) == faults(found, fits.offsets) == []
    assert solution.peak <= BEST.get(name, CAPACITY)
    assert name in "DJ" or solution.verdict == "optimal"


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name):
    found = instance(name)
    solution = solve(found)
    assert solution.peak == bound(found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["any", "short", "long", "geometric", "skewed"])
def test_ten_thousand(kind):
    found = random_intervals(kind, 10_000)
    solution = solve(found)
    assert faults(found, solution.offsets) == []
    assert solution.peak <= 1.02 * bound(found)


@pytest.mark.parametrize("kind", ["any", "short", "long", "geometric", "skewed"])
def test_five_hundred(kind):
    found = random_intervals(kind, 500, seed=3)
    solution = solve(found, nodes=8000)
    assert faults(found, solution.offsets) == []
    assert solution.peak <= 1.02 * bound(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["B", "E", "H"])
def test_a_second_opinion(name):
    """omnimalloc's validator takes our placement, and its own default allocator finds none that is lower."""
    omnimalloc = pytest.importorskip("omnimalloc")
    found = instance(name)
    solution = solve(found)

    def placed(offsets):
        return [omnimalloc.Allocation(id=i.name, size=i.bytes, start=i.first, end=i.last + 1, offset=offsets.get(i.name)) for i in found]

    omnimalloc.validate_allocation(placed(solution.offsets))
    with pytest.raises(ValueError, match=r"ollision|overlap"):
        omnimalloc.validate_allocation(placed(dict.fromkeys(solution.offsets, 0)))
    theirs = omnimalloc.allocate(placed({}), validate=True)
    assert solution.peak <= max(a.offset + a.size for a in theirs)
