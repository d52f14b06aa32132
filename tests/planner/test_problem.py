"""Intervals, the bound, and the check of offsets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxarena.arena import ALIGN
from jaxarena.planner import Interval, bound, faults, height
from jaxarena.planner.bound import peak_time
from tests.planner.problems import intervals, need_at, painted_faults


@settings(max_examples=60, deadline=None)
@given(intervals(profiles=True))
def test_the_bound_is_the_most_that_lives_at_one_time(found):
    live = [sum(need_at(i, t) for i in found) for t in range(16)]
    assert bound(found) == max(live)
    assert live[peak_time(found)] == max(live)


def test_the_bound_counts_whole_units_and_pins():
    assert bound([Interval("a", 5, 0, 1), Interval("b", 1, 1, 2)]) == 2 * ALIGN
    assert bound([Interval("a", 5, 0, 1, 4), Interval("b", 1, 1, 2, 6)]) == 6 + 2
    assert bound([Interval("a", 5, 0, 1, 4, 40), Interval("b", 7, 1, 2, 4)]) == 48
    assert bound([]) == height([], {}) == peak_time([]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", -1, 0, 0), "needs bytes >= 0 and first <= last, got -1, 0, 0"),
        (("a", 1, 2, 1), "got 1, 2, 1"),
        (("a", 1, 0, 0, 0), "alignment must be at least 1, got 0"),
        (("a", 1, 0, 0, 4, 6), "offset must be a multiple of 4 from 0 up, got 6"),
        (("a", 1, 0, 0, 4, -4), "got -4"),
        (("a", 9, 0, 5, 1, None, ((1, 2),)), r"profile must rise from time 0 to at most 5, got \[1\]"),
        (("a", 9, 0, 5, 1, None, ((0, 2), (0, 3))), r"got \[0, 0\]"),
        (("a", 9, 0, 5, 1, None, ((0, 2), (6, 3))), r"got \[0, 6\]"),
        (("a", 9, 0, 5, 1, None, ((0, 2), (3, 10))), "profile must ask for 0 to 9 bytes"),
    ],
)
def test_intervals_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        Interval(*arguments)


@settings(max_examples=150, deadline=None)
@given(intervals(most=6, sizes=5, times=4, alignments=(1, 2), pins=True, profiles=True), st.data())
def test_the_check_agrees_with_painting(found, data):
    offsets = {i.name: data.draw(st.integers(-1, 12), i.name) for i in found}
    assert bool(faults(found, offsets)) == any(painted_faults(found, offsets))


def test_the_check_says_what_is_wrong():
    a, b, c = Interval("a", 8, 0, 2, 4), Interval("b", 4, 2, 3, 4, 8), Interval("c", 4, 3, 3, 1)
    assert faults([a, b, c], {"a": 0, "b": 8, "c": 0}) == []
    overlaps = ["'a' and 'b' share bytes 8 to 12 at time 2", "'b' and 'c' share bytes 8 to 12 at time 3"]
    assert faults([a, b, c], {"a": 4, "b": 8, "c": 8}) == overlaps
    assert faults([a, b], {"a": 2, "b": 12}) == ["'a' is at 2, no multiple of 4 from 0 up", "'b' is at 12, pinned to 8"]
    assert faults([a], {}) == ["'a' has no offset"]
