"""The command line."""

from __future__ import annotations

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxarena as ja
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
    assert float(report.pop("seconds")) >= 0
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


def step_of(params, x):
    """A step for the command to plan."""
    return jax.tree.map(lambda p: p + 1, params), ja.ops.project(ja.ops.project(x, params["w"]), params["w"])


def arguments_of():
    return {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}, jax.ShapeDtypeStruct((16, 64), jnp.float32)


def test_plan_counts_what_a_step_needs(tmp_path, capsys):
    line = ["plan", "tests.test_main:step_of", "--args-from", "tests.test_main:arguments_of", "--donate", "0"]
    assert main([*line, "--out", str(tmp_path / "plan.json"), "--memory", "1MiB"]) == 0
    text = capsys.readouterr().out
    assert "step_of: arena 4.00 KiB" in text
    for name, size in (("arguments", 20480), ("of them donated", 16384), ("results", 20480), ("in all", 20480 + 4096 + 4096)):
        assert re.search(rf"{name} .*\({size:,} bytes\)", text), (name, size)
    assert "fits in 1.00 MiB: 996 KiB to spare" in text
    assert (tmp_path / "plan.json").stat().st_size > 100
    assert main([*line, "--memory", "20KB"]) == 1
    assert "does not fit in 19.5 KiB" in capsys.readouterr().out


def test_plan_takes_shapes(capsys):
    assert main(["plan", "jaxarena.ops:project", "--args", "bf16[8,64]", "bf16[64,128]"]) == 0
    assert "project" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["jaxarena.ops"], "must be named MODULE:FUNCTION, got 'jaxarena.ops'"),
        (["jaxarena.ops:nothing"], "has no 'nothing'"),
        (["no.such:thing"], "No module named 'no'"),
        (["jaxarena.ops:project", "--args", "f7[3]"], "must be a dtype"),
        (["jaxarena.ops:project", "--args", "f32[8,64]", "f32[32,8]"], "project"),
        (["jaxarena.ops:argmax", "--args", "f32[8,64]", "--memory", "lots"], "must be a number of bytes"),
        (["tests.test_main:step_of", "--args-from", "tests.test_main:printed"], "printed"),
    ],
)
def test_plan_says_what_is_wrong(line, message, capsys):
    assert main(["plan", *line]) == 2
    assert message in capsys.readouterr().err
