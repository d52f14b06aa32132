"""The command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxarena.__main__ import main
from jaxarena.planner import faults, minimalloc
from tests.planner.problems import PLACEMENT

C = str(PLACEMENT / "minimalloc" / "C.1048576.csv")


def printed(capsys) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())


def test_place_prints_and_writes(tmp_path, capsys):
    out = tmp_path / "out.csv"
    assert main(["place", C, "--out", str(out)]) == 0
    report = printed(capsys)
    assert report.pop("nodes").isdigit()
    assert float(report.pop("seconds")) < 10
    assert report == {"intervals": "203", "peak": "1039360 bytes", "bound": "1039360 bytes", "ratio": "1.0000", "verdict": "optimal"}
    placed = minimalloc.read(out)
    offsets = {i.name: i.offset for i in placed}
    assert faults(minimalloc.read(C), offsets) == []
    assert max(i.offset + i.bytes for i in placed) == 1_039_360


def test_place_tells_by_its_status_whether_the_capacity_is_met(capsys):
    assert main(["place", C, "--capacity", "1048576"]) == 0
    assert int(printed(capsys)["peak"].split()[0]) <= 1_048_576
    assert main(["place", C, "--capacity", "1000000", "--nodes", "0"]) == 1
    assert printed(capsys)["verdict"].startswith("cannot fit in 1000000 bytes: 1039360 bytes live at time ")


def test_place_aligns(tmp_path):
    out = tmp_path / "out.csv"
    assert main(["place", C, "--alignment", "4096", "--nodes", "0", "--out", str(out)]) == 0
    assert all(i.offset % 4096 == 0 for i in minimalloc.read(out))


@pytest.mark.parametrize(
    ("line", "message"), [(["place", "no such file"], "no such file"), (["place", C, "--nodes", "-1"], "nodes must be")]
)
def test_what_is_wrong_with_a_line_is_said(line, message, capsys):
    assert main(line) == 2
    assert message in capsys.readouterr().err


def test_it_runs_as_a_module():
    found = subprocess.run([sys.executable, "-m", "jaxarena", "--help"], capture_output=True, text=True, check=True)
    assert "place" in found.stdout
