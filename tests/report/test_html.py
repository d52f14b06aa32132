"""The plan as a page: well formed, self-contained, its boxes where the plan has them."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given

from jaxarena.lifetime import Loop
from jaxarena.plan import Plan
from jaxarena.report.html import html as page_of
from tests.report.plans import bare, chain, looped, random_plans

VOID = {"meta", "input", "br", "link", "img"}
UNFRIENDLY = "<img src=x onerror=alert(1)>&\"'</script></title>"


class Page(html.parser.HTMLParser):
    """Elements with their attributes, and the text inside; refuses tags that do not close."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[int] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        self.texts.append("")
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for k in self.open:
            self.texts[k] += data

    def having(self, name: str, value: str) -> list[dict[str, str]]:
        """The attributes of the elements whose attribute ``name`` holds the word ``value``."""
        return [attrs for _, attrs in self.elements if value in attrs.get(name, "").split()]

    def data(self) -> dict:
        (k,) = (k for k, (_, attrs) in enumerate(self.elements) if attrs.get("id") == "plan")
        return json.loads(self.texts[k])


def percent(text: str) -> float:
    assert text.endswith("%")
    return float(text[:-1]) / 100


def test_nothing_comes_from_elsewhere() -> None:
    page = page_of(looped())
    assert not re.search(r"https?:|//[a-z]|@import|\bfetch\b|XMLHttpRequest", page)
    assert set(re.findall(r"url\(([^)]*)\)", page)) <= {"#hatch"}
    for tag, attrs in Page(page).elements:
        assert tag not in {"link", "img", "iframe", "object"} and not {"src", "href"} & set(attrs)


def test_names_are_escaped() -> None:
    plan = chain(["a", UNFRIENDLY, UNFRIENDLY + "2"], (Loop(UNFRIENDLY, 0, 1, 3),), form=UNFRIENDLY)
    page = Page(page_of(plan))
    assert not any(tag == "img" for tag, _ in page.elements)
    assert page.data()["boxes"][1][0] == UNFRIENDLY
    assert UNFRIENDLY in [text for (tag, _), text in zip(page.elements, page.texts, strict=True) if tag == "h1"]


@given(random_plans())
def test_boxes_stand_where_the_plan_has_them(plan: Plan) -> None:
    page = Page(page_of(plan))
    boxes, n = page.having("class", "box"), len(plan.launches)
    (arena,) = page.having("id", "arena")
    top = float(arena["data-top"])
    lives = [(p.bytes, p.offset, p.first, p.last) for p in plan.arena.placed]
    lives += [(s.bytes, s.offset, s.launch, s.launch) for s in plan.arena.scratch]
    assert len(boxes) == len(lives)
    for box, (size, offset, first, last) in zip(boxes, lives, strict=True):
        assert percent(box["x"]) == pytest.approx(first / n, abs=1e-5)
        assert percent(box["width"]) == pytest.approx((last + 1 - first) / n, abs=1e-5)
        assert percent(box["height"]) == pytest.approx(size / top, abs=1e-5)
        assert percent(box["y"]) == pytest.approx(1 - (offset + size) / top, abs=1e-5)


def test_a_box_tells_about_itself_without_a_script() -> None:
    plan = looped()
    page = Page(page_of(plan))
    titles = [text for (tag, _), text in zip(page.elements, page.texts, strict=True) if tag == "title"]
    placed = plan.arena.find("kept project.1")
    expected = ["kept project.1", "f32 [3, 37, 224], 5 slots", f"{placed.bytes:,} bytes", f"{placed.offset:,}"]
    expected += ["first written by 2 project.1", "last read by 4 project_dx.1"]
    assert any(all(part in title for part in expected) for title in titles)


def test_loops_launches_and_bound_are_drawn() -> None:
    plan = looped()
    page = Page(page_of(plan))
    assert len(page.having("class", "band")) == 2  # behind the arena and behind the profile
    assert any("scan.1 × 5" in text for text in page.texts)  # noqa: RUF001
    assert [launch[0] for launch in page.data()["launches"]] == [launch.name for launch in plan.launches]
    (bound, _) = (line for tag, line in page.elements if tag == "line" and line.get("class") == "bound")
    assert percent(bound["y1"]) == pytest.approx(1 - plan.bound / float(page.having("id", "arena")[0]["data-top"]), abs=1e-5)


def test_the_profile_is_the_live_bytes() -> None:
    plan = looped()
    (path,) = (attrs["d"] for attrs in Page(page_of(plan)).having("class", "live"))
    heights = [1000 - float(y) for y in re.findall(r"V([\d.]+)h1", path)]
    live = [plan.arena.live_bytes(t) for t in range(len(plan.launches))]
    assert len(heights) == len(live)
    assert heights == pytest.approx([height * max(heights) / max(live) for height in live], abs=0.02)


@pytest.mark.parametrize("name", bare())
def test_a_plan_with_next_to_nothing_in_it(name: str) -> None:
    plan = bare()[name]
    page = Page(page_of(plan))
    assert len(page.data()["launches"]) == len(plan.launches)
    assert len(page.having("class", "box")) == len(plan.arena.placed)


def test_the_script_finds_what_it_looks_for() -> None:
    page = page_of(looped())
    ids = set(re.findall(r'id="([\w-]+)"', page))
    wanted = set(re.findall(r'\bat\("([\w-]+)"\)', page))
    assert len(wanted) >= 8 and wanted <= ids


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to parse the page's script")
def test_the_script_parses(tmp_path: Path) -> None:
    script = tmp_path / "page.js"
    script.write_text(page_of(looped()).rpartition("<script>")[2].partition("</script>")[0], encoding="utf-8")
    result = subprocess.run(["node", "--check", str(script)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
