"""Instances and placements in the CSV format of google/minimalloc.

One row an interval: ``id``, ``lower`` and ``upper`` (it lives at times from lower to before upper), ``size`` in bytes, and optionally
``alignment`` and ``offset`` (where it must lie). A placement is the same file with every offset filled in.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from jaxarena.planner.problem import Interval

__all__ = ["read", "write"]

REQUIRED = ("id", "lower", "upper", "size")
OPTIONAL = ("alignment", "offset")


def read(path: str | Path, *, alignment: int = 1) -> list[Interval]:
    """The intervals of a file, in its order.

    Args:
      alignment: bytes, of intervals for which the file has none.

    Raises:
      ValueError: names the file, the line, and what is missing or no number.
    """
    with Path(path).open(newline="") as file:
        rows = csv.DictReader(file, skipinitialspace=True)
        missing = [name for name in REQUIRED if name not in (rows.fieldnames or ())]
        if missing:
            raise ValueError(f"{path}: the first line must name the columns {', '.join(REQUIRED)}; missing: {', '.join(missing)}")
        return [_interval(row, f"{path}, line {rows.line_num}", alignment) for row in rows]


def write(path: str | Path, intervals: list[Interval], offsets: Mapping[str, int]) -> None:
    """Writes a placement: the columns of :func:`read`, the alignment where one is not 1, and every offset."""
    aligned = any(i.alignment != 1 for i in intervals)
    with Path(path).open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow([*REQUIRED, *OPTIONAL] if aligned else [*REQUIRED, "offset"])
        for i in intervals:
            row = [i.name, i.first, i.last + 1, i.bytes]
            rows.writerow([*row, i.alignment, offsets[i.name]] if aligned else [*row, offsets[i.name]])


def _interval(row: dict[str, str | None], where: str, alignment: int) -> Interval:
    def number(column: str) -> int | None:
        text = row.get(column)
        if text is None or (not text.strip() and column in OPTIONAL):
            return None
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{where}: {column} must be a whole number, got {text!r}") from None

    lower, upper, size = (number(column) for column in REQUIRED[1:])
    if lower is None or upper is None or size is None:
        raise ValueError(f"{where}: has fewer values than the first line names columns")
    if upper <= lower:
        raise ValueError(f"{where}: upper must be above lower, got {lower} and {upper}")
    try:
        return Interval(row["id"] or "", size, lower, upper - 1, number("alignment") or alignment, number("offset"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
