"""Random forms, and a simulator that runs a plan on a memory of stamps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st

from jaxarena.arena import ALIGN, Arena, Scratch
from jaxarena.lifetime import Alias, Form, Launch, Loop, Slot, Tensor
from jaxarena.panels import Layout, columns, full_view, row_spans, slice_groups, slice_rows

LAYOUTS = [Layout((8, 32), "f32", 1), Layout((2, 24, 100), "f32", 1), Layout((2, 16, 300), "int8x2", 1), Layout((700,), "i32", 0)]


@st.composite
def forms(draw) -> Form:
    """Launches that touch tensors, stacks and parts of them, some of it in loops; most arrays can be placed, some cannot."""
    n = draw(st.integers(2, 9))
    loops = _loops(draw, n)
    tensors, aliases = [], []
    for k in range(draw(st.integers(1, 4))):
        tensor = Tensor(f"t{k}", draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from([1, 1, 2, 3, 4])))
        tensors.append(tensor)
        aliases += _aliases(draw, tensor, loops)
    if draw(st.booleans()):
        aliases.append(Alias("own", "t0", Layout((8, 100), "int8", 1), None))
    allowed = [[*tensors, *(a for a in aliases if _allowed(a, loops, t))] for t in range(n)]
    launches = []
    for t in range(n):
        names = st.lists(st.sampled_from([part.name for part in allowed[t]]), max_size=3, unique=True).map(tuple)
        asked = (Scratch("partials", "f32", draw(st.sampled_from([4, 1500]))),) if draw(st.booleans()) else ()
        launches.append(Launch(f"launch{t}", draw(names) if t else (), draw(names), asked))
    outputs = frozenset({"t0"}) if draw(st.integers(0, 5)) == 0 else frozenset()
    return Form("random", tuple(tensors), tuple(aliases), tuple(launches), tuple(loops), frozenset(), outputs)


def _loops(draw, n: int) -> list[Loop]:
    loops: list[Loop] = []
    for k in range(draw(st.integers(0, 3))):
        first = draw(st.integers(0, n - 1))
        last = draw(st.integers(first, n - 1))
        crossed = (o.first < first <= o.last < last or first < o.first <= last < o.last for o in loops)
        if not any(crossed):
            loops.append(Loop(f"loop{k}", first, last, draw(st.sampled_from([0, 1, 2, 3, 3, 4]))))
    return loops


def _aliases(draw, tensor: Tensor, loops: list[Loop]) -> list[Alias]:
    layout, view = tensor.layout, full_view(tensor.layout)
    parts = [(layout, view)]
    if not layout.flat:
        half = 128 // layout.itemsize
        half = min(half, layout.columns)
        cuts = [columns(layout, view, 0, half), columns(layout, view, half, layout.columns)]
        cuts += [slice_rows(layout, view, 0, 8), slice_rows(layout, view, 8, layout.rows_per_group)]
        cuts += [slice_groups(layout, view, 1, layout.shape[0])] if len(layout.shape) > 2 else []
        parts += [cut for cut in cuts if cut]
    slots = [Slot(None, k) for k in range(tensor.slots)]
    for loop in loops:
        moving = [Slot(loop.name, 0, 1), Slot(loop.name, 1, 1), Slot(loop.name, loop.trips - 1, -1)]
        moving.append(Slot(loop.name, draw(st.integers(0, 1)), 1, 2))
        slots += [s for s in moving if all(0 <= int(s.at(np.array(i))) < tensor.slots for i in range(loop.trips))]
    aliases = []
    for k in range(draw(st.integers(0, 5))):
        part = draw(st.sampled_from(parts))
        aliases.append(Alias(f"{tensor.name}.{k}", tensor.name, *part, draw(st.sampled_from(slots))))
    if tensor.slots > 2:
        # A run of slots, and a slot of the run.
        aliases.append(Alias(f"{tensor.name}.run", tensor.name, layout, view, Slot(None, 1), tensor.slots - 1))
        aliases.append(Alias(f"{tensor.name}.run.last", f"{tensor.name}.run", layout, view, Slot(None, tensor.slots - 2)))
    return aliases


def _allowed(alias: Alias, loops: list[Loop], t: int) -> bool:
    return all(loop.first <= t <= loop.last for loop in loops if loop.name == alias.slot.loop)


def unrolled(form: Form) -> Iterator[tuple[int, dict[str, int]]]:
    """Every run of a launch, in order, with the iterations of the loops around it."""

    def run(first: int, last: int, loops: list[Loop], at: dict[str, int]) -> Iterator[tuple[int, dict[str, int]]]:
        t = first
        while t <= last:
            here = [loop for loop in loops if loop.first == t]
            if here:
                outer = max(here, key=lambda loop: loop.last)  # of equals the first
                inner = [loop for loop in loops if loop is not outer and outer.first <= loop.first and loop.last <= outer.last]
                rest = [loop for loop in loops if loop is not outer and loop not in inner]
                for i in range(outer.trips):
                    yield from run(outer.first, outer.last, inner, {**at, outer.name: i})
                t, loops = outer.last + 1, rest
            else:
                yield t, at
                t += 1

    return run(0, len(form.launches) - 1, list(form.loops), {})


def simulate(form: Form, arena: Arena) -> int:
    """Runs every launch on an arena of stamps beside a memory in which every home has bytes of its own.

    Each write stamps its part in both with a number never used before, each scratch stamps its bytes of the arena; each read
    compares the stamps. Returns how many reads were compared.
    """
    placed = {p.name: p for p in arena.placed}
    memory = np.full(arena.bytes // ALIGN, -1)
    homes = {name: np.full(-(-p.bytes // ALIGN), -1) for name, p in placed.items()}
    stamps = itertools.count()
    reads = 0
    for t, at in unrolled(form):
        launch = form.launches[t]
        for name in launch.reads:
            home, where = _granules(form, name, at)
            if home in placed:
                stamp = homes[home][where]
                assert (stamp >= 0).all(), f"launch {t} reads {name} before it is written"
                found = memory[placed[home].offset // ALIGN + where]
                np.testing.assert_array_equal(found, stamp, err_msg=f"launch {t} reads {name} at {at}")
                reads += 1
        for scratch in arena.scratch:
            if scratch.launch == t:
                memory[scratch.offset // ALIGN : -(-scratch.end // ALIGN)] = next(stamps)
        for name in launch.writes:
            home, where = _granules(form, name, at)
            if home in placed:
                stamp = np.arange(len(where)) + 1000 * next(stamps)
                homes[home][where] = stamp
                memory[placed[home].offset // ALIGN + where] = stamp
    return reads


def _granules(form: Form, name: str, at: dict[str, int]) -> tuple[str, np.ndarray]:
    """The home and which of its ALIGN-byte granules the part covers (of a quantized part only the words')."""
    part, slot = form.parts[name], 0
    layout, view, slots = part.layout, part.view if isinstance(part, Alias) else None, part.slots
    while isinstance(part, Alias) and part.view is not None:
        slot += int(part.slot.at(np.array(at.get(part.slot.loop or "", 0))))
        part = form.parts[part.of]
    within = [g for start, stop in row_spans(layout, view or full_view(layout)) for g in range(start // 8, stop // 8)]
    stride = part.layout.bytes // ALIGN
    return part.name, np.array([(slot + s) * stride + g for s in range(slots) for g in within], int)
