"""Where each value of a step lives: in the arena (its home, or a part of another's), or as an XLA array.

The rules:

- A result of a launch lives in the arena, unless it is an output of the step.
- A reshape, or a slice at panel and row-tile bounds, of such a value is a view of the same home: no launch, no copy.
- Values concatenated at panel bounds are written straight into their part of the joined home (a *join in place*).
- What XLA makes stays an XLA array, unless a loop keeps it.
- A barrier is not needed on what lies in the arena: each read of it is a read of its own.

:func:`jaxarena.loops.decide` applies them to a whole step.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

from jax import lax
from jax.extend.core import primitives as jp

from jaxarena import panels
from jaxarena.arena import ROW_BYTES
from jaxarena.graph import Block, Copy, Equation, Value, values
from jaxarena.lifetime import Slot
from jaxarena.panels import Layout, View
from jaxarena.storage import STORAGE_OF_DTYPE

__all__ = ["HERE", "Home", "Residence", "Residences", "is_part", "is_reshape", "layout_of"]

HERE = Slot()


def layout_of(aval: Any, row_ndim: int | None = None) -> Layout | None:
    """The arena layout of an array of this shape and dtype, or None when the arena holds no such dtype.

    Without ``row_ndim`` (arrays that XLA makes): panels where whole panels are filled, else flat.
    """
    storage = STORAGE_OF_DTYPE.get(aval.dtype)
    if storage is None:
        return None
    if row_ndim is None:
        fills_panels = aval.ndim >= 2 and aval.shape[-1] * aval.dtype.itemsize % ROW_BYTES == 0
        row_ndim = 1 if fills_panels else 0
    return Layout(tuple(map(int, aval.shape)), storage, min(row_ndim, aval.ndim))


class Home:
    """Arena memory of one array, or of a stack of ``slots`` equal ones; it may turn out to be a part of another home.

    ``role`` says in the plan what it is beside a launch's result: ``kept`` or ``carry`` of a loop, or ``join``.
    """

    def __init__(self, layout: Layout, block: Block, slots: int = 1, role: str = ""):
        self.layout, self.block, self.slots, self.role = layout, block, slots, role
        self.parent: Home | None = None
        self.row = 0  # of this home's first row within the parent's (slot)
        self.slot = HERE  # of the parent

    @property
    def slot_rows(self) -> int:
        """Arena rows of one slot."""
        return self.layout.bytes // ROW_BYTES

    def become_part(self, parent: Home, slot: Slot = HERE, row: int = 0) -> None:
        self.parent, self.slot, self.row = parent, slot, row


@dataclasses.dataclass(frozen=True)
class Residence:
    """A value's place: ``layout`` at ``view`` of one slot of ``home``, or, with ``run``, that many whole slots from ``slot`` on."""

    home: Home
    layout: Layout
    view: View
    slot: Slot = HERE
    run: int | None = None

    @property
    def is_alone(self) -> bool:
        """Whether the value's home is still its own and holds one array, not a stack."""
        return self.home.parent is None and self.home.slots == 1 and self.run is None

    @property
    def is_whole(self) -> bool:
        """Whether the value is all of such a home."""
        return self.is_alone and self.layout.bytes == self.home.layout.bytes and self.view == panels.full_view(self.home.layout)

    def resolved(self) -> Residence:
        """The same place in terms of the home at the end of the chain."""
        home, row, slot = self.home, self.view.row, self.slot
        while home.parent is not None:
            row += home.row
            slot = home.slot if home.slot != HERE else slot
            home = home.parent
        return Residence(home, self.layout, dataclasses.replace(self.view, row=row), slot, self.run)


