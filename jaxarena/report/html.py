"""A plan as one page that needs nothing else: launches from left to right, arena offsets upward, one box an array.

The page is drawn here, in percent of its panels, so that it scales without a script and reads without one (every box has a
``<title>``). ``page.css`` gives it its looks, for light and dark screens; ``page.js`` adds what moves: the pointer's and the keyboard's
cursor, the search, the kinds to pick, the zoom. The panels, from the top: the loops; the arena; the launches, coloured by kind; the bytes
that live at each launch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from jaxarena.report.scene import Box, Scene, ink_on, scene
from jaxarena.report.units import human, marks, plain

if TYPE_CHECKING:
    from jaxarena.plan import Plan

__all__ = ["html"]

# Pixels: the arena's height as page.css has it; what a label of one and of two lines needs; the height below which a box has no rim, and
# at which a slot is shown.
_ARENA_HEIGHT = 500
_LINE, _TWO_LINES = 13, 30
_THIN = 3
_SLOT = 4
_HEADROOM = 1.02
_PROFILE_HEADROOM = 1.3


def html(plan: Plan) -> str:
    """The page."""
    drawn = scene(plan)
    title = escape(plan.form.name)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}: {human(plan.bytes)} arena</title>
<style>
{_asset("page.css")}{_kind_rules(drawn)}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<dl class="facts">
{_facts(plan, drawn)}
</dl>
</header>
<div class="tools">
<label class="search"><input type="search" id="search" placeholder="Find arrays" aria-label="Find arrays by name, shape or storage"></label>
<span id="found" role="status"></span>
<span class="kinds" role="group" aria-label="Kinds">{_legend(drawn)}</span>
<label class="zoom">Zoom <input type="range" id="zoom" min="0" max="5" step="0.25" value="0" aria-label="Stretch time"></label>
</div>
{_figure(plan, drawn)}
<p class="keys">
Point at a box, a launch or the profile; click to hold. Keys: arrows move, Enter goes to the next match, Escape lets go, / searches.
</p>
<div id="tip" hidden></div>
<div id="spoken" class="unseen" aria-live="polite"></div>
<script type="application/json" id="plan">{_data(plan, drawn)}</script>
<script>
{_asset("page.js")}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return files("jaxarena.report").joinpath(name).read_text(encoding="utf-8")


def _kind_rules(drawn: Scene) -> str:
    """A style rule for each kind: its colour, and the ink that reads on it."""
    return "".join(f".k{k} {{ --kind: {colour}; --on: {ink_on(colour)} }}\n" for k, (_, colour) in enumerate(drawn.kinds))


def _facts(plan: Plan, drawn: Scene) -> str:
    bound = plan.bound
    form = plan.form
    more = f"{drawn.unshared / plan.bytes:.2f} times the arena" if plan.bytes else "nothing to share"
    good = "good" if plan.bytes == bound else "near"
    facts = [
        ("Arena", human(plan.bytes), f"{plan.bytes:,} bytes", ""),
        ("Lower bound", human(bound), f"{bound:,} bytes", ""),
        ("Ratio", f"{plan.ratio:.3f}", plan.verdict, good),
        ("Without sharing", human(drawn.unshared), more, ""),
        ("XLA temporaries", f"~ {human(plan.xla_bytes)}", "at most, estimated", ""),
        ("Launches", str(len(form.launches)), f"arrays {len(plan.arena.placed)}, loops {len(form.loops)}", ""),
    ]
    return "\n".join(
        f'<div class="{tone}"><dt>{name}</dt><dd>{value}</dd><dd class="small">{note}</dd></div>' for name, value, note, tone in facts
    )


def _legend(drawn: Scene) -> str:
    """A button for each kind, and what the other marks mean."""
    buttons = "".join(
        f'<button type="button" class="k{k}" data-kind="{k}" aria-pressed="false"><i></i>{escape(label)}</button>'
        for k, (label, _) in enumerate(drawn.kinds)
    )
    marked = (("bound", "lower bound"), ("xla", "XLA, estimated"), ("scratch", "scratch"))
    return buttons + "".join(f'<span class="sign"><i class="{mark}"></i>{meaning}</span>' for mark, meaning in marked)


def _figure(plan: Plan, drawn: Scene) -> str:
    form = plan.form
    top = max(plan.bytes, 1) * _HEADROOM
    profile_top = max([plan.bytes, *(a + x for a, x in zip(drawn.live, drawn.xla, strict=True)), 1]) * _PROFILE_HEADROOM
    depth = max((len(around) for around in form.loops_around), default=0)
    offsets, heights = marks(plan.bytes), marks(int(profile_top))[::2]
    bands = _loop_bands(plan)
    summary = f"{len(drawn.boxes)} boxes over {len(form.launches)} launches, {human(plan.bytes)}"
    return f"""<figure style="--depth: {depth}">
