"""A form as the planner sees it: launches over homes, aliases of homes, loops.

A **form** is a list of launches; a launch's position in it is its time. Launches ``first`` to ``last`` of a **loop** are its body,
planned once. A **tensor** is a home: an array of its own, or a stack of ``slots`` equal arrays. An **alias** is a part of a home:
a view within one slot, and which slot that is may move with a loop's iteration.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxarena._arena_types import Scratch
from jaxarena.panels import Layout, View, full_view, row_spans

__all__ = ["Alias", "Chain", "Form", "Launch", "Loop", "Slot", "Tensor", "Times", "Touch", "span_array"]

Times = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tensor:
    """A home: an array, or a stack of ``slots`` equal arrays, ``layout.bytes`` apart.

    ``saved`` is how many bytes less that is than in the array's own storage, where it is kept in another.
    """

    name: str
    layout: Layout
    slots: int = 1
    saved: int = 0

    @property
    def bytes(self) -> int:
        return self.slots * self.layout.bytes


@dataclass(frozen=True)
class Slot:
    """Which slot: ``(start + step * i) % modulus`` in iteration ``i`` (from 0) of ``loop``; ``start`` when ``loop`` is None."""

    loop: str | None = None
    start: int = 0
    step: int = 0
    modulus: int | None = None

    def at(self, iteration: Times) -> Times:
        """The slots in these iterations."""
        slots = self.start + self.step * iteration
        return slots if self.modulus is None else slots % self.modulus


_FIRST = Slot()


@dataclass(frozen=True)
class Alias:
    """A part of the tensor or alias ``of``.

    Attributes:
      layout: how the part lies.
      view: where, from the first row of a slot of the *home*. None: the part is quantized and its rows start inside a block (or
        what it is a part of is stored otherwise), so its storage is a home of its own.
      slot: which slot, or the first of a run of slots, counted from the first slot of ``of``.
      slots: 1, or the length of a run of whole slots.
    """

    name: str
    of: str
    layout: Layout
    view: View | None
    slot: Slot = _FIRST
    slots: int = 1

    @property
    def bytes(self) -> int:
        return self.slots * self.layout.bytes


@dataclass(frozen=True)
class Launch:
    """One launch, the unit of time: the tensors and aliases it reads and writes, and the scratch it needs while it runs."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    scratch: tuple[Scratch, ...] = ()


@dataclass(frozen=True)
class Loop:
    """Launches ``first`` to ``last``, both included, run ``trips`` times."""

    name: str
    first: int
    last: int
    trips: int


