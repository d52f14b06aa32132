"""Every table in a document comes from a result file: the documents are what the scripts make of the files today."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def results() -> ModuleType:
    spec = importlib.util.spec_from_file_location("results", ROOT / "benchmarks" / "results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["results"] = module  # its dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def test_results_document_is_made_of_the_result_files(results: ModuleType) -> None:
    assert (ROOT / "benchmarks" / "RESULTS.md").read_text() == results.results_document()


def test_readme_tables_are_made_of_the_result_files(results: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text()
    assert "<!-- table: step-cpu -->\nMeasured on" in readme
    assert readme == results.with_tables(readme)


def test_a_changed_figure_is_noticed(results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        data = json.loads(path.read_text())
        data["rows"][0]["ours"] += 1
        (tmp_path / path.name).write_text(json.dumps(data))
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert (ROOT / "benchmarks" / "RESULTS.md").read_text() != results.results_document()
    readme = (ROOT / "README.md").read_text()
    assert readme != results.with_tables(readme)


def test_result_files_have_the_agreed_fields(results: ModuleType) -> None:
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert files
    for path in files:
        data = json.loads(path.read_text())
        assert data.keys() == {"suite", "device", "date", "commit", "versions", "rows"}
        assert path.stem.startswith(data["suite"] + "-")
        for row in data["rows"]:
            results.Row(**row)
