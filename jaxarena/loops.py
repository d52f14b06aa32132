"""Scans planned once for their body: which of a loop's values get strided slots of the arena.

What a loop stacks (its ``ys``: what the forward pass keeps for the backward pass, the gradients of stacked weights) is one home of
``length`` slots, written by iteration i at slot i, in place: the launch that makes the value writes the slot. A later loop that
scans over it reads slot i; any other reader reads the stack.

A carry has one slot when the body is done reading it before its next value is written, else two in turn: iteration i reads slot
i mod 2 and writes slot i + 1 mod 2. A carry that is also kept (the usual residual stream) needs no copy: its stack has length + 1
slots, iteration i reads slot i and writes slot i + 1. A loop in reverse walks the same slots backwards.

What a loop carries or stacks as a step output, or as an array smaller than the arena's alignment that XLA makes, stays XLA's.
"""

from __future__ import annotations

import dataclasses

from jax import lax
from jax.extend.core import primitives as jp

from jaxarena.arena import ALIGN
from jaxarena.graph import Atom, Block, Equation, Loop, Node, Value, values
from jaxarena.lifetime import Slot
from jaxarena.panels import Layout, View, full_view
from jaxarena.residence import HERE, Home, Residence, Residences, is_part, is_reshape, layout_of

__all__ = ["decide"]


def decide(residences: Residences, block: Block, outside: set[Value], handed_on: frozenset[Value] = frozenset()) -> None:
    """Decides the residence of all values made in ``block``; those in ``outside`` stay XLA arrays.

    ``handed_on`` are the values that a loop's body hands to the next turn or stacks: they are read after all of its nodes.
    Rewrites ``block.nodes``: views and joins are gone, the copies that slots need are there.
    """
    residences.outside |= outside
    nodes: list[Node] = []
    for index, node in enumerate(block.nodes):
        if isinstance(node, Loop):
            nodes += _LoopSlots(residences, node, outside, block, read_later=_reads(block.nodes[index + 1 :]) | handed_on).decide()
            nodes.append(node)
        elif node.launch is not None:
            for value, row_ndim in zip(node.outputs, node.launch.row_ndims([v.aval for v in node.outputs]), strict=True):
                layout = layout_of(value.aval, row_ndim)
                if value not in outside and layout is not None:
                    residences.own(value, layout, block)
            nodes.append(node)
        elif node.outputs and node.outputs[0] in residences.copies:
            residences.own(node.outputs[0], residences.copies[node.outputs[0]].layout, block, "kept")
            nodes.append(node)
        elif node.primitive is jp.concatenate_p and residences.join(node, outside, block):
            pass
        elif node.primitive.name == "optimization_barrier":
            nodes += residences.barrier(node, outside)
        elif not residences.view(node, outside):
            nodes.append(node)
    block.nodes = nodes


def _reads(nodes: list[Node]) -> set[Value]:
    return {v for node in nodes for v in values(node.inputs)}


@dataclasses.dataclass
class _Carry:
    """A carry in slots: ``home``, the slots that an iteration reads and writes, and whether every turn's value is kept."""

    home: Home
    reads: Slot
    writes: Slot
    is_kept: bool


