"""Result files of benchmarks and the document made from them.

A suite writes ``results/<suite>-<device>.json``: an object with ``suite``, ``device``, ``date``, ``commit``, ``versions`` and ``rows``.
A row has ``case`` (what ran, in words), ``metric`` (its unit), ``ours``, ``peer`` (its name) and ``peer_value``, ``ratio`` (how many
times better ours is: above 1 is better), ``target`` (the ratio or value asked for, in words), ``roofline`` and ``spread`` (of ours:
the quartiles' distance over the median). ``python benchmarks/results.py`` makes ``RESULTS.md`` of all files, and the tables in
``README.md``; a test checks that both are up to date.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
RESULTS = FOLDER / "results"

COLUMNS = ("case", "metric", "ours", "peer", "peer value", "times better", "target", "roofline", "spread")


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure beside its peer's."""

    case: str
    metric: str
    ours: float
    peer: str = ""
    peer_value: float | None = None
    ratio: float | None = None
    target: str = ""
    roofline: float | None = None
    spread: float | None = None


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The median, and the distance of the quartiles over the median."""
    low, middle, high = statistics.quantiles(values, n=4)
    return middle, (high - low) / middle


def device_name() -> str:
    """What the figures were measured on."""
    device = jax.devices()[0]
    return f"a CPU with {os.cpu_count()} cores" if device.platform == "cpu" else f"one {device.device_kind}"


def write(suite: str, device: str, rows: Sequence[Row], device_name: str) -> Path:
    """Writes a suite's result file, sorted by nothing: in the order the rows were measured."""
    packages = ("jax", "jaxlib", "numpy", "optax")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    data = {
        "suite": suite,
        "device": device_name,
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "versions": {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in packages},
        "rows": [dataclasses.asdict(r) for r in rows],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{suite}-{device}.json"
    path.write_text(json.dumps(data, indent=1) + "\n")
    return path


def load(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def table(data: dict[str, Any]) -> str:
    """A result file as a Markdown table with a line that says where it was measured."""
    versions = ", ".join(f"{k} {v}" for k, v in data["versions"].items())
    lines = [f"Measured on {data['device']}, {data['date']}, commit {data['commit']}; {versions}.", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "| " + " | ".join("---" for _ in COLUMNS) + " |"]
    for r in data["rows"]:
        cells = (
            r["case"],
            r["metric"],
            _number(r["ours"]),
            r["peer"],
            _number(r["peer_value"]),
            _number(r["ratio"]),
            r["target"],
            _number(r["roofline"]),
        )
        spread = "" if r["spread"] is None else f"{100 * r['spread']:.1f} %"
        lines.append("| " + " | ".join((*cells, spread)) + " |")
    return "\n".join(lines) + "\n"


def results_document() -> str:
    """The text of ``RESULTS.md``."""
    parts = [
        "# Results\n\nMade by `python benchmarks/results.py` from the files in `results/`; each suite's script says how it measures.\n"
    ]
    parts += [f"## {path.stem}\n\n{table(load(path))}" for path in sorted(RESULTS.glob("*.json"))]
    return "\n".join(parts)


def with_tables(text: str) -> str:
    """``text`` with what stands between ``<!-- table: NAME -->`` and ``<!-- end -->`` replaced by that result file's table."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n{table(load(RESULTS / f'{match[2]}.json'))}{match[3]}"

    return re.sub(r"(<!-- table: ([\w-]+) -->)\n.*?(<!-- end -->)", fill, text, flags=re.DOTALL)


def _number(x: float | None) -> str:
    if x is None:
        return ""
    if float(x).is_integer() and abs(x) >= 1000:
        return f"{int(x):,}"
    return f"{x:.4g}" if abs(x) < 1000 else f"{x:,.0f}"


if __name__ == "__main__":
    (FOLDER / "RESULTS.md").write_text(results_document())
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text()))
