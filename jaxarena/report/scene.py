"""What a picture of a plan shows, before it is drawn: a box for each array and scratch, a colour group for each kind of launch.

**Kinds.** An array is named after the launch that makes it, and names that begin with the same word belong together: ``project.3``,
``project_dx.1`` and ``kept layer0/project.2`` are one kind, labelled by the words that its names share (``project``; ``rms_norm`` for
``rms_norm`` and ``rms_norm_dx``). A kind's size is the area of its boxes, bytes times launches. The largest kinds get a colour each,
in this order; what is left shares one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from jaxarena._arena_types import ALIGN, Placed, PlacedScratch, round_up

if TYPE_CHECKING:
    from jaxarena.plan import Plan

__all__ = ["OTHER", "PALETTE", "Box", "Scene", "ink_on", "kinds_of", "scene"]

PALETTE = ("#4c78d8", "#f0a029", "#2ba38d", "#e5604d", "#8f67dc", "#86b93f", "#dd6aa8", "#53b4e0", "#a8795a", "#c4b23a")
"""A colour for each of the largest kinds, largest first. They are told apart on white and on black."""

OTHER = "#8b93a1"
"""The colour that the remaining kinds share."""

_ROLES = ("kept", "carry", "join")


@dataclass(frozen=True)
class Box:
    """One array or scratch: ``bytes`` from byte ``offset``, launches ``first`` to ``last``, both included.

    Attributes:
      detail: its shape, storage and slots, in words.
      kind: its index into the scene's kinds.
      slots: how many equal arrays it stacks.
      scratch: whether it is a launch's scratch.
      writes, reads: the launches that write and read it, in order.
    """

    name: str
    detail: str
    kind: int
    slots: int
    bytes: int
    offset: int
    first: int
    last: int
    scratch: bool
    writes: tuple[int, ...]
    reads: tuple[int, ...]


@dataclass(frozen=True)
class Scene:
    """What all pictures of a plan show.

    Attributes:
      kinds: the kinds' labels and colours, largest first.
      launch_kinds: for each launch the index of its kind.
      live, xla: for each launch the bytes that live in the arena, and the estimated bytes of XLA's temporaries.
      unshared: bytes that the boxes would take without sharing.
    """

    boxes: tuple[Box, ...]
    kinds: tuple[tuple[str, str], ...]
    launch_kinds: tuple[int, ...]
    live: tuple[int, ...]
    xla: tuple[int, ...]
    unshared: int


def scene(plan: Plan) -> Scene:
    """What to draw of ``plan``."""
    form, arena = plan.form, plan.arena
    placed: list[tuple[str, Placed | PlacedScratch]] = [(p.name, p) for p in arena.placed]
    placed += [(f"{form.launches[s.launch].name} {s.tag}", s) for s in arena.scratch]
    labels = kinds_of([*(name for name, _ in placed), *(launch.name for launch in form.launches)])
    area: defaultdict[str, int] = defaultdict(int)
    for name, p in placed:
        first, last = _life(p)
        area[labels[name]] += p.bytes * (last - first + 1)
    ranked = sorted(set(labels.values()), key=lambda label: (-area[label], label))
    kinds = list(zip(ranked, PALETTE, strict=False))
    if rest := ranked[len(PALETTE) :]:
        kinds.append((rest[0] if len(rest) == 1 else f"{len(rest)} others", OTHER))
    index = {label: min(k, len(PALETTE)) for k, label in enumerate(ranked)}
    return Scene(
        boxes=tuple(_box(plan, name, p, index[labels[name]]) for name, p in placed),
        kinds=tuple(kinds),
        launch_kinds=tuple(index[labels[launch.name]] for launch in form.launches),
        live=tuple(arena.live_bytes(t) for t in range(len(form.launches))),
        xla=tuple(plan.xla_bytes_at(t) for t in range(len(form.launches))),
        unshared=sum(round_up(p.bytes, ALIGN) for _, p in placed),
    )


def kinds_of(names: Iterable[str]) -> dict[str, str]:
    """The label of each name's kind."""
    words = {name: _words(name) for name in names}
    families: defaultdict[str, list[list[str]]] = defaultdict(list)
    for found in words.values():
        families[found[0]].append(found)
    labels = {
        head: "_".join(column[0] for column in takewhile(lambda column: len(set(column)) == 1, zip(*family, strict=False)))
        for head, family in families.items()
    }
    return {name: labels[found[0]] for name, found in words.items()}


def ink_on(colour: str) -> str:
    """Black or white, whichever is better read on ``colour`` (relative luminance of WCAG 2)."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"


def _words(name: str) -> list[str]:
    """The words of a name without its role, scope, part and numbers: ``kept layer0/rms_norm_dx.3`` is rms, norm, dx."""
    role, _, rest = name.partition(" ")
    stem = (rest if role in _ROLES and rest else name).split(" ")[0].split("/")[-1]
    words = [word.rstrip("0123456789") for word in re.split(r"[\W_]+", stem)]
    return [word for word in words if word] or ["unnamed"]


def _life(p: Placed | PlacedScratch) -> tuple[int, int]:
    return (p.first, p.last) if isinstance(p, Placed) else (p.launch, p.launch)


def _box(plan: Plan, name: str, p: Placed | PlacedScratch, kind: int) -> Box:
    first, last = _life(p)
    if isinstance(p, PlacedScratch):
        return Box(name, "scratch", kind, 1, p.bytes, p.offset, first, last, True, (first,), (first,))
    part, touches = plan.form.parts[name], plan.form.touches[name]
    detail = f"{part.layout.storage} {list(part.layout.shape)}" + (f", {part.slots} slots" if part.slots > 1 else "")
    writes = tuple(dict.fromkeys(t.launch for t in touches if t.write))
    reads = tuple(dict.fromkeys(t.launch for t in touches if not t.write))
    return Box(name, detail, kind, part.slots, p.bytes, p.offset, first, last, False, writes, reads)
