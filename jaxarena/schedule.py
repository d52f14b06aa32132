"""From a graph and the residence of its values to what the planner plans and the executor runs.

Launches stand in the order of the trace. Equations of XLA's between two launches make one **region**, which counts as a launch: it
reads what it needs of the arena when it starts and writes what loops keep of its results when it ends. A loop's body is listed once.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

from jaxarena.arena import Scratch
from jaxarena.dispatch import fallback
from jaxarena.graph import Atom, Block, Copy, Equation, Loop, Node, Value, values
from jaxarena.kept import keep
from jaxarena.lifetime import Alias, Form, Launch, Slot, Tensor
from jaxarena.lifetime import Loop as LoopSpan
from jaxarena.loops import decide
from jaxarena.panels import full_view
from jaxarena.plan import Temporary
from jaxarena.residence import Home, Residences
from jaxarena.storage import STORAGE_OF_DTYPE
from jaxarena.trace import Graph

__all__ = ["Region", "Repeat", "Schedule", "Step", "schedule"]


@dataclasses.dataclass(eq=False)
class Region:
    """Equations of XLA's, run as one. ``outputs`` are the values that something after the region reads."""

    equations: list[Equation]
    inputs: list[Value]
    outputs: list[Value]


@dataclasses.dataclass(eq=False)
class Repeat:
    """A loop whose body is a list of steps."""

    loop: Loop
    body: list[Step]


Step = Equation | Region | Repeat


@dataclasses.dataclass(eq=False)
class Schedule:
    """A step ready to be planned (``form``) and run (``steps``).

    ``fallbacks`` says of each launch of ours why it does not run as a kernel (None: it does), ``reasons`` the same of the form's launches.
    """

    graph: Graph
    residences: Residences
    steps: list[Step]
    form: Form
    home_names: dict[Home, str]
    temporaries: tuple[Temporary, ...]
    fallbacks: dict[Equation, str | None]
    reasons: tuple[str | None, ...]


def schedule(graph: Graph, name: str, policy: Mapping[str, str | None] | None = None) -> Schedule:
    """Decides where every value lives and in which order launches run. The graph's blocks are rewritten on the way.

    ``policy`` is the storage of what is kept for the backward pass, as :func:`jaxarena.kept.keep` takes it.
    """
    residences = Residences(keep(graph, policy or {}))
    decide(residences, graph.block, set(values(graph.outputs)))
    steps = _steps(graph.block, set(values(graph.outputs)), residences)
    return _Writer(graph, residences, steps, name).schedule()


def _steps(block: Block, needed: set[Value], residences: Residences) -> list[Step]:
    """Groups the equations of a block into regions; ``needed`` is what is read when the block ends."""
    groups: list[Node | list[Equation]] = []
    for node in block.nodes:
        if isinstance(node, Loop) or node.launch is not None:
            groups.append(node)
        elif groups and isinstance(groups[-1], list) and _is_copy(node, residences) == _is_copy(groups[-1][0], residences):
            groups[-1].append(node)
        else:
            groups.append([node])
    steps: list[Step] = []
    live = set(needed)
    for group in reversed(groups):
        if isinstance(group, Loop):
            body_needs = set(values([*group.carry_outs, *group.ys]))
            steps.append(Repeat(group, _steps(group.body, body_needs, residences)))
            live.update(values(group.inputs))
        elif isinstance(group, Equation):
            steps.append(group)
            live.update(values(group.inputs))
        else:
            made = {v for e in group for v in e.outputs}
            read = [v for e in group for v in values(e.inputs) if v not in made]
            outputs = [v for e in group for v in e.outputs if v in live or v in residences]
            steps.append(Region(group, list(dict.fromkeys(read)), outputs))
            live.update(read)
    return steps[::-1]


