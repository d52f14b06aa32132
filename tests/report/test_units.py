"""Byte counts in words, and marks of an axis."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxarena.report.units import human, marks, plain

FACTORS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def read(text: str) -> float:
    value, unit = text.split()
    return float(value) * FACTORS[unit]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1536, "1.50 KiB"),
        (12 * 2**20, "12.0 MiB"),
        (310 * 2**20, "310 MiB"),
        (1000 * 2**20, "0.98 GiB"),
        (1_468_006_400, "1.37 GiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_human(count: int, text: str) -> None:
    assert human(count) == text


@given(st.integers(1, 2**49))
def test_human_is_short_and_right_to_a_percent(count: int) -> None:
    assert len(human(count)) <= 8
    assert read(human(count)) == pytest.approx(count, rel=0.011)


@given(st.integers(8, 2**45))
def test_marks_are_few_round_and_written_exactly(top: int) -> None:
    at = marks(top)
    step = at[1]
    assert at == list(range(0, top + 1, step)) and 4 < len(at) <= 9
    assert step & (step - 1) == 0
    assert all(read(plain(mark)) == mark for mark in at[1:]) and plain(0) == "0"


@pytest.mark.parametrize("top", [0, 1, 2, 7])
def test_marks_of_a_tiny_axis(top: int) -> None:
    assert marks(top) == list(range(top + 1))
