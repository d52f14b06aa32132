"""How long each array of a form lives, and which arrays live within the step.

**Lifetime.** A home lives from the first launch that touches it, through any alias, to the last. If it is touched inside a loop,
it lives through all of the loop when its bytes pass from one iteration to another or to the outside: it is touched outside too, a
slot of it depends on the loop's iteration, or the body reads some of it before writing it. Inner loops are settled first.

**Placeable.** A home is placed only if no launch can read bytes of it that the step has not written: not an input or output, and
every read finds its part written, whole or part by part. To decide this exactly, a home's rows are cut into *cells* at the edges of
every part that some launch touches, and each write stamps its cells, slot by slot and iteration by iteration, with the time on the
unrolled clock at which they are first written (the earliest stamp wins); a read is good when all of its cells carry an earlier
stamp. Iterations of a loop on which no slot of the home depends write the same cells again, so the first one decides.

The unrolled clock ticks once a launch: iteration ``i`` of a loop starts ``i`` body lengths after the loop does. A launch reads before
it writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from jaxarena._arena_types import Scratch
from jaxarena._form import Alias, Form, Launch, Loop, Slot, Tensor, Times, Touch, span_array
from jaxarena.panels import Layout, View, row_spans

__all__ = ["Alias", "Form", "Launch", "Loop", "Slot", "Tensor", "home", "live_ranges", "placeable", "scratch"]


def home(form: Form, name: str) -> str:
    """The tensor whose array a touch of ``name`` lands in: through every alias, the tensor it is a part of; but a quantized alias
    whose rows start inside a block is a home of its own.

    Raises:
      ValueError: for a name the form does not have.
    """
    if name not in form.parts:
        raise ValueError(f"home: form {form.name!r} has no tensor or alias {name!r}")
    return form.chain(name).home


def scratch(form: Form, launch: int) -> tuple[Scratch, ...]:
    """The scratch that launch number ``launch`` of the form asks for.

    Raises:
      ValueError: for a number the form does not have.
    """
    if not 0 <= launch < len(form.launches):
        raise ValueError(f"scratch: form {form.name!r} has launches 0 to {len(form.launches) - 1}, got {launch}")
    return form.launches[launch].scratch


def live_ranges(form: Form) -> dict[str, tuple[int, int]]:
    """For each touched home the first and last launch it lives for, both included."""
    return {name: _live_range(form, form.touches[name]) for name in _touched(form)}


def placeable(form: Form) -> tuple[str, ...]:
    """The homes that live within the step, in the form's order: touched, no input or output or home of one, and never read before
    the part that is read is written."""
    outside = {home(form, name) for name in form.inputs | form.outputs}
    return tuple(name for name in _touched(form) if name not in outside and not _reads_unwritten(form, form.touches[name]))


def _touched(form: Form) -> list[str]:
    return [part.name for part in form.homes if part.name in form.touches]


def _live_range(form: Form, touches: Sequence[Touch]) -> tuple[int, int]:
    first, last = touches[0].launch, touches[-1].launch
    for loop in reversed(_loops_at(form, touches)):
        inside = [touch for touch in touches if loop.first <= touch.launch <= loop.last]
        if len(inside) < len(touches) or any(loop.name in touch.chain.loops for touch in inside) or _reads_unwritten(form, inside):
            first, last = min(first, loop.first), max(last, loop.last)
    return first, last


def _loops_at(form: Form, touches: Iterable[Touch]) -> list[Loop]:
    """The loops with a touch inside, outer to inner."""
    if not form.loops:
        return []
    names = {loop.name for touch in touches for loop in form.loops_around[touch.launch]}
    return [loop for loop in form.outer_to_inner if loop.name in names]


def _reads_unwritten(form: Form, touches: Sequence[Touch]) -> bool:
    """Whether some touch reads a cell that none of ``touches`` has written by then."""
    if not any(not touch.write for touch in touches):
        return False
    parent = form.parts[touches[0].chain.home]
    always_whole = parent.slots == 1 and all(_whole(touch.chain.layout, touch.chain.view, parent.layout.part_rows) for touch in touches)
    if always_whole and all(loop.trips for loop in form.loops):
        # Always the whole array: the first touch in program order decides, whatever the loops.
        return not touches[0].write
    return _stamped_late(form, touches, parent)


def _stamped_late(form: Form, touches: Sequence[Touch], parent: Tensor | Alias) -> bool:
    """The general case of :func:`_reads_unwritten`, by stamps on cells."""
    spans = [span_array(touch.chain.layout, touch.chain.view) for touch in touches]
    edges = np.unique(np.concatenate([s.ravel() for s in spans]))
    if len(edges) < 2:
        return False
    cells = [_cells(edges, s) for s in spans]
    moving = frozenset(name for touch in touches for name in touch.chain.loops)
    events = [_unroll(form, touch, moving) for touch in touches]
    never = np.iinfo(np.int64).max
    stamps = np.full((parent.slots, len(edges) - 1), never)
    for touch, inside, (slots, times) in zip(touches, cells, events, strict=True):
        if touch.write:
            np.minimum.at(stamps, (slots[:, None], inside[None, :]), times[:, None])
    for touch, inside, (slots, times) in zip(touches, cells, events, strict=True):
        if not touch.write and np.any(stamps[slots[:, None], inside[None, :]] >= times[:, None]):
            return True
    return False


@lru_cache(maxsize=4096)
def _whole(layout: Layout, view: View, part_rows: int) -> bool:
    return row_spans(layout, view) == ((0, part_rows),)


def _cells(edges: npt.NDArray[np.int64], spans: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The numbers of the cells between ``edges`` that the spans cover."""
    starts, stops = np.searchsorted(edges, spans).T
    return np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)]) if len(spans) else np.zeros(0, np.int64)


def _unroll(form: Form, touch: Touch, moving: frozenset[str]) -> tuple[Times, Times]:
    """Every slot a touch lands in and when, with all iterations of the ``moving`` loops and the first of the others."""
    around = form.loops_around[touch.launch]
    counts = [loop.trips if loop.name in moving else min(loop.trips, 1) for loop in around]
    grids = [g.ravel() for g in np.indices(counts)] if around else []
    n = math.prod(counts)
    iteration = {loop.name: grid for loop, grid in zip(around, grids, strict=True)}
    slots = np.zeros(n, np.int64)
    for slot in touch.chain.slot:
        slots = slots + slot.at(iteration[slot.loop] if slot.loop is not None else np.zeros(n, np.int64))
    base, body = form.clock
    times = np.full(n, base[touch.launch])
    for loop in around:
        times = times + iteration[loop.name] * body[loop.name]
    run = np.arange(touch.chain.slots)
    return (slots[:, None] + run).ravel(), np.repeat(times, len(run))