class _LoopSlots:
    """The decisions for one loop."""

    def __init__(self, residences: Residences, loop: Loop, outside: set[Value], block: Block, read_later: set[Value]):
        self.residences, self.loop, self.outside, self.block, self.read_later = residences, loop, outside, block, read_later
        self.name = str(id(loop))
        self.maker = {v: n for n in loop.body.nodes for v in n.outputs}
        self.carried: dict[int, _Carry] = {}

    def decide(self) -> list[Equation]:
        """Decides all; returns the copies that must run before the loop."""
        loop = self.loop
        self._scan_over_stacks()
        stays = {s for s in loop.stacks if s in self.outside}
        body_outside = set(values([y for y, s in zip(loop.ys, loop.stacks, strict=True) if s in stays]))
        body_outside |= set(values([o for o, f in zip(loop.carry_outs, loop.finals, strict=True) if f in self.outside]))
        kept = set(values([y for y, s in zip(loop.ys, loop.stacks, strict=True) if s not in stays]))
        for k in range(len(loop.carries)):
            self._choose_carry(k, kept)
        decide(self.residences, loop.body, body_outside, frozenset(values([*loop.carry_outs, *loop.ys])))
        for k, carry in self.carried.items():
            loop.carry_outs[k] = self._put(loop.carry_outs[k], carry.home, carry.writes, loop.body, loop.body.nodes)
            last = carry.writes.start + carry.writes.step * (loop.length - 1)
            last = last % carry.writes.modulus if carry.writes.modulus else last
            self.residences[loop.finals[k]] = Residence(carry.home, carry.home.layout, full_view(carry.home.layout), Slot(None, last))
        self._stack_kept_values(stays)
        return self._start_carries()

    def _scan_over_stacks(self) -> None:
        """An element of a stack in the arena is read from its slot."""
        loop = self.loop
        for x, element in zip(loop.xs, loop.elements, strict=True):
            stack = self.residences.get(x) if isinstance(x, Value) else None
            if stack is not None and stack.run == loop.length:
                first = stack.slot.start + (loop.length - 1 if loop.reverse else 0)
                slot = Slot(self.name, first, -1 if loop.reverse else 1)
                self.residences[element] = dataclasses.replace(stack, slot=slot, run=None)

    def _choose_carry(self, k: int, kept: set[Value]) -> None:
        loop = self.loop
        carry, out = loop.carries[k], loop.carry_outs[k]
        launch = self._launch_behind(out)
        is_kept = carry in kept or (out in kept and launch is not None)
        if loop.finals[k] in self.outside or loop.length == 0:
            return
        row_ndim = None
        if launch is not None and out in launch.outputs:
            assert launch.launch is not None
            row_ndim = launch.launch.row_ndims([v.aval for v in launch.outputs])[launch.outputs.index(out)]
        layout = layout_of(carry.aval, row_ndim)
        if layout is None or (launch is None and carry.aval.size * carry.aval.dtype.itemsize < ALIGN):
            return
        n = loop.length
        if not is_kept and self._is_read_before_written(carry, out):
            home = Home(layout, self.block, 1, role="carry")
            slots = HERE, HERE
        elif not is_kept:
            home = Home(layout, self.block, 2, role="carry")
            slots = Slot(self.name, 0, 1, 2), Slot(self.name, 1, 1, 2)
        else:
            home = Home(layout, self.block, n + 1, role="carry")
            slots = (Slot(self.name, n, -1), Slot(self.name, n - 1, -1)) if loop.reverse else (Slot(self.name, 0, 1), Slot(self.name, 1, 1))
        self.carried[k] = _Carry(home, *slots, is_kept)
        self.residences[carry] = Residence(home, layout, full_view(layout), slots[0])

    def _is_read_before_written(self, carry: Value, out: Atom) -> bool:
        """Whether the next value may overwrite the carry in place: nothing reads the old one once the new one is written.

        XLA's equations read all they need of the arena before they write; a launch may write a tile before it reads the next, and a
        loop reads in every turn.
        """
        loop, reads = self.loop, -1
        seen = {carry}
        for index, node in enumerate(loop.body.nodes):
            if any(v in seen for v in values(node.inputs)):
                reads = index
                if isinstance(node, Equation) and is_part(node):
                    seen.update(node.outputs)
                elif isinstance(node, Equation) and node.primitive is lax.optimization_barrier_p:
                    seen.update(v for a, v in zip(node.inputs, node.outputs, strict=True) if isinstance(a, Value) and a in seen)
        writer = self._first_writer(out)
        if writer is None or not seen.isdisjoint(values([*loop.ys, *loop.carry_outs])):
            return False
        writes = loop.body.nodes.index(writer)
        return reads < writes or (reads == writes and isinstance(writer, Equation) and writer.launch is None)

    def _first_writer(self, out: Atom) -> Node | None:
        """The first node of the body that may write into the memory of ``out``: through views, parts of joins and starts of loops."""
        maker = self.maker.get(out) if isinstance(out, Value) else None
        if maker is None:
            return None
        sources: list[Atom] = []
        if isinstance(maker, Loop):
            sources = [a for a, f in zip(maker.init, maker.finals, strict=True) if f is out]
        elif maker.primitive is lax.optimization_barrier_p:
            sources = [a for a, v in zip(maker.inputs, maker.outputs, strict=True) if v is out]
        elif is_reshape(maker) or maker.primitive is jp.concatenate_p:
            sources = maker.inputs
        writers = [w for w in map(self._first_writer, sources) if w is not None]
        return min([maker, *writers], key=self.loop.body.nodes.index)

    def _launch_behind(self, atom: Atom) -> Equation | None:
        """The launch in the body that makes a value, looked for through reshapes."""
        maker = self.maker.get(atom) if isinstance(atom, Value) else None
        while isinstance(maker, Equation) and maker.launch is None and is_reshape(maker):
            source = maker.inputs[0]
            maker = self.maker.get(source) if isinstance(source, Value) else None
        return maker if isinstance(maker, Equation) and maker.launch is not None else None

    def _stack_kept_values(self, stays: set[Value]) -> None:
        loop, n = self.loop, self.loop.length
        stacked: dict[Value, Residence] = {}
        for k, carry in self.carried.items():
            if carry.is_kept:
                for value, slot in zip(values([loop.carries[k], loop.carry_outs[k]]), (carry.reads, carry.writes), strict=True):
                    first = slot.start - (n - 1) if loop.reverse else slot.start
                    stacked[value] = Residence(carry.home, carry.home.layout, full_view(carry.home.layout), Slot(None, first), n)
        kept = [
            (i, y, s)
            for i, (y, s) in enumerate(zip(loop.ys, loop.stacks, strict=True))
            if s not in stays and isinstance(y, Value) and n > 0
        ]
        slot = Slot(self.name, n - 1, -1) if loop.reverse else Slot(self.name, 0, 1)
        self._keep_whole_homes([y for _, y, _ in kept if y not in stacked], slot, stacked)
        for index, y, stack in kept:
            layout = self._layout_of_kept(y)
            if y not in stacked and layout is not None:
                home = Home(layout, self.block, n, role="kept")
                loop.ys[index] = self._put(y, home, slot, loop.body, loop.body.nodes)
                stacked[y] = Residence(home, layout, full_view(layout), Slot(None, 0), n)
            if y in stacked:
                self.residences[stack] = stacked[y]

    def _keep_whole_homes(self, ys: list[Value], slot: Slot, stacked: dict[Value, Residence]) -> None:
        """Homes made in the body, all of whose parts are kept, become slots themselves: nothing is copied."""
        parts: dict[Home, dict[tuple[View, Layout], list[Value]]] = {}
        for y in ys:
            residence = self.residences.get(y)
            if residence is not None and residence.is_alone and residence.home.block is self.loop.body and y not in self.residences.outside:
                parts.setdefault(residence.home, {}).setdefault((residence.view, residence.layout), []).append(y)
        for home, views in parts.items():
            if sum(layout.bytes for _, layout in views) < home.layout.bytes:
                continue
            stack = Home(home.layout, self.block, self.loop.length, role="kept")
            home.become_part(stack, slot)
            for (view, layout), values_there in views.items():
                for y in values_there:
                    stacked[y] = Residence(stack, layout, view, Slot(None, 0), self.loop.length)

    def _layout_of_kept(self, y: Value) -> Layout | None:
        """The layout of the slots for a value to be kept, or None where it stays with XLA's scan."""
        residence = self.residences.get(y)
        if residence is None and y not in self.maker:
            return None
        if residence is not None and residence.run is None:
            return residence.layout
        layout = layout_of(y.aval)
        return layout if layout is not None and y.aval.size * y.aval.dtype.itemsize >= ALIGN else None

    def _start_carries(self) -> list[Equation]:
        copies: list[Node] = []
        for k, carry in self.carried.items():
            first = Slot(None, carry.reads.start)
            start = self.loop.init[k]
            # Where the first slot is written again, only a value whose memory nobody reads later may be made there.
            shared = not carry.is_kept and isinstance(start, Value) and (self._is_read_again(start) or self.loop.init.count(start) > 1)
            self.loop.init[k] = self._put(start, carry.home, first, self.block, copies, always_copy=shared)
        return [c for c in copies if isinstance(c, Equation)]

    def _is_read_again(self, start: Value) -> bool:
        """Whether the memory of ``start``, by whatever name, is read in the loop or after it."""
        loop, residence = self.loop, self.residences.get(start)
        home = residence.resolved().home if residence is not None else None
        reads = self.read_later | _reads(loop.body.nodes) | set(values([*loop.ys, *loop.carry_outs, *loop.xs]))
        return any(v is start or (home is not None and v in self.residences and self.residences[v].resolved().home is home) for v in reads)

    def _put(self, atom: Atom, home: Home, slot: Slot, block: Block, copies: list[Node], always_copy: bool = False) -> Value:
        """Has ``atom`` written into a slot of ``home``: where it is made, or by a copy put into ``copies``. Returns the slot's value."""
        if isinstance(atom, Value) and atom not in self.residences.outside and not always_copy:
            residence = self.residences.get(atom)
            maker = next((n for n in block.nodes if atom in n.outputs), None)
            if residence is None and isinstance(maker, Equation):
                residence = self.residences.own(atom, home.layout, block)
            if residence is not None and residence.is_whole and residence.home.layout == home.layout and residence.home.block is block:
                residence.home.become_part(home, slot)
                return atom
        copy = Value(atom.aval)
        copies.append(Equation(jp.copy_p, {}, None, [atom], [copy], self.loop.scope))
        made = self.residences.own(copy, home.layout, block)
        made.home.become_part(home, slot)
        return copy
