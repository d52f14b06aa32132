"""Answers in words: what makes a plan as large as it is, and what changed between two plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxarena.arena import PlacedScratch
from jaxarena.report.units import human

if TYPE_CHECKING:
    from jaxarena.plan import Plan

__all__ = ["difference", "explanation"]

_SHOWN = 10


def explanation(plan: Plan) -> str:
    """Why the arena is as large as it is: the launch with the most live bytes, and what lives there, largest first."""
    if not plan.launches:
        return f"{plan.form.name}: no launches, so the arena is empty."
    at = plan.peak_launch
    live = sorted(plan.live_at(at), key=lambda p: (-p.bytes, p.offset))
    gap = plan.bytes - plan.bound
    lines = [
        f"{plan.form.name}: the arena takes {human(plan.bytes)}, "
        + (f"{human(gap)} more than the bound: no better placement was found." if gap else "as little as any placement could."),
        f"Most lives at launch {at}, {plan.launches[at].name}: {human(plan.arena.live_bytes(at))} in {len(live)} arrays.",
    ]
    for p in live[:_SHOWN]:
        if isinstance(p, PlacedScratch):
            lines.append(f"  {human(p.bytes):>9}  scratch {p.tag!r} of this launch")
            continue
        made, read = plan.launches[p.first].name, plan.launches[p.last].name
        role = "made here" if p.first == at else f"made by {made}"
        until = "read here for the last time" if p.last == at else f"last read by {read}"
        lines.append(f"  {human(p.bytes):>9}  {p.name}: {role}, {until}")
    if len(live) > _SHOWN:
        lines.append(f"  {human(sum(p.bytes for p in live[_SHOWN:])):>9}  in {len(live) - _SHOWN} smaller ones")
    across = [p for p in live if not isinstance(p, PlacedScratch) and p.first < at < p.last]
    if across:
        lines.append(
            f"{human(sum(p.bytes for p in across))} of this is neither made nor read there, only kept across: jit's storage=, "
            "jax.checkpoint or a smaller batch make it less."
        )
    return "\n".join(lines)


def difference(old: Plan, new: Plan) -> str:
    """What grew and what shrank from one plan to the other, largest change first; empty when no array changed its size or came or went."""
    before, after = ({p.name: p.bytes for p in plan.arena.placed} for plan in (old, new))
    changes = {name: after.get(name, 0) - before.get(name, 0) for name in before.keys() | after.keys()}
    changed = [name for name, by in changes.items() if by or (name in before) != (name in after)]
    changed.sort(key=lambda name: (-abs(changes[name]), name))
    if not changed and old.bytes == new.bytes:
        return ""
    lines = [
        f"arena {human(old.bytes)} -> {human(new.bytes)} ({_signed(new.bytes - old.bytes)}), "
        f"bound {human(old.bound)} -> {human(new.bound)}, launches {len(old.launches)} -> {len(new.launches)}"
    ]
    for name in changed:
        what = "new" if name not in before else "gone" if name not in after else f"{human(before[name])} -> {human(after[name])}"
        lines.append(f"  {_signed(changes[name]):>11}  {name} ({what})")
    return "\n".join(lines)


def _signed(count: int) -> str:
    return f"{'-' if count < 0 else '+'}{human(abs(count))}"
