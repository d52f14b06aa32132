"""A plan as a still picture, drawn by matplotlib: the panels of the page, for documents and chats.

Drawn on a figure of its own with the Agg canvas: no window system, and pyplot's global state stays as it was.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from jaxarena.report.scene import Scene, ink_on, scene
from jaxarena.report.units import human, marks, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from jaxarena.plan import Plan

__all__ = ["png"]

_DPI = 120
_INCHES = (1600 / _DPI, 900 / _DPI)
_INK, _SOFT, _LINE, _BAND, _BOUND = "#1c2230", "#667085", "#e4e7ee", "#4c78d8", "#c2255c"
_LIVE, _LIVE_AREA, _XLA_AREA = "#4c78d8", "#d3dff5", "#d5d9e1"
_LABEL = 7  # points
_DASHES = (0, (5, 3))


def png(plan: Plan) -> bytes:
    """The picture, 1600 by 900 pixels.

    Raises:
      ImportError: without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("writing .png needs matplotlib, which is not installed: pip install jaxarena[plot]") from error
    drawn = scene(plan)
    figure = Figure(figsize=_INCHES, dpi=_DPI, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    grid = figure.add_gridspec(3, 1, height_ratios=(30, 1, 7), left=0.065, right=0.985, top=0.84, bottom=0.05, hspace=0.05)
    arena = figure.add_subplot(grid[0])
    strip = figure.add_subplot(grid[1], sharex=arena)
    profile = figure.add_subplot(grid[2], sharex=arena)
    for axes in (arena, strip, profile):
        _style(axes, len(plan.launches))
    arena.set_ylim(0, max(plan.bytes, 1) * 1.02)
    _marks(arena, plan.bytes)
    _title(plan, drawn, arena)
    _loops(plan, arena, profile)
    _levels(plan, arena)
    _boxes(drawn, arena)
    _strip(drawn, strip)
    _profile(plan, drawn, profile)
    out = io.BytesIO()
    canvas.print_png(out)
    return out.getvalue()


def _style(axes: Axes, launches: int) -> None:
    axes.set_xlim(-0.5, max(launches, 1) - 0.5)
    axes.tick_params(length=0, labelsize=8, labelcolor=_SOFT, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.set_axisbelow(True)


def _marks(axes: Axes, top: int, every: int = 1) -> None:
    at = marks(top)[::every]
    axes.set_yticks(at, [plain(mark) for mark in at])
    axes.grid(axis="y", color=_LINE, linewidth=0.8)


def _title(plan: Plan, drawn: Scene, axes: Axes) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    left, figure = axes.get_position().x0, axes.figure
    facts = f"arena {human(plan.bytes)} ({plan.bytes:,} bytes), bound {human(plan.bound)}, ratio {plan.ratio:.3f}, {plan.verdict}"
    counts = f"{len(plan.launches)} launches, {len(plan.arena.placed)} arrays, {human(drawn.unshared)} if nothing were shared"
    # parse_math=False, and the escape in the legend: a name may hold a dollar sign.
    figure.text(left, 0.97, plan.form.name, size=14, weight="bold", color=_INK, va="center", parse_math=False)
    figure.text(left, 0.94, f"{facts}; {counts}", size=9, color=_SOFT, va="center")
    handles = [
        *(Patch(color=colour, label=label.replace("$", r"\$")) for label, colour in drawn.kinds),
        Line2D([], [], color=_BOUND, linewidth=1.2, linestyle=_DASHES, label="lower bound"),
        Patch(color=_XLA_AREA, label="XLA, estimated"),
        Patch(facecolor="white", edgecolor=_SOFT, hatch="/////", linewidth=0, label="scratch"),
    ]
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(left, 0.918), ncols=7, fontsize=8, frameon=False, labelcolor=_INK,
        handlelength=1.2, handleheight=0.9, handletextpad=0.5, columnspacing=1.6, borderpad=0, borderaxespad=0,
    )  # fmt: skip


def _loops(plan: Plan, arena: Axes, profile: Axes) -> None:
    for loop in plan.form.loops:
        for axes in (arena, profile):
            axes.axvspan(loop.first - 0.5, loop.last + 0.5, color=_BAND, alpha=0.08, zorder=0, linewidth=0)
        depth = plan.form.loops_around[loop.first].index(loop)
        arena.annotate(
            f"{loop.name}: {loop.trips} times", (loop.first - 0.5, 1), xycoords=arena.get_xaxis_transform(), xytext=(2, 3 + 9 * depth),
            textcoords="offset points", size=8, color=_SOFT, parse_math=False, annotation_clip=False,
        )  # fmt: skip


def _levels(plan: Plan, axes: Axes) -> None:
    if plan.bytes > plan.bound:
        axes.axhline(plan.bytes, color=_INK, linewidth=1.2, zorder=4)
    axes.axhline(plan.bound, color=_BOUND, linewidth=1.2, linestyle=_DASHES, zorder=5)


def _boxes(drawn: Scene, axes: Axes) -> None:
    from matplotlib.patches import Rectangle

    points_a_launch, points_a_byte = _scale(axes)
    for box in drawn.boxes:
        colour, launches = drawn.kinds[box.kind][1], box.last + 1 - box.first
        width, height = launches * points_a_launch, box.bytes * points_a_byte
        # A rim as wide as a thin box would hide it.
        rim, rim_width = ("white", 0.6) if height > 3 else (colour, 0.3)
        hatch = "/////" if box.scratch and height > 3 else None
        left = box.first - 0.5
        shape = Rectangle((left, box.offset), launches, box.bytes, facecolor=colour, edgecolor=rim, linewidth=rim_width, hatch=hatch)
        axes.add_patch(shape)
        if box.slots > 1 and height >= 3 * box.slots:
            heights = [box.offset + k * box.bytes / box.slots for k in range(1, box.slots)]
            axes.hlines(heights, left, left + launches, color="white", alpha=0.35, linewidth=0.5)
        letters = int((width - 6) / (0.62 * _LABEL))
        if height >= _LABEL + 2 and letters >= min(len(box.name), 6):
            name = box.name if len(box.name) <= letters else f"{box.name[: letters - 1]}…"
            label = f"{name}  {human(box.bytes)}" if len(name) + 12 <= letters else name
            axes.annotate(
                label, (left, box.offset + box.bytes / 2), xytext=(3, 0), textcoords="offset points", va="center",
                size=_LABEL, color=ink_on(colour), parse_math=False,
            )  # fmt: skip


def _scale(axes: Axes) -> tuple[float, float]:
    """Points a launch is wide, and points a byte is high."""
    box = axes.get_position()
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    return 72 * _INCHES[0] * box.width / (right - left), 72 * _INCHES[1] * box.height / (high - low)


def _strip(drawn: Scene, axes: Axes) -> None:
    colours = [drawn.kinds[kind][1] for kind in drawn.launch_kinds]
    axes.bar(range(len(colours)), 1, width=1, color=colours, edgecolor="white", linewidth=0.3)
    axes.set_ylim(0, 1)
    axes.set_yticks([0.5], ["launches"])


def _profile(plan: Plan, drawn: Scene, axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    both = [a + x for a, x in zip(drawn.live, drawn.xla, strict=True)]
    top = max([plan.bytes, *both, 1])
    edges = [t - 0.5 for t in range(len(both) + 1)]
    if both:
        axes.stairs(both, edges, fill=True, color=_XLA_AREA)
        axes.stairs(drawn.live, edges, fill=True, color=_LIVE_AREA)
        axes.stairs(drawn.live, edges, color=_LIVE, linewidth=1)
        peak = plan.peak_launch
        left = 2 * peak > len(both)
        axes.plot([peak], [drawn.live[peak]], "o", color=_BOUND, markersize=4, zorder=5)
        axes.annotate(
            f"peak {human(drawn.live[peak])} at {peak} {plan.launches[peak].name}", (peak, drawn.live[peak]), xytext=(peak, top * 1.2),
            ha="right" if left else "left", va="center", size=8, weight="bold", color=_INK, parse_math=False,
            arrowprops={"arrowstyle": "-", "color": _BOUND, "linewidth": 0.8, "relpos": (float(left), 0.5)},
        )  # fmt: skip
    axes.axhline(plan.bound, color=_BOUND, linewidth=1.2, linestyle=_DASHES)
    axes.set_ylim(0, top * 1.3)
    _marks(axes, int(top * 1.3), every=2)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=24, integer=True))
    axes.tick_params(labelbottom=True)