class Residences(dict[Value, Residence]):
    """The residence of every value that lives in the arena; values that are missing are XLA arrays.

    ``outside`` holds the values that must stay XLA arrays: the step's outputs, and what its loops stack or carry for them.
    ``copies`` are the values that :mod:`jaxarena.kept` put in.
    """

    def __init__(self, copies: Mapping[Value, Copy] | None = None) -> None:
        super().__init__()
        self.outside: set[Value] = set()
        self.copies = copies or {}

    def own(self, value: Value, layout: Layout, block: Block, role: str = "") -> Residence:
        """Gives ``value`` a home of its own."""
        home = Home(layout, block, role=role)
        self[value] = Residence(home, layout, panels.full_view(layout))
        return self[value]

    def barrier(self, node: Equation, outside: set[Value]) -> list[Equation]:
        """A barrier without what lies in the arena (or nothing, when all of it does)."""
        pairs = []
        for a, v in zip(node.inputs, node.outputs, strict=True):
            if isinstance(a, Value) and a in self and v not in outside:
                self[v] = self[a]
            else:
                pairs.append((a, v))
        return [dataclasses.replace(node, inputs=[a for a, _ in pairs], outputs=[v for _, v in pairs])] if pairs else []

    def view(self, node: Equation, outside: set[Value]) -> bool:
        """Makes the results of an equation that only views its operand views of its home, where they can be; says whether it did."""
        source = self.get(node.inputs[0]) if node.inputs and isinstance(node.inputs[0], Value) else None
        if source is None or source.run is not None or any(v in outside for v in node.outputs):
            return False
        layout, view = source.layout, source.view
        if is_reshape(node):
            found = [panels.reshape(layout, view, tuple(node.outputs[0].aval.shape))]
        elif node.primitive is jp.slice_p and node.params["strides"] is None:
            found = [_slice(layout, view, node.params["start_indices"], node.params["limit_indices"])]
        elif node.primitive is lax.split_p:
            axis, stops = node.params["axis"], list(itertools.accumulate(map(int, node.params["sizes"]), initial=0))
            found = [_slice_axis(layout, view, axis, start, stop) for start, stop in itertools.pairwise(stops)]
        else:
            return False
        if None in found:
            return False
        for value, part in zip(node.outputs, found, strict=True):
            assert part is not None
            self[value] = dataclasses.replace(source, layout=part[0], view=part[1])
        return True

    def join(self, node: Equation, outside: set[Value], block: Block) -> bool:
        """Makes the operands of a concatenation parts of its result, where they can be; says whether it did."""
        result = node.outputs[0]
        parts = [self.get(v) for v in values(node.inputs)]
        if result in outside or len(parts) != len(node.inputs) or node.params["dimension"] != result.aval.ndim - 1:
            return False
        if len({id(p.home) for p in parts if p}) != len(parts) or len(parts) < 2:
            return False
        for p in parts:
            if p is None or not p.is_whole or p.home.block is not block or p.layout.row_ndim != 1:
                return False
        if any(p.layout.row_bytes % ROW_BYTES for p in parts[:-1] if p):
            return False
        layout = layout_of(result.aval, 1)
        assert layout is not None
        joined = self.own(result, layout, block, "join").home
        row = 0
        for p in parts:
            assert p is not None
            p.home.become_part(joined, row=row)
            row += p.layout.panels * layout.rows
        return True


def is_reshape(node: Equation) -> bool:
    """Whether an equation changes nothing but the shape of its one operand."""
    if node.primitive is jp.broadcast_in_dim_p:
        dims = node.params["broadcast_dimensions"]
        source: Any = node.inputs[0].aval
        return source.size == node.outputs[0].aval.size and list(dims) == sorted(dims)
    return node.primitive in (jp.reshape_p, jp.squeeze_p, jp.copy_p)


def is_part(node: Equation) -> bool:
    """Whether an equation's results are parts of its one operand, or all of it, in another shape."""
    return is_reshape(node) or node.primitive in (jp.slice_p, lax.split_p)


def _slice(layout: Layout, view: View, starts: tuple[int, ...], stops: tuple[int, ...]) -> panels.Part | None:
    cut = [axis for axis, (a, b, n) in enumerate(zip(starts, stops, layout.shape, strict=True)) if (a, b) != (0, n)]
    return _slice_axis(layout, view, cut[0], int(starts[cut[0]]), int(stops[cut[0]])) if len(cut) == 1 else None


def _slice_axis(layout: Layout, view: View, axis: int, start: int, stop: int) -> panels.Part | None:
    if layout.flat:
        return panels.slice_rows(layout, view, start, stop) if axis == 0 else None
    first_column_axis = len(layout.shape) - layout.row_ndim
    if axis == first_column_axis:
        inner = math.prod(layout.shape[axis + 1 :])
        shape = (*layout.shape[:axis], stop - start, *layout.shape[axis + 1 :])
        found = panels.columns(layout, view, start * inner, stop * inner)
        return panels.reshape(*found, shape) if found else None
    if axis == first_column_axis - 1:
        return panels.slice_rows(layout, view, start, stop)
    return panels.slice_groups(layout, view, start, stop) if axis == 0 else None
