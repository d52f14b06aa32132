"""Which config a product launches with: what tuning found for its sizes, else what its kernel's table says.

``python -m jaxarena tune`` times candidates on the GPU at hand and writes a file; :func:`load` reads it::

    from jaxarena.pallas import configs

    configs.load("h200.json")       # before steps are traced: a launch's config is chosen when it is traced

A config changes how fast a product is and nothing else: tuning only takes configs that give the default's bits.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxarena.pallas.frame import TileConfig

__all__ = ["Product", "Tuned", "choose", "clear", "fastest", "load", "use", "write"]

Table = Mapping[str, tuple[TileConfig, float]]
"""Configs, each with its speed on a large square product as a share of the first's."""


class Product(NamedTuple):
    """A kernel's launch, as far as its config depends on it: the result is ``[m, n]``, the contracted size k."""

    kernel: str
    m: int
    n: int
    k: int
    multiprocessors: int


class Tuned(NamedTuple):
    """What tuning found for a product, with its milliseconds and those of the default."""

    product: Product
    config: TileConfig
    milliseconds: float
    default_milliseconds: float


_IN_USE: dict[Product, TileConfig] = {}


def choose(product: Product, table: Table, few_rows: TileConfig | None = None) -> TileConfig:
    """What :func:`use` or :func:`load` gave for a product, else ``few_rows`` for up to 64 rows, else the table's fastest config."""
    if product in _IN_USE:
        return _IN_USE[product]
    if few_rows is not None and product.m <= 64:
        return few_rows
    return fastest(table, product.m, product.n, product.multiprocessors)


def fastest(table: Table, m: int, n: int, multiprocessors: int) -> TileConfig:
    """Of a table's configs the one with the most speed left at this size."""
    return max(table.values(), key=lambda entry: entry[1] * entry[0].used(m, n, multiprocessors))[0]


def use(found: Mapping[Product, TileConfig]) -> None:
    """Puts configs in use, for this process and launches traced from now on."""
    _IN_USE.update(found)


def clear() -> None:
    """Takes all configs out of use that :func:`use` and :func:`load` put there."""
    _IN_USE.clear()


def load(path: str | Path) -> list[Tuned]:
    """Puts the configs of a file that ``python -m jaxarena tune`` wrote in use, as :func:`use` does, and returns them.

    Those for another number of multiprocessors than the device has stay without effect.

    Raises:
      OSError: when the file cannot be read.
      ValueError: when it is no such file, naming what is wrong with it.
    """
    try:
        rows = json.loads(Path(path).read_text())["configs"]
        found = [_tuned(row) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no file of tuned configs: {type(error).__name__}: {error}") from error
    use({t.product: t.config for t in found})
    return found


def write(path: str | Path, found: Iterable[Tuned], about: Mapping[str, str]) -> None:
    """Writes what tuning found, below what it was found on and with (device, versions, date)."""
    rows = [
        {
            **t.product._asdict(),
            "config": dataclasses.asdict(t.config),
            "milliseconds": t.milliseconds,
            "default_milliseconds": t.default_milliseconds,
        }
        for t in found
    ]
    Path(path).write_text(json.dumps({**about, "configs": rows}, indent=1) + "\n")


def _tuned(row: dict[str, Any]) -> Tuned:
    product = Product(row["kernel"], *(int(row[name]) for name in Product._fields[1:]))
    return Tuned(product, TileConfig(**row["config"]), float(row["milliseconds"]), float(row["default_milliseconds"]))
