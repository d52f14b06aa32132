"""The step-local memory of a form: one arena that holds every array computed and read within the step.

An array is placed by its lifetime, from the first launch that touches it to the last, through any view of it, and shares bytes
with arrays that do not live beside it. A launch's scratch lives there while the launch runs. What this module offers is defined
in :mod:`jaxarena.lifetime` (forms, homes, lifetimes), :mod:`jaxarena.panels` (how an array lies in arena rows) and
:mod:`jaxarena.planner` (offsets). Nothing here imports JAX.
"""

from __future__ import annotations

from jaxarena._arena_types import ALIGN, ROW_BYTES, Arena, GiB, KiB, MiB, Placed, PlacedScratch, Scratch, round_up
from jaxarena.lifetime import home, scratch
from jaxarena.panels import array_bytes, quant_parts
from jaxarena.planner.place import place

__all__ = [
    "ALIGN",
    "ROW_BYTES",
    "Arena",
    "GiB",
    "KiB",
    "MiB",
    "Placed",
    "PlacedScratch",
    "Scratch",
    "array_bytes",
    "home",
    "place",
    "quant_parts",
    "round_up",
    "scratch",
]