@dataclass(frozen=True)
class Form:
    """One variant of a step.

    Of two loops over the same launches, the one listed first is the outer.

    Attributes:
      inputs, outputs: what the step takes and returns (tensors or aliases): never placed.

    Raises:
      ValueError: for names that are unknown, used twice or form a cycle; for parts outside what they are a part of; for loops that
        cross or run past the launches; for a slot of a loop that does not hold the launch.
    """

    name: str
    tensors: tuple[Tensor, ...]
    aliases: tuple[Alias, ...]
    launches: tuple[Launch, ...]
    loops: tuple[Loop, ...]
    inputs: frozenset[str]
    outputs: frozenset[str]

    def __post_init__(self) -> None:
        _check_names(self)
        _check_loops(self)
        for alias in self.aliases:
            _check_alias(self, alias)
        _check_touches(self)

    @cached_property
    def parts(self) -> dict[str, Tensor | Alias]:
        """Every tensor and alias by name."""
        tensors: dict[str, Tensor | Alias] = {part.name: part for part in self.tensors}
        return tensors | {part.name: part for part in self.aliases}

    @cached_property
    def homes(self) -> tuple[Tensor | Alias, ...]:
        """The tensors, then the aliases that are homes of their own."""
        return (*self.tensors, *(a for a in self.aliases if a.view is None))

    @cached_property
    def loop_by_name(self) -> dict[str, Loop]:
        return {loop.name: loop for loop in self.loops}

    @cached_property
    def outer_to_inner(self) -> tuple[Loop, ...]:
        """The loops, each after every loop around it."""
        return tuple(sorted(self.loops, key=lambda loop: loop.first - loop.last))

    @cached_property
    def loops_around(self) -> tuple[tuple[Loop, ...], ...]:
        """For each launch the loops it is in, outer to inner."""
        around: list[list[Loop]] = [[] for _ in self.launches]
        for loop in self.outer_to_inner:
            for t in range(loop.first, loop.last + 1):
                around[t].append(loop)
        return tuple(map(tuple, around))

    @cached_property
    def touches(self) -> dict[str, tuple[Touch, ...]]:
        """For each touched home its touches by launch, reads before writes."""
        touches: dict[str, list[Touch]] = {}
        for t, launch in enumerate(self.launches):
            for write, names in ((False, launch.reads), (True, launch.writes)):
                for name in names:
                    chain = self.chain(name)
                    touches.setdefault(chain.home, []).append(Touch(t, write, name, chain))
        return {name: tuple(found) for name, found in touches.items()}

    @cached_property
    def clock(self) -> tuple[list[int], dict[str, int]]:
        """The unrolled clock: each launch's time in the first iteration of the loops around it, and each loop's body length."""
        time = 0
        base: list[int] = []
        start: dict[str, int] = {}
        body: dict[str, int] = {}
        for t in range(len(self.launches)):
            start |= {loop.name: time for loop in self.loops_around[t] if loop.first == t}
            base.append(time)
            time += 1
            for loop in reversed(self.loops_around[t]):
                if loop.last == t:
                    body[loop.name] = time - start[loop.name]
                    time = start[loop.name] + loop.trips * body[loop.name]
        return base, body

    def chain(self, name: str) -> Chain:
        """How the tensor or alias ``name`` lies in its home, through every alias."""
        path = []
        while name not in self._chains:
            part = self.parts[name]
            path.append(part)
            if isinstance(part, Tensor) or part.view is None:
                break
            name = part.of
        for part in reversed(path):
            if isinstance(part, Tensor) or part.view is None:
                self._chains[part.name] = Chain(part.name, part.layout, full_view(part.layout), (), part.slots)
            else:
                whole = self._chains[part.of]
                slot = whole.slot if part.slot == _FIRST else (*whole.slot, part.slot)
                self._chains[part.name] = Chain(whole.home, part.layout, part.view, slot, part.slots)
        return self._chains[path[0].name if path else name]

    @cached_property
    def _chains(self) -> dict[str, Chain]:
        """What :meth:`chain` has found so far."""
        return {}


class Chain(NamedTuple):
    """How a part lies in its home: in each slot the rows of ``layout`` at ``view``; the slots are the sum of ``slot`` terms, or a
    run of ``slots`` from there."""

    home: str
    layout: Layout
    view: View
    slot: tuple[Slot, ...]
    slots: int

    @property
    def loops(self) -> frozenset[str]:
        """The loops on whose iteration the slot depends."""
        return frozenset(s.loop for s in self.slot if s.loop is not None)


class Touch(NamedTuple):
    """Launch ``launch`` reads or writes the part ``name`` of a home."""

    launch: int
    write: bool
    name: str
    chain: Chain


@lru_cache(maxsize=4096)
def span_array(layout: Layout, view: View) -> npt.NDArray[np.int64]:
    """:func:`~jaxarena.panels.row_spans` as ``[runs, 2]``."""
    return np.array(row_spans(layout, view), np.int64).reshape(-1, 2)


def _check_names(form: Form) -> None:
    seen: set[str] = set()
    every: list[Tensor | Alias] = [*form.tensors, *form.aliases]
    for part in every:
        if part.name in seen:
            raise ValueError(f"Form {form.name!r}: the name {part.name!r} is used twice")
        if part.slots < 1:
            raise ValueError(f"Form {form.name!r}: {part.name!r} must have at least one slot, got {part.slots}")
        seen.add(part.name)
    uses: list[tuple[str, tuple[str, ...]]] = [(f"alias {a.name!r}", (a.of,)) for a in form.aliases]
    uses += [(f"launch {t} ({launch.name})", (*launch.reads, *launch.writes)) for t, launch in enumerate(form.launches)]
    uses += [("inputs", tuple(form.inputs)), ("outputs", tuple(form.outputs))]
    for where, names in uses:
        for name in names:
            if name not in seen:
                raise ValueError(f"Form {form.name!r}: {where} names {name!r}, which is no tensor or alias")
    for t, launch in enumerate(form.launches):
        tags = [s.tag for s in launch.scratch]
        if len(set(tags)) < len(tags):
            raise ValueError(f"Form {form.name!r}: launch {t} ({launch.name}) has two scratches of one tag: {sorted(tags)}")
    of = {a.name: a.of for a in form.aliases}
    acyclic: set[str] = set()
    for name in of:
        path: set[str] = set()
        while name in of and name not in acyclic:
            if name in path:
                raise ValueError(f"Form {form.name!r}: the aliases {sorted(path)} are parts of each other")
            path.add(name)
            name = of[name]
        acyclic |= path


