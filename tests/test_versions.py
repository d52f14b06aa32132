"""The check of the installed JAX: what it takes, what it refuses, and what its messages say (cases I2 and I4)."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import warnings
from importlib import metadata
from pathlib import Path

import pytest

from jaxarena import _versions

CHECKOUT = Path(__file__).parents[1]


def pretend_installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Makes the installed distributions exactly ``versions`` (underscores in a name stand for dashes)."""
    table = {name.replace("_", "-"): version for name, version in versions.items()}

    def version(distribution: str) -> str:
        if distribution not in table:
            raise metadata.PackageNotFoundError(distribution)
        return table[distribution]

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0.11.2", (0, 11, 2)),
        ("0.12.0.1", (0, 12, 0, 1)),
        ("0.12.0.dev2026", (0, 12, 0)),
        ("0.12.1.dev20261130+abcdef", (0, 12, 1)),
        ("0.12.0rc1", (0, 12, 0)),
        ("1!0.12", (0, 12)),
    ],
)
def test_release_reads_the_number_of_a_version(text: str, number: tuple[int, ...]) -> None:
    assert _versions.release(text) == number


def test_release_refuses_what_has_no_number() -> None:
    with pytest.raises(ValueError, match="'unknown'"):
        _versions.release("unknown")


@pytest.mark.parametrize("version", ["0.11.2", "0.11.3", "0.12.0", "0.12.0.1", "0.12.0.dev2026", "0.12.9"])
def test_I2_every_version_of_the_range_is_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend_installed(monkeypatch, jax=version, jaxlib=version)
    _versions.check_jax_version()


@pytest.mark.parametrize("version", ["0.4.38", "0.10.2", "0.11.1", "0.13.0", "0.13.0.dev2026", "1.0"])
def test_I2_a_version_outside_the_range_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend_installed(monkeypatch, jax=version, jaxlib=version)
    with pytest.raises(ImportError) as refusal:
        _versions.check_jax_version()
    message = str(refusal.value)
    assert ">=0.11.2,<0.13" in message
    assert f"jax {version} is installed" in message
    assert "pip install --upgrade 'jax>=0.11.2,<0.13'" in message


def test_I2_no_jax_at_all_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch)
    with pytest.raises(ImportError, match="no jax is installed here"):
        _versions.check_jax_version()


def test_I4_the_advice_keeps_the_cuda_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, jax="0.10.2", jaxlib="0.10.2", jax_cuda13_plugin="0.10.2")
    with pytest.raises(ImportError) as refusal:
        _versions.check_jax_version()
    assert "'jax[cuda13]>=0.11.2,<0.13'" in str(refusal.value)


def test_I4_a_cuda_plugin_of_another_release_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, jax="0.12.0.1", jaxlib="0.12.0.1", jax_cuda12_plugin="0.11.2")
    with pytest.warns(RuntimeWarning, match=r"jax-cuda12-plugin 0\.11\.2 does not fit jaxlib 0\.12\.0\.1.*jax\[cuda12\]"):
        _versions.check_jax_version()


def test_I4_a_cuda_plugin_of_the_same_release_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, jax="0.11.2", jaxlib="0.11.2", jax_cuda13_plugin="0.11.2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _versions.check_jax_version()


def test_I4_the_package_metadata_states_the_same_range() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert f"jax{_versions.SUPPORTED_JAX}" in project["dependencies"]
    for extra in ("cuda12", "cuda13"):
        assert project["optional-dependencies"][extra] == [f"jax[{extra}]{_versions.SUPPORTED_JAX}"]


def test_I2_the_package_itself_refuses_an_old_jax(tmp_path: Path) -> None:
    """A real import, of the whole package, beside a distribution that calls itself jax 0.10.2 and cannot be imported."""
    info = tmp_path / "jax-0.10.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jax\nVersion: 0.10.2\n")
    (tmp_path / "jax.py").write_text("raise AttributeError('deep inside')\n")
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(CHECKOUT)!r}]; import jaxarena"
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "ImportError: jaxarena needs jax >=0.11.2,<0.13, but jax 0.10.2 is installed here" in result.stderr
