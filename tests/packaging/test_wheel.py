"""The wheel (case I1): built, installed away from the checkout, every public module imported from there, one op run.

Nothing is fetched: the build backend and pip come with the `test` extra.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]

IMPORT_ALL = """
import importlib, json, pkgutil, sys
import jaxarena

def public(name):
    return not any(part.startswith("_") for part in name.split("."))

names = [module.name for module in pkgutil.walk_packages(jaxarena.__path__, "jaxarena.") if public(module.name)]
files = {name: importlib.import_module(name).__file__ for name in ["jaxarena", *names]}
json.dump(files, sys.stdout)
"""

RUN_ONE_OP = """
import jax.numpy as jnp
import jaxarena as ja

def step(x, weight):
    return ja.ops.rms_norm(x, weight).sum()

compiled = ja.jit(step)
x, weight = jnp.ones((3, 5, 256)), jnp.full((256,), 2.0)
total, arena = compiled(compiled.plan(x, weight).allocate(), x, weight)
print(float(total))
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Runs ``command`` with nothing of the checkout on its path; returns what it printed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | environment
    result = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, CHECKOUT, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", target, wheel, cwd=target)
    return target


def sources() -> set[str]:
    return {path.relative_to(CHECKOUT).as_posix() for path in (CHECKOUT / "jaxarena").rglob("*.py")}


def test_I1_the_wheel_holds_every_source_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    assert {name for name in names if name.endswith(".py")} == sources()
    assert "jaxarena/py.typed" in names
    assert all(name.startswith("jaxarena/") for name in names)
    assert licences


def test_I1_every_public_module_imports_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    files = json.loads(run(sys.executable, "-c", IMPORT_ALL, cwd=tmp_path, PYTHONPATH=str(installed), JAX_PLATFORMS="cpu"))
    assert all(Path(file).is_relative_to(installed) for file in files.values()), files
    expected = {name for name in map(module_name, sources()) if not any(part.startswith("_") for part in name.split("."))}
    assert set(files) == expected


def test_I1_an_op_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    printed = run(sys.executable, "-c", RUN_ONE_OP, cwd=tmp_path, PYTHONPATH=str(installed), JAX_PLATFORMS="cpu")
    assert float(printed) == pytest.approx(3 * 5 * 256 * 2.0, rel=1e-4)


def module_name(source: str) -> str:
    """``jaxarena/ops/norm.py`` -> ``jaxarena.ops.norm``; a package's ``__init__`` is the package."""
    return source.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
