"""The plan as a still picture."""

from __future__ import annotations

import io
import struct
import sys

import numpy as np
import pytest

from jaxarena.lifetime import Loop
from jaxarena.plan import Plan
from jaxarena.report.png import png
from jaxarena.report.scene import PALETTE, scene
from tests.report.plans import bare, chain, looped

pytest.importorskip("matplotlib")


def pixels(plan: Plan) -> np.ndarray:
    """The picture as 8-bit [height, width, rgb]."""
    from matplotlib.image import imread

    return (imread(io.BytesIO(png(plan)))[:, :, :3] * 255).round().astype(np.uint8)


def count(image: np.ndarray, colour: str) -> int:
    return int(np.all(image == np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], np.uint8), axis=-1).sum())


def test_size() -> None:
    data = png(looped())
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1600, 900)


def test_boxes_have_the_area_of_bytes_times_launches() -> None:
    plan = chain(["a", "b", "c", "d"])  # one array a kind
    image = pixels(plan)
    areas = {p.name: p.bytes * (p.last + 1 - p.first) for p in plan.arena.placed}
    counts = {label: count(image, colour) for label, colour in scene(plan).kinds}
    # Labels, rims, the legend and the row of launches take from the boxes and add to them.
    for name in "bcd":
        assert counts[name] / counts["a"] == pytest.approx(areas[name] / areas["a"], rel=0.05)
    assert count(image, PALETTE[5]) == 0


def test_pyplot_stays_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    png(looped())


def test_names_that_look_like_formulas_or_are_long() -> None:
    names = ["$x", "$y$", "a_very_long_name_" * 9, "\\frac"]
    png(chain(names, (Loop("$l$", 0, 2, 3), Loop("m", 1, 1, 3)), form="$f$", scratch=100_000))


@pytest.mark.parametrize("name", bare())
def test_a_plan_with_next_to_nothing_in_it(name: str) -> None:
    assert pixels(bare()[name]).shape == (900, 1600, 3)


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"\.png needs matplotlib.*pip install jaxarena\[plot\]"):
        png(looped())
