"""Whether a plan is right, found out the slow way.

Nothing here is shared with what made the plan. For each array the form's loops are unrolled, every touch of the array becomes an
event that lists the eight-row granules it covers, and a walk backwards over the events keeps the set of granules whose bytes some later
launch reads: classic liveness. While the set is not empty the array must keep its place, so all launches between two such events,
all of a loop when they lie in different iterations of it, must be inside the array's lifetime. A set that is not empty before the
first event means that a launch reads what the step has not written.

The cost grows with the unrolled number of touches times the granules of an array: for tests, and for a step of a few thousand launches.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jaxarena._arena_types import ALIGN, Arena, round_up
from jaxarena.lifetime import Alias, Form, Loop, Tensor

__all__ = ["Fault", "PlanError", "validate"]

_Moment = tuple[int, tuple[tuple[Loop, int], ...]]
"""A launch, and the loops around it, outer to inner, each with its iteration."""

GRANULE = 8
"""Arena rows: what a part's first row is a multiple of."""


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a plan.

    Attributes:
      verdict: ``missing`` (should be placed, is not), ``unknown`` (is placed, should not be), ``duplicate`` (placed twice),
        ``wrong size``, ``misaligned``, ``past the end`` (or before the start) of the arena, ``wrong lifetime`` (does not cover when it
        must keep its bytes), ``overlap`` (of two that live together), ``wrong counters``.
      names: the arrays or scratch it is about.
      text: what was found and what was expected.
    """

    verdict: str
    names: tuple[str, ...]
    text: str


class PlanError(ValueError):
    """A plan is wrong; ``faults`` says how."""

    def __init__(self, form: str, faults: list[Fault]):
        self.faults = tuple(faults)
        super().__init__(f"the plan of form {form!r} has {len(faults)} faults:\n" + "\n".join(f"  {f.verdict}: {f.text}" for f in faults))


@dataclass(frozen=True)
class _Need:
    """What must be placed, and from which launch to which."""

    name: str
    bytes: int
    first: int
    last: int


def validate(form: Form, arena: Arena) -> None:
    """Checks a plan against the form.

    Raises:
      PlanError: lists every fault.
    """
    needs = _needs(form)
    faults = []
    placed: dict[str, tuple[int, int, int, int]] = {}
    found = [(p.name, p.bytes, p.offset, p.first, p.last) for p in arena.placed]
    found += [(_scratch_name(p.launch, p.tag), p.bytes, p.offset, p.launch, p.launch) for p in arena.scratch]
    for name, size, offset, first, last in found:
        if name not in needs:
            faults.append(Fault("unknown", (name,), f"{name} is placed, but is nothing that lives within the step"))
            continue
        if name in placed:
            faults.append(Fault("duplicate", (name,), f"{name} is placed twice"))
            continue
        placed[name] = size, offset, first, last
        faults += _check_one(needs[name], size, offset, first, last, arena.bytes)
    faults += [Fault("missing", (name,), f"{name} lives within the step, but is not placed") for name in needs if name not in placed]
    faults += _overlaps(needs, placed)
    counters = max((sum(round_up(s.bytes, ALIGN) for s in launch.scratch if s.counter) for launch in form.launches), default=0)
    if arena.counters < counters:
        faults.append(Fault("wrong counters", (), f"a launch needs {counters} bytes of arrival counts, the plan has {arena.counters}"))
    if faults:
        raise PlanError(form.name, faults)


def _check_one(need: _Need, size: int, offset: int, first: int, last: int, end: int) -> list[Fault]:
    faults = []
    if size != need.bytes:
        faults.append(Fault("wrong size", (need.name,), f"{need.name} has {size} bytes, needs {need.bytes}"))
    if offset % ALIGN:
        faults.append(Fault("misaligned", (need.name,), f"{need.name} is at byte {offset}, no multiple of {ALIGN}"))
    if offset < 0 or offset + need.bytes > end:
        text = f"{need.name} is at bytes {offset} to {offset + need.bytes} of an arena of {end}"
        faults.append(Fault("past the end", (need.name,), text))
    if need.first < first or need.last > last:
        text = f"{need.name} lives from launch {first} to {last}, must keep its bytes from {need.first} to {need.last}"
        faults.append(Fault("wrong lifetime", (need.name,), text))
    return faults


def _overlaps(needs: dict[str, _Need], placed: dict[str, tuple[int, int, int, int]]) -> list[Fault]:
    names = list(placed)
    if not names:
        return []
    start = np.array([placed[n][1] for n in names])
    stop = start + np.array([needs[n].bytes for n in names])
    first, last = np.array([(needs[n].first, needs[n].last) for n in names]).T
    faults = []
    for i, name in enumerate(names):
        shared_bytes = np.minimum(stop, stop[i]) > np.maximum(start, start[i])
        together = shared_bytes & (first <= last[i]) & (first[i] <= last)
        for j in np.flatnonzero(together[:i]):
            text = f"{names[j]} at bytes {start[j]} to {stop[j]} and {name} at {start[i]} to {stop[i]} live together"
            faults.append(Fault("overlap", (names[j], name), text))
    return faults


def _scratch_name(launch: int, tag: str) -> str:
    return f"scratch {tag!r} of launch {launch}"


def _needs(form: Form) -> dict[str, _Need]:
    """Everything that lives within the step, by name."""
    parts: dict[str, Tensor | Alias] = {part.name: part for part in form.tensors}
    parts |= {part.name: part for part in form.aliases}
    events = _events(form, parts)
    outside = {_walk(parts, name)[-1].name for name in form.inputs | form.outputs}
    needs = {}
    for name, touches in events.items():
        if name not in outside:
            need = _need(form, parts[name], touches, parts)
            if need is not None:
                needs[name] = need
    for t, launch in enumerate(form.launches):
        for s in launch.scratch:
            if not s.counter:
                name = _scratch_name(t, s.tag)
                needs[name] = _Need(name, s.bytes, t, t)
    return needs


def _walk(parts: dict[str, Tensor | Alias], name: str) -> list[Tensor | Alias]:
    """From a name to its home."""
    steps = [parts[name]]
    while isinstance(steps[-1], Alias) and steps[-1].view is not None:
        steps.append(parts[steps[-1].of])
    return steps


def _events(form: Form, parts: dict[str, Tensor | Alias]) -> dict[str, list[tuple[int, bool, str]]]:
    """For each home its touches in program order: launch, whether it writes, and the name it touches."""
    events: defaultdict[str, list[tuple[int, bool, str]]] = defaultdict(list)
    for t, launch in enumerate(form.launches):
        for name in launch.reads:
            events[_walk(parts, name)[-1].name].append((t, False, name))
        for name in launch.writes:
            events[_walk(parts, name)[-1].name].append((t, True, name))
    return events


def _need(form: Form, home: Tensor | Alias, touches: list[tuple[int, bool, str]], parts: dict[str, Tensor | Alias]) -> _Need | None:
    """How long a home must keep its bytes; None when some launch reads what the step has not written."""
    unrolled = []
    for t, write, name in touches:
        around = sorted((loop for loop in form.loops if loop.first <= t <= loop.last), key=lambda loop: loop.first - loop.last)
        for iterations in itertools.product(*(range(loop.trips) for loop in around)):
            unrolled.append((_time_key(around, iterations, t), write, t, tuple(zip(around, iterations, strict=True)), name))
    unrolled.sort(key=lambda event: (event[0], event[1]))
    if not unrolled:
        return _Need(home.name, home.bytes, min(t for t, *_ in touches), max(t for t, *_ in touches))
    first, last = min(t for t, *_ in touches), max(t for t, *_ in touches)
    live = np.zeros((home.slots, home.layout.part_rows // GRANULE), bool)
    later = None
    for _, write, t, at, name in reversed(unrolled):
        if later is not None and live.any():
            first, last = _between(first, last, (t, at), later)
        slots, granules = _covered(_walk(parts, name), {loop.name: i for loop, i in at})
        live[slots, granules] = not write
        later = t, at
    return None if live.any() else _Need(home.name, home.bytes, first, last)


def _time_key(around: list[Loop], iterations: tuple[int, ...], t: int) -> tuple[int, ...]:
    """Sorts events by time: where each loop starts, then its iteration, down to the launch."""
    return (*itertools.chain.from_iterable((loop.first, i) for loop, i in zip(around, iterations, strict=True)), t)


def _between(first: int, last: int, a: _Moment, b: _Moment) -> tuple[int, int]:
    """``first`` and ``last`` widened by all launches that run from event ``a`` to the later event ``b``."""
    first, last = min(first, a[0], b[0]), max(last, a[0], b[0])
    for (loop, i), (other, j) in zip(a[1], b[1], strict=False):
        if loop != other:
            break
        if i != j:
            return min(first, loop.first), max(last, loop.last)
    for loop, _ in set(a[1]) ^ set(b[1]):
        first, last = min(first, loop.first), max(last, loop.last)
    return first, last


def _covered(steps: list[Tensor | Alias], iteration: dict[str, int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The slots and granules that a touch covers of the home at the end of ``steps``, as indices of a two-dimensional array."""
    slot, part = 0, steps[0]
    for step in steps[:-1]:
        if isinstance(step, Alias):
            i = 0 if step.slot.loop is None else iteration[step.slot.loop]
            value = step.slot.start + step.slot.step * i
            slot += value if step.slot.modulus is None else value % step.slot.modulus
    layout = part.layout
    row, panel_stride, group_stride = (0, layout.rows, layout.padded_rows)
    if isinstance(part, Alias) and part.view is not None:
        row, panel_stride, group_stride = part.view.row, part.view.panel_stride, part.view.group_stride
    panels, groups, rows = (layout.panels, layout.groups, layout.padded_rows) if layout.size else (0, 0, 0)
    offsets = (
        np.arange(panels)[:, None, None] * (panel_stride // GRANULE)
        + np.arange(groups)[None, :, None] * (group_stride // GRANULE)
        + np.arange(rows // GRANULE)[None, None, :]
    )
    return np.arange(slot, slot + part.slots)[:, None], (row // GRANULE + offsets).reshape(1, -1)