<div class="axis">
<div class="loops"></div>
<div class="arena">{_axis(offsets, top)}<b>offset</b></div>
<div class="strip"><b>launch</b></div>
<div class="ticks"></div>
<div class="profile">{_axis(heights, profile_top)}<b>live</b></div>
</div>
<div class="scroll" id="scroll">
<div class="panels" id="panels" tabindex="0" role="application" aria-label="Memory over time: {summary}">
<svg class="loops" aria-hidden="true">{_loop_heads(plan)}</svg>
<svg class="arena" id="arena" data-top="{top}">
{_HATCH}{bands}{_grid(offsets, top)}{_boxes(plan, drawn, top)}{_levels(plan, top)}
</svg>
<svg class="strip" id="strip">{_strip(plan, drawn)}</svg>
<svg class="ticks" aria-hidden="true">{_ticks(len(form.launches))}</svg>
<svg class="profile">{bands}{_grid(heights, profile_top)}{_profile(plan, drawn, profile_top)}</svg>
<div id="cursor" hidden></div>
</div>
</div>
</figure>"""


_HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="2" height="6"/></pattern></defs>'
)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.4f}".rstrip("0").rstrip(".") + "%"


def _across(first: int, last: int, launches: int) -> str:
    return f'x="{_percent(first, launches)}" width="{_percent(last + 1 - first, launches)}"'


def _axis(at: Iterable[int], top: float) -> str:
    return "".join(f'<span style="bottom: {_percent(mark, top)}">{plain(mark)}</span>' for mark in at)


def _grid(at: Iterable[int], top: float) -> str:
    heights = (_percent(top - mark, top) for mark in at)
    return "".join(f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>' for y in heights)


def _loop_heads(plan: Plan) -> str:
    """A bracket for each loop, outer loops above inner ones."""
    form, n = plan.form, len(plan.form.launches)
    return "".join(
        f'<svg {_across(loop.first, loop.last, n)} y="{18 * form.loops_around[loop.first].index(loop)}" height="16">'
        f'<rect class="loop" width="100%" height="100%" rx="3"/><text x="6" y="12">{escape(loop.name)} &times; {loop.trips}</text>'
        f"<title>{escape(loop.name)}: launches {loop.first} to {loop.last}, {loop.trips} times</title></svg>"
        for loop in form.loops
    )


def _loop_bands(plan: Plan) -> str:
    n = len(plan.form.launches)
    return "".join(f'<rect class="band" {_across(loop.first, loop.last, n)} y="0" height="100%"/>' for loop in plan.form.loops)


def _boxes(plan: Plan, drawn: Scene, top: float) -> str:
    n = len(plan.form.launches)
    parts = []
    for box in drawn.boxes:
        height = _ARENA_HEIGHT * box.bytes / top
        thin = " thin" if height < _THIN else ""
        y = f'y="{_percent(top - box.offset - box.bytes, top)}" height="{_percent(box.bytes, top)}"'
        parts.append(
            f'<svg class="box k{box.kind}{thin}" {_across(box.first, box.last, n)} {y}><title>{escape(_describe(plan, box))}</title>'
            f'<rect width="100%" height="100%"/>{_inside(box, height)}</svg>'
        )
    return "".join(parts)


def _inside(box: Box, height: float) -> str:
    """A box's hatching, slots and label, as far as its ``height`` in pixels has room for them."""
    parts = ['<rect class="hatch" width="100%" height="100%"/>'] if box.scratch else []
    if height >= _SLOT * box.slots:
        lines = (_percent(k, box.slots) for k in range(1, box.slots))
        parts += [f'<line x1="0" x2="100%" y1="{y}" y2="{y}"/>' for y in lines]
    if height >= _TWO_LINES:
        parts.append(f'<text x="6" y="14">{escape(box.name)}</text><text class="small" x="6" y="27">{human(box.bytes)}</text>')
    elif height >= _LINE:
        parts.append(f'<text x="6" y="50%" dy="4">{escape(box.name)}</text>')
    return "".join(parts)


