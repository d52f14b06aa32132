"""A plan written to a file: the suffix decides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxarena.plan import Plan
from tests.report.plans import looped


def test_the_suffix_decides(tmp_path: Path) -> None:
    plan = looped()
    starts = {"plan.html": b"<!doctype html>", "plan.HTML": b"<!doctype html>", "plan.json": b"{"}
    for name, start in starts.items():
        plan.save(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    plan.save(str(tmp_path / "as_text.json"))
    assert (tmp_path / "as_text.json").read_bytes() == (tmp_path / "plan.json").read_bytes()


def test_a_png_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    looped().save(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_json_reads_back_as_the_plan(tmp_path: Path) -> None:
    plan = looped()
    plan.save(tmp_path / "plan.json")
    again = Plan.from_json(json.loads((tmp_path / "plan.json").read_text(encoding="utf-8")))
    assert again == plan
    assert again.fingerprint == plan.fingerprint


@pytest.mark.parametrize("name", ["plan.pdf", "plan", "plan.html.gz"])
def test_other_suffixes_are_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(ValueError, match=rf"\.html, \.png or \.json.*'{path.suffix}'.*{name}"):
        looped().save(path)
    assert not path.exists()