class _Writer:
    """Writes the form: names homes and their parts, lists launches, loops and XLA's temporaries."""

    def __init__(self, graph: Graph, residences: Residences, steps: list[Step], name: str):
        self.graph, self.residences, self.steps, self.name = graph, residences, steps, name
        self.launches: list[Launch] = []
        self.loops: list[LoopSpan] = []
        self.loop_names: dict[str, str] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self.taken: set[str] = set()
        self.home_names: dict[Home, str] = {}
        self.value_names: dict[Value, str] = {}
        self.tensors: list[Tensor] = []
        self.aliases: list[Alias] = []
        # Of XLA's arrays: what makes them, and the launches between which they live.
        self.maker: dict[Value, str] = {}
        self.fallbacks: dict[Equation, str | None] = {}
        self.reasons: list[str | None] = []
        self.first: dict[Value, int] = {}
        self.last: dict[Value, int] = {}

    def schedule(self) -> Schedule:
        self._write(self.steps)
        form = Form(self.name, tuple(self.tensors), tuple(self.aliases), tuple(self.launches), tuple(self.loops), frozenset(), frozenset())
        returned = set(values(self.graph.outputs))
        temporaries = [
            Temporary(f"{self.maker[v]} {v.aval.str_short()}", v.aval.size * v.aval.dtype.itemsize, first, self.last[v])
            for v, first in self.first.items()
            if v not in returned and self.last.get(v, first) > first and hasattr(v.aval.dtype, "itemsize")
        ]
        return Schedule(
            self.graph, self.residences, self.steps, form, self.home_names, tuple(temporaries), self.fallbacks, tuple(self.reasons)
        )

    def _write(self, steps: list[Step]) -> None:
        for step in steps:
            if isinstance(step, Repeat):
                self._write_loop(step)
            elif isinstance(step, Region):
                self._launch(_region_name(step, self.residences), step.inputs, step.outputs, step.equations[0].scope)
            else:
                launch = step.launch
                assert launch is not None
                scratch = launch.scratch(*(a.aval for a in step.inputs), **step.params)
                self.fallbacks[step] = fallback(step, self.residences)
                self._launch(launch.name, step.inputs, step.outputs, step.scope, scratch, self.fallbacks[step])

    def _launch(
        self,
        name: str,
        inputs: list[Atom] | list[Value],
        outputs: list[Value],
        scope: str = "",
        scratch: tuple[Scratch, ...] = (),
        fallback: str | None = "it is a region of XLA's",
    ) -> None:
        index = len(self.launches)
        name = self._numbered(f"{scope}/{name}" if scope else name)
        reads = tuple(dict.fromkeys(self._name(v, name) for v in values(inputs) if v in self.residences))
        writes = tuple(dict.fromkeys(self._name(v, name) for v in outputs if v in self.residences))
        self.launches.append(Launch(name, reads, writes, scratch))
        self.reasons.append(fallback)
        self._touch(values(inputs), index)
        self._make(outputs, name, index)

    def _make(self, made: list[Value], maker: str, index: int) -> None:
        for v in made:
            if v not in self.residences:
                self.maker[v], self.first[v] = maker, index

    def _touch(self, read: collections.abc.Iterable[Value], index: int) -> None:
        for v in read:
            if v in self.first:
                self.last[v] = index

    def _write_loop(self, repeat: Repeat) -> None:
        loop = repeat.loop
        name = self._numbered("scan")
        self.loop_names[str(id(loop))] = name
        # What the loop starts from and scans over as XLA arrays is read of the arena before it; what it hands on, at each turn's end.
        enters = [a for a, v in zip((*loop.init, *loop.xs), (*loop.carries, *loop.elements), strict=True) if v not in self.residences]
        if any(v in self.residences for v in values(enters)):
            self._launch(f"{name} enters", enters, [])
        first = len(self.launches)
        self._touch(values(enters), first)
        self._make(loop.carries, f"{name} carry", first)
        self._make(loop.elements, f"{name} slice", first)
        self._write(repeat.body)
        leaves = [a for a, v in zip((*loop.carry_outs, *loop.ys), loop.outputs, strict=True) if v not in self.residences]
        if any(v in self.residences for v in values(leaves)):
            self._launch(f"{name} leaves", leaves, [])
        last = len(self.launches) - 1
        self.loops.append(LoopSpan(name, first, last, loop.length))
        self._touch(values(leaves), last)
        # Outer arrays that the body reads are read until the last turn; XLA's carries and stacks live through all of it.
        inside = {v for v, at in self.first.items() if at >= first}
        self.last.update({v: last for v in values(loop.inputs) if v in self.first and v not in inside})
        self.last.update({v: last for v in loop.carries if v in self.first})
        self._make(loop.outputs, f"{name} result", first)

    def _name(self, value: Value, launch: str) -> str:
        """The name of a value in the arena; when ``launch`` is the first to touch it, its home and its part are entered."""
        if value in self.value_names:
            return self.value_names[value]
        place = self.residences[value].resolved()
        home = place.home
        if home not in self.home_names:
            copy = self.residences.copies.get(value)
            self.home_names[home] = self._free(f"{home.role} {copy.name if copy else launch}".strip())
            self.tensors.append(Tensor(self.home_names[home], home.layout, home.slots, _saved(home, copy)))
        if self.residences[value].is_whole:
            name = self.home_names[home]
        else:
            name = self._free(f"{self.home_names[home]} part")
            slot = (
                Slot(self.loop_names[place.slot.loop], place.slot.start, place.slot.step, place.slot.modulus)
                if place.slot.loop
                else place.slot
            )
            # A run of slots counts as read whole, also where only a part of each slot is.
            layout, view = (place.layout, place.view) if place.run is None else (home.layout, full_view(home.layout))
            self.aliases.append(Alias(name, self.home_names[home], layout, view, slot, place.run or 1))
        self.value_names[value] = name
        return name

    def _numbered(self, name: str) -> str:
        self.counts[name] += 1
        return f"{name}.{self.counts[name]}"

    def _free(self, name: str) -> str:
        """``name``, or with a number of its own where it is taken (a launch with several results, several parts of a home)."""
        free, k = name, 1
        while free in self.taken:
            k += 1
            free = f"{name}:{k}"
        self.taken.add(free)
        return free


def _is_copy(equation: Equation, residences: Residences) -> bool:
    """Whether an equation makes the copy of an array for the backward pass."""
    return any(v in residences.copies for v in equation.outputs)


def _region_name(region: Region, residences: Residences) -> str:
    if _is_copy(region.equations[0], residences):
        return "keep"
    return "copy" if all(e.primitive.name == "copy" for e in region.equations) else "xla"


def _saved(home: Home, copy: Copy | None) -> int:
    """The bytes that a copy for the backward pass takes less than the array itself would."""
    if copy is None:
        return 0
    raw = dataclasses.replace(home.layout, storage=STORAGE_OF_DTYPE[copy.source.aval.dtype])
    return home.slots * (raw.bytes - home.layout.bytes)
