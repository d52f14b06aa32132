"""The plan as text."""

from __future__ import annotations

import pytest
from hypothesis import given

from jaxarena.lifetime import Loop
from jaxarena.plan import Plan
from jaxarena.report.text import text
from tests.report.plans import LAUNCH_NAMES, bare, chain, looped, random_plans


def launch_lines(report: str) -> list[str]:
    """What follows the heading of the launches."""
    lines = report.splitlines()
    return lines[next(k for k, line in enumerate(lines) if line.startswith("Launches:")) + 2 :]


def test_the_summary_gives_the_bytes_exactly() -> None:
    plan = looped()
    first, second = str(plan).splitlines()[:2]
    assert first.startswith("train_step: arena ") and f"({plan.bytes:,} bytes)" in first
    assert f"ratio {plan.ratio:.3f}" in first and first.endswith(plan.verdict)
    assert second.startswith("XLA temporaries at most 6.68 MiB (estimated); 7 launches, ")
    assert second.endswith("1 scratch, 1 loop, 1.00 KiB of arrival counts beside the arena")


def test_every_launch_has_one_line_in_order_and_loops_stand_out() -> None:
    lines = launch_lines(text(looped()))
    assert len(lines) == len(LAUNCH_NAMES) + 1
    assert lines[1].strip() == "scan.1: 5 x launches 1..3"
    numbered = lines[:1] + lines[2:]
    assert [line.split()[:2] for line in numbered] == [[str(t), name] for t, name in enumerate(LAUNCH_NAMES)]
    indents = [len(line[5:]) - len(line[5:].lstrip()) for line in numbered]
    assert indents == [2, 4, 4, 4, 2, 2, 2]


def test_a_launch_line_counts_reads_writes_and_bytes() -> None:
    plan = looped()
    line = launch_lines(text(plan))[4].split()
    assert line[:4] == ["3", "attention_forward.1", "2", "1"]
    assert line[6:8] == ["6.68", "MiB"]
    (peak,) = (line for line in launch_lines(text(plan)) if line.endswith(" peak"))
    assert int(peak.split()[0]) == plan.peak_launch


def test_nested_loops_are_indented_twice() -> None:
    lines = launch_lines(text(chain(["a", "b", "c", "d"], (Loop("outer", 1, 3, 2), Loop("inner", 1, 2, 9)))))
    assert [line[7:].split(":")[0].rstrip() for line in lines[1:3]] == ["outer", "  inner"]
    assert [len(line[7:]) - len(line[7:].lstrip()) for line in lines[3:6]] == [4, 4, 2]


def test_the_largest_arrays_and_temporaries_come_first() -> None:
    report = text(chain([f"array{k}" for k in range(20)]))
    section = report[report.index("Largest arrays (12 of 20)") :].splitlines()
    assert [line.split()[0] for line in section[2:14]] == [f"array{k}" for k in range(19, 7, -1)]
    assert section[2].split()[1:4] == ["68x1213", "f32", "1"]
    temporaries = text(looped()).split("Largest XLA temporaries, estimated\n")[1].splitlines()
    assert [line.split()[0] for line in temporaries[1:3]] == ["xla.1:f32[7]", "small"]


def test_long_names_keep_their_number() -> None:
    names = [f"{'a_very_long_name_' * 5}.{k}" for k in range(300)]
    report = text(chain(names, (Loop("scan.1", 3, 290, 1000),)))
    assert max(map(len, report.splitlines()[1:])) <= 120
    assert len(launch_lines(report)) == 301
    assert launch_lines(report)[-1].split()[1].endswith("_.299")


@given(random_plans())
def test_every_plan_fits_120_columns(plan: Plan) -> None:
    assert max(map(len, text(plan).splitlines())) <= 120
    assert text(plan).isascii()


@pytest.mark.parametrize("name", bare())
def test_a_plan_with_next_to_nothing_in_it(name: str) -> None:
    plan = bare()[name]
    report = text(plan)
    assert f"({plan.bytes:,} bytes)" in report
    assert ("Launches:" in report) == (len(plan.launches) > 0)
    assert ("Largest arrays" in report) == (plan.bytes > 0)