def _check_loops(form: Form) -> None:
    seen: set[str] = set()
    for loop in form.loops:
        if loop.name in seen:
            raise ValueError(f"Form {form.name!r}: the loop name {loop.name!r} is used twice")
        seen.add(loop.name)
        if not 0 <= loop.first <= loop.last < len(form.launches) or loop.trips < 0:
            raise ValueError(
                f"Form {form.name!r}: loop {loop.name!r} runs launches {loop.first} to {loop.last} {loop.trips} times; "
                f"the form has launches 0 to {len(form.launches) - 1}"
            )
    open_loops: list[Loop] = []
    for loop in sorted(form.loops, key=lambda loop: (loop.first, -loop.last)):
        while open_loops and open_loops[-1].last < loop.first:
            open_loops.pop()
        if open_loops and open_loops[-1].last < loop.last:
            raise ValueError(f"Form {form.name!r}: loops {open_loops[-1].name!r} and {loop.name!r} cross")
        open_loops.append(loop)


def _check_alias(form: Form, alias: Alias) -> None:
    where = f"Form {form.name!r}: alias {alias.name!r} of {alias.of!r}"
    if alias.view is None:
        if not alias.layout.quantized or alias.slot != _FIRST:
            raise ValueError(f"{where}: only quantized storage of its own, in all its slots, has no view; got {alias.layout}, {alias.slot}")
        return
    whole = form.chain(alias.of)
    parent = form.parts[whole.home]
    same = alias.layout.storage == parent.layout.storage if alias.layout.quantized else not parent.layout.quantized
    if not same:
        raise ValueError(f"{where}: stored as {alias.layout.storage} within {parent.name!r}, stored as {parent.layout.storage}")
    spans = span_array(alias.layout, alias.view)
    if spans.size and (spans.min() < 0 or spans.max() > parent.layout.part_rows):
        rows = parent.layout.part_rows
        raise ValueError(f"{where}: {alias.layout} at {alias.view} covers rows outside the {rows} of a slot of {parent.name!r}")
    if alias.slots > 1 and alias.layout.bytes != parent.layout.bytes:
        raise ValueError(f"{where}: a run of slots must be of whole slots of {parent.layout.bytes} bytes, got {alias.layout.bytes}")
    if alias.slot.loop is not None and alias.slot.loop not in form.loop_by_name:
        raise ValueError(f"{where}: its slot depends on {alias.slot.loop!r}, which is no loop")
    if alias.slot.modulus is not None and alias.slot.modulus < 1:
        raise ValueError(f"{where}: the slot's modulus must be at least 1, got {alias.slot.modulus}")
    slots = alias.slot.at(np.arange(form.loop_by_name[alias.slot.loop].trips if alias.slot.loop is not None else 1))
    if slots.size and (slots.min() < 0 or slots.max() + alias.slots > whole.slots):
        raise ValueError(f"{where}: reaches slots {slots.min()} to {slots.max() + alias.slots - 1} of {whole.slots}")


def _check_touches(form: Form) -> None:
    for touches in form.touches.values():
        for touch in touches:
            if outside := touch.chain.loops - {loop.name for loop in form.loops_around[touch.launch]}:
                raise ValueError(
                    f"Form {form.name!r}: launch {touch.launch} ({form.launches[touch.launch].name}) touches {touch.name!r}, whose slot "
                    f"depends on loop {min(outside)!r}, outside that loop"
                )