def _describe(plan: Plan, box: Box) -> str:
    lines = [box.name, f"{box.detail}: {human(box.bytes)} ({box.bytes:,} bytes) at {box.offset:,}", f"launches {box.first} to {box.last}"]
    names = [launch.name for launch in plan.form.launches]
    if not box.scratch:
        lines += [f"first written by {t} {names[t]}" for t in box.writes[:1]] + [f"last read by {t} {names[t]}" for t in box.reads[-1:]]
    return "\n".join(lines)


def _levels(plan: Plan, top: float) -> str:
    """The arena's end where it lies above the bound, and the bound over it."""
    at = [("end", "arena", plan.bytes)] if plan.bytes > plan.bound else []
    at.append(("bound", "lower bound", plan.bound))
    return "".join(
        f'<line class="{name}" x1="0" x2="100%" y1="{_percent(top - height, top)}" y2="{_percent(top - height, top)}">'
        f"<title>{meaning} {human(height)}</title></line>"
        for name, meaning, height in at
    )


def _strip(plan: Plan, drawn: Scene) -> str:
    n = len(plan.form.launches)
    return "".join(
        f'<rect class="k{kind}" {_across(t, t, n)} y="0" height="100%"><title>{t} {escape(launch.name)}</title></rect>'
        for t, (launch, kind) in enumerate(zip(plan.form.launches, drawn.launch_kinds, strict=True))
    )


def _ticks(launches: int) -> str:
    """Launch numbers, ten to twenty-five of them, at multiples of 1, 2 or 5 times a power of ten."""
    step = next(factor * 10**power for power in range(10) for factor in (1, 2, 5) if factor * 10**power * 25 >= launches)
    return "".join(f'<text x="{_percent(t + 0.5, launches)}" y="14">{t}</text>' for t in range(0, launches, step))


def _profile(plan: Plan, drawn: Scene, top: float) -> str:
    """Stairs of the live bytes with XLA's temporaries on top, the bound, and a mark at the peak."""
    n = len(drawn.live)
    if not n:
        return ""
    both = [a + x for a, x in zip(drawn.live, drawn.xla, strict=True)]
    y = _percent(top - plan.bound, top)
    peak = plan.peak_launch
    x, height = _percent(peak + 0.5, n), _percent(top - drawn.live[peak], top)
    anchor, aside = ("end", -8) if 2 * peak > n else ("start", 8)
    return (
        f'<svg class="stairs" viewBox="0 0 {n} 1000" preserveAspectRatio="none" width="100%" height="100%">'
        f'<path class="xla" d="{_stairs(both, top)}"/><path class="live" d="{_stairs(drawn.live, top)}"/></svg>'
        f'<line class="bound" x1="0" x2="100%" y1="{y}" y2="{y}"/>'
        f'<line class="peak" x1="{x}" x2="{x}" y1="0" y2="{height}"/><circle class="peak" cx="{x}" cy="{height}" r="4"/>'
        f'<text class="peak" x="{x}" y="12" dx="{aside}" text-anchor="{anchor}">'
        f"peak {human(drawn.live[peak])} at {peak} {escape(plan.form.launches[peak].name)}</text>"
    )


def _stairs(heights: Iterable[int], top: float) -> str:
    steps = "".join(f"V{1000 * (1 - height / top):.2f}h1" for height in heights)
    return f"M0 1000{steps}V1000Z"


def _data(plan: Plan, drawn: Scene) -> str:
    """What page.js works on, as JSON that cannot end its script element."""
    form = plan.form
    boxes = [
        [b.name, b.detail, b.kind, b.bytes, human(b.bytes), b.offset, b.first, b.last, b.scratch, b.writes, b.reads] for b in drawn.boxes
    ]
    launches = [
        [launch.name, human(drawn.live[t]), human(drawn.xla[t]), "; ".join(f"{loop.name}, {loop.trips} times" for loop in around)]
        for t, (launch, around) in enumerate(zip(form.launches, form.loops_around, strict=True))
    ]
    return json.dumps({"boxes": boxes, "launches": launches}, separators=(",", ":")).replace("<", "\\u003c")
