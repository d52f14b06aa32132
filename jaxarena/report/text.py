"""A plan as text: a summary, the largest arrays, the largest temporaries of XLA's, and every launch in order.

At most 120 columns, ASCII but for the names, one line a launch.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jaxarena.kernels import CAPABILITY
from jaxarena.report.units import human

if TYPE_CHECKING:
    from jaxarena.plan import Plan

__all__ = ["text"]

_ARRAYS = 12
_TEMPORARIES = 6
_BAR = 24


def text(plan: Plan) -> str:
    """The report. Its first line is the summary."""
    sections = [_summary(plan), _arrays(plan), _temporaries(plan), _kernels(plan), _launches(plan)]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _summary(plan: Plan) -> list[str]:
    form = plan.form
    counts = [_count(len(plan.launches), "launch", "launches"), _count(len(plan.arena.placed), "array", "arrays")]
    if plan.arena.scratch:
        counts.append(f"{len(plan.arena.scratch)} scratch")
    counts.append(_count(len(form.loops), "loop", "loops"))
    if plan.arena.counters:
        counts.append(f"{human(plan.arena.counters)} of arrival counts beside the arena")
    bound = plan.bound
    stored = [f"{human(size)} in {storage}" for storage, size in sorted(plan.kept_bytes.items())]
    kept = [f"kept for the backward pass: {', '.join(stored)}, {human(plan.saved_bytes)} less than as they are"] if stored else []
    verdict = f"bound {human(bound)}, ratio {plan.ratio:.3f}, {plan.verdict}"
    return [
        f"{form.name}: arena {human(plan.bytes)} ({plan.bytes:,} bytes), {verdict}",
        f"XLA temporaries at most {human(plan.xla_bytes)} (estimated); {', '.join(counts)}",
        *kept,
    ]


def _arrays(plan: Plan) -> list[str]:
    saved_of = {tensor.name: tensor.saved for tensor in plan.form.tensors}
    largest = sorted(plan.arena.placed, key=lambda p: (-p.bytes, p.first, p.name))[:_ARRAYS]
    rows = [("name", "shape", "storage", "slots", "size", "saved", "offset", "launches")]
    for p in largest:
        part = plan.form.parts[p.name]
        saved = human(saved_of[p.name]) if saved_of.get(p.name) else "-"
        shape = "x".join(map(str, part.layout.shape)) or "scalar"
        name, storage, life = _cut(p.name, 34), part.layout.storage, f"{p.first}-{p.last}"
        rows.append((name, _cut(shape, 24), storage, str(part.slots), human(p.bytes), saved, f"{p.offset:,}", life))
    return [_title("Largest arrays", len(largest), len(plan.arena.placed)), *_table(rows, left=3)] if largest else []


def _temporaries(plan: Plan) -> list[str]:
    largest = sorted(plan.temporaries, key=lambda t: (-t.bytes, t.first, t.name))[:_TEMPORARIES]
    rows = [("name", "size", "launches"), *((_cut(t.name, 60), human(t.bytes), f"{t.first}-{t.last}") for t in largest)]
    return [_title("Largest XLA temporaries, estimated", len(largest), len(plan.temporaries)), *_table(rows, left=1)] if largest else []


def _kernels(plan: Plan) -> list[str]:
    """How many launches run as kernels, and why the others do not."""
    reasons = plan.kernels().values()
    if not reasons:
        return []
    counts = collections.Counter(why for why in reasons if why is not None)
    kernels = len(reasons) - counts.total()
    lines = [f"On a GPU of compute capability {CAPABILITY} {_count(kernels, 'launch runs as a kernel', 'launches run as kernels')}"]
    return lines + [f"  {number:>5} in XLA: {_cut(why, 104)}" for why, number in counts.most_common()]


def _launches(plan: Plan) -> list[str]:
    form, peak = plan.form, plan.peak_launch
    if not form.launches:
        return []
    live = [plan.arena.live_bytes(t) for t in range(len(form.launches))]
    lines = ["Launches: arrays read and written, bytes that live in the arena, XLA's temporaries (estimated)"]
    lines.append(f"{'':>5}  {'name':<42} {'reads':>5} {'writes':>6} {'arena':>9} {'XLA':>9}")
    for t, launch in enumerate(form.launches):
        around = form.loops_around[t]
        for depth, loop in enumerate(around):
            if loop.first == t:
                lines.append(f"{'':>5}  {'  ' * depth}{loop.name}: {loop.trips} x launches {loop.first}..{loop.last}")
        name = _cut("  " * len(around) + launch.name, 42)
        xla = human(plan.xla_bytes_at(t)) if plan.xla_bytes_at(t) else "-"
        bar = "#" * round(_BAR * live[t] / live[peak]) if live[peak] else ""
        line = f"{t:>5}  {name:<42} {len(launch.reads):>5} {len(launch.writes):>6} {human(live[t]):>9} {xla:>9}  {bar}"
        lines.append((line + " peak" if t == peak else line).rstrip())
    return lines


def _title(what: str, shown: int, total: int) -> str:
    return what if shown == total else f"{what} ({shown} of {total})"


def _table(rows: Sequence[Sequence[str]], left: int) -> Iterable[str]:
    """Lines of aligned columns, the first ``left`` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) if k < left else cell.rjust(width) for k, (cell, width) in enumerate(zip(row, widths, strict=True)))
        yield f"  {'  '.join(cells)}"


def _cut(name: str, width: int) -> str:
    """At most ``width`` characters of a name: its start and its end, which holds its number."""
    return name if len(name) <= width else f"{name[: width - 13]}...{name[-10:]}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
