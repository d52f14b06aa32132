"""The scripts behind `make`: they find a Python that works, and the CUDA extra that fits a driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


def program(folder: Path, name: str, body: str) -> Path:
    """An executable shell script."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def call(script: str, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of tools/ with ``path`` first on PATH and no PYTHON but what ``environment`` gives."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHON"} | environment
    env["PATH"] = f"{path}{os.pathsep}{env['PATH']}"
    return subprocess.run([str(TOOLS / script)], env=env, capture_output=True, text=True, timeout=60)


def test_a_python_is_found_past_a_failing_shim_an_old_version_and_another_interpreter(tmp_path: Path) -> None:
    program(tmp_path, "python3.14", "echo 'python3.14: command not found' >&2; exit 127")
    program(tmp_path, "python3.13", "exit 1")
    program(tmp_path, "python3.12", f"exec {sys.executable} \"$@\"")
    found = call("find_python.sh", tmp_path)
    assert found.returncode == 0
    assert found.stdout.strip() == str(tmp_path / "python3.12")


def test_a_python_that_makes_environments_is_preferred(tmp_path: Path) -> None:
    pytest.importorskip("ensurepip")
    (tmp_path / "ensurepip.py").write_text("raise ImportError('packed separately')")
    bare = program(tmp_path, "python3.14", f"PYTHONPATH={tmp_path} exec {sys.executable} \"$@\"")
    whole = program(tmp_path, "python3.13", f"exec {sys.executable} \"$@\"")
    assert call("find_python.sh", tmp_path).stdout.strip() == str(whole)
    assert call("find_python.sh", tmp_path, PYTHON=str(bare)).stdout.strip() == str(bare)


def test_a_given_python_that_is_too_old_is_refused_by_its_version(tmp_path: Path) -> None:
    old = program(tmp_path, "old", 'if [ "$1" = -V ]; then echo Python 3.11.7; else exit 1; fi')
    refused = call("find_python.sh", tmp_path, PYTHON=str(old))
    assert refused.returncode == 1
    assert refused.stderr.strip() == f"PYTHON={old}: jaxarena needs CPython >= 3.12, and this is Python 3.11.7"


def test_a_given_python_that_is_not_there_is_refused(tmp_path: Path) -> None:
    refused = call("find_python.sh", tmp_path, PYTHON=str(tmp_path / "nowhere"))
    assert refused.returncode == 1
    assert "there is no such program" in refused.stderr


@pytest.mark.parametrize(
    ("header", "extra", "reason"),
    [
        ("CUDA Version: 12.4", "cuda12", ""),
        ("CUDA Version: 13.0", "cuda13", ""),
        ("CUDA UMD Version: 14.1", "cuda13", ""),
        ("CUDA Version: 11.8", "", "JAX needs 12 or later"),
        ("Failed to initialize NVML", "", "names no CUDA version"),
    ],
)
def test_the_cuda_extra_fits_the_driver(tmp_path: Path, header: str, extra: str, reason: str) -> None:
    program(tmp_path, "nvidia-smi", f"echo '| NVIDIA-SMI 580.65   Driver Version: 580.65   {header}  |'")
    answer = call("cuda_extra.sh", tmp_path)
    assert answer.returncode == 0
    assert answer.stdout.strip() == extra
    assert reason in answer.stderr
