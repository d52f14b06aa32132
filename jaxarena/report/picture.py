"""Writes a plan to a file, as what the file's suffix says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from jaxarena.report.html import html
from jaxarena.report.png import png

if TYPE_CHECKING:
    from jaxarena.plan import Plan

__all__ = ["save"]


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes ``plan`` to ``path``: a page to explore (``.html``), a picture (``.png``), or data (``.json``, see ``Plan.from_json``).

    Raises:
      ValueError: for another suffix.
      ImportError: for ``.png`` without matplotlib.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".html":
        path.write_text(html(plan), encoding="utf-8")
    elif suffix == ".png":
        path.write_bytes(png(plan))
    elif suffix == ".json":
        path.write_text(json.dumps(plan.to_json(), indent=1) + "\n", encoding="utf-8")
    else:
        raise ValueError(f"save: path must end in .html, .png or .json, got suffix {path.suffix!r} of {os.fspath(path)!r}")
