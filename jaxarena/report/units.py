"""Byte counts as people read them, in binary units, and round marks for an axis of bytes."""

from __future__ import annotations

__all__ = ["human", "marks", "plain"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def human(count: int) -> str:
    """Three digits and a unit: ``512 B``, ``1.50 KiB``, ``12.0 MiB``, ``0.98 GiB`` for 1000 MiB."""
    if count < 1000:
        return f"{count} B"
    value, unit = _scaled(count, below=1000)
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def plain(count: int) -> str:
    """Without needless digits, for marks: ``1.5 GiB``, ``256 KiB``, ``0``."""
    value, unit = _scaled(count, below=1024)
    return f"{value:g} {unit}" if count else "0"


def marks(top: int) -> list[int]:
    """From 0 to at most ``top``: four to eight multiples of a power of two (just 0 when ``top`` is 0)."""
    step = 1
    while step * 8 <= top:
        step *= 2
    return list(range(0, top + 1, step)) if top else [0]


def _scaled(count: int, below: int) -> tuple[float, str]:
    value, place = float(count), 0
    while value >= below and place + 1 < len(_UNITS):
        value, place = value / 1024, place + 1
    return value, _UNITS[place]
