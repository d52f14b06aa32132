"""Runs a scheduled step against its arena: the arena is threaded through the launches in order.

Every value that lives in the arena is written to its rows by the launch that makes it and read from there by each launch that uses
it, so a wrong plan gives wrong numbers, not only a wrong picture.

A launch runs as its kernel where the device takes kernels and the plan has no reason against it: on the arena in place, as a JAX ref.
Else it runs as its XLA reference, and each read and write passes the arena through a barrier (:mod:`jaxarena.storage`): in place,
without a copy. What one reference read and the very next reads too (the two gradients of a product, say) is read once for both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxarena import storage
from jaxarena.arena import Arena
from jaxarena.dispatch import launch_sites
from jaxarena.graph import Atom, Equation, Value, values
from jaxarena.kernels import ArenaTensor, KernelDevice, Site
from jaxarena.residence import Home, Residence
from jaxarena.schedule import Region, Repeat, Schedule, Step

__all__ = ["execute"]


def execute(
    schedule: Schedule, placement: Arena, buffer: jax.Array, inputs: Sequence[Any], device: KernelDevice | None = None
) -> tuple[list[Any], jax.Array]:
    """Runs the step.

    Args:
      schedule: what to run.
      placement: where every home lies.
      buffer: the arena, int8 [rows, 128] or uint32 [rows, 32].
      inputs: the step's inputs, flat, without the closed-over constants.
      device: what kernels run on; None: every launch runs as its reference.

    Returns:
      The step's outputs, flat, and the arena.
    """
    run = _Run(schedule, {home: placement.find(name).row for home, name in schedule.home_names.items()}, buffer, device)
    run.env.update(zip(schedule.graph.inputs, (*schedule.graph.constants, *inputs), strict=True))
    run.steps(schedule.steps)
    outputs = run.read_all(schedule.graph.outputs)  # before the buffer is taken: reading passes it on
    return outputs, run.buffer


class _Run:
    """One pass over the steps: the arena, the XLA arrays, and the turn of each loop."""

    def __init__(self, schedule: Schedule, rows: dict[Home, int], buffer: jax.Array, device: KernelDevice | None):
        self.residences, self.rows, self.buffer, self.device = schedule.residences, rows, buffer, device
        self.fallbacks = schedule.fallbacks
        self.env: dict[Value, Any] = {}
        self.turns: dict[str, Any] = {}
        self.just_read: dict[Value, Any] = {}  # by the launch before, from the arena

    def steps(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, Repeat):
                self._repeat(step)
            elif isinstance(step, Region):
                self._region(step)
            elif self.device and self.fallbacks[step] is None and not self._varies(step):
                self._kernel(step, self.device)
            else:
                self._write_all(step.outputs, _apply(step, self.read_all(step.inputs)))

    def _varies(self, equation: Equation) -> bool:
        """Whether the arena or an operand varies over the axes of a mesh (inside ``shard_map``): Pallas takes no such ref."""
        arrays = [self.buffer, *(self.env[a] for a in values(equation.inputs) if a in self.env)]
        return any(jax.typeof(a).manual_axis_type.varying for a in arrays)

    def _kernel(self, equation: Equation, device: KernelDevice) -> None:
        launch = equation.launch
        assert launch is not None and launch.gpu_kernel is not None
        kernel, sites = launch.gpu_kernel, launch_sites(equation, self.residences)
        count = len(sites.operands)
        in_place = [site.in_arena and not kernel.arrays & {i, i - count} for i, site in enumerate(sites.operands)]
        arrays = iter(self.read_all([a for a, stays in zip(equation.inputs, in_place, strict=True) if not stays]))
        operands = [
            self._tensor(a, site) if stays else next(arrays)
            for a, site, stays in zip(equation.inputs, sites.operands, in_place, strict=True)
        ]
        out = [self._tensor(v, site) if site.in_arena else None for v, site in zip(equation.outputs, sites.results, strict=True)]
        avals = [a.aval for a in equation.inputs]
        # The CPU's arena has wider elements (interpret mode only).
        element = self.buffer.dtype
        arena = jax.new_ref(storage.as_elements(self.buffer, jnp.int8))
        with jax.named_scope(equation.scope) if equation.scope else contextlib.nullcontext():
            returned = kernel.run(arena, *operands, out=launch.results_of(avals, equation.params, out), device=device, **equation.params)
        self.buffer = storage.as_elements(arena[...], element)
        for value, site, result in zip(equation.outputs, sites.results, jax.tree.leaves(returned, is_leaf=_is_none), strict=True):
            if not site.in_arena:
                self.env[value] = result

    def _tensor(self, atom: Atom, site: Site) -> ArenaTensor:
        assert isinstance(atom, Value)
        return ArenaTensor(site, self._row(self.residences[atom].resolved()))

    def read_all(self, atoms: Sequence[Atom]) -> list[Any]:
        """The arrays of atoms; those of the arena pass one barrier with it, or XLA would copy the arena to keep them readable."""
        lying = [a for a in values(atoms) if a in self.residences]
        read = {a: self.just_read[a] for a in lying if a in self.just_read}
        fresh = [a for a in dict.fromkeys(lying) if a not in read]
        if fresh:
            settled, self.buffer = lax.optimization_barrier(([self._load(a) for a in fresh], self.buffer))
            read.update(zip(fresh, settled, strict=True))
        self.just_read = read
        return [read[a] if isinstance(a, Value) and a in read else self._load(a) for a in atoms]

    def _load(self, atom: Atom) -> Any:
        """The array of an atom: a literal, an XLA array, or what lies in the arena."""
        if not isinstance(atom, Value):
            aval: Any = atom.aval
            return jnp.asarray(atom.val, aval.dtype)
        residence = self.residences.get(atom)
        if residence is None:
            return self.env[atom]
        place = residence.resolved()
        slot_rows = place.home.slot_rows
        if place.run is None:
            array = storage.load(self.buffer, self._row(place), place.layout, place.view, slot_rows)
            return array.astype(atom.aval.dtype)  # kept arrays may lie in another storage
        slots = lax.dynamic_slice_in_dim(self.buffer, self._row(place), place.run * slot_rows)
        slots = slots.reshape(place.run, slot_rows, -1)
        return jax.vmap(lambda slot: storage.load(slot, 0, place.layout, place.view, slot_rows))(slots).astype(atom.aval.dtype)

    def _write_all(self, values: Sequence[Value], arrays: Sequence[Any]) -> None:
        for value, array in zip(values, arrays, strict=True):
            residence = self.residences.get(value)
            if residence is None:
                self.env[value] = array
            else:
                place = residence.resolved()
                array = array.astype(storage.DTYPE_OF_STORAGE.get(place.layout.storage, array.dtype))
                self.buffer = storage.write(self.buffer, self._row(place), place.layout, place.view, array, place.home.slot_rows)

    def _row(self, place: Residence) -> Any:
        """The first arena row of a slot: a constant, or an int32 of the loop's turn."""
        base, slot = self.rows[place.home], place.slot
        index = slot.start + slot.step * self.turns[slot.loop] if slot.loop is not None else slot.start
        if slot.modulus is not None:
            index = index % slot.modulus
        return base + index * place.home.slot_rows

    def _region(self, region: Region) -> None:
        local = dict(zip(region.inputs, self.read_all(region.inputs), strict=True))
        for equation in region.equations:
            arrays = _apply(equation, [local[a] if isinstance(a, Value) else a.val for a in equation.inputs])
            local.update(zip(equation.outputs, arrays, strict=True))
        self._write_all(region.outputs, [local[v] for v in region.outputs])

    def _repeat(self, repeat: Repeat) -> None:
        loop = repeat.loop
        key = str(id(loop))
        carried = [k for k, v in enumerate(loop.carries) if v not in self.residences]
        scanned = [k for k, v in enumerate(loop.elements) if v not in self.residences]
        stacked = [k for k, v in enumerate(loop.stacks) if v not in self.residences]
        init = self.read_all([loop.init[k] for k in carried])
        xs = self.read_all([loop.xs[k] for k in scanned])
        outer_env = self.env

        def body(carry: Any, element: Any) -> Any:
            self.buffer, arrays = carry
            self.turns[key], slices = element
            self.env = dict(outer_env)
            self.env.update(zip((loop.carries[k] for k in carried), arrays, strict=True))
            self.env.update(zip((loop.elements[k] for k in scanned), slices, strict=True))
            self.just_read = {}
            self.steps(repeat.body)
            outs = self.read_all([loop.carry_outs[k] for k in carried])
            ys = self.read_all([loop.ys[k] for k in stacked])
            return (self.buffer, outs), ys

        # The turn counts from 0 in the order of execution; lax.scan hands a reversed loop its elements from the last on.
        turns = jnp.arange(loop.length, dtype=jnp.int32)
        turns = turns[::-1] if loop.reverse else turns
        (self.buffer, outs), ys = lax.scan(
            body, (self.buffer, init), (turns, xs), length=loop.length, reverse=loop.reverse, unroll=loop.unroll
        )
        self.env, self.just_read = outer_env, {}
        self.env.update(zip((loop.finals[k] for k in carried), outs, strict=True))
        self.env.update(zip((loop.stacks[k] for k in stacked), ys, strict=True))


def _is_none(x: Any) -> bool:
    return x is None


def _apply(equation: Equation, arrays: list[Any]) -> list[Any]:
    """Binds an equation's primitive, as JAX itself evaluates a jaxpr."""
    primitive = equation.primitive
    params = primitive.get_bind_params(equation.params)
    context = equation.context.manager if equation.context is not None else contextlib.nullcontext()
    with jax.named_scope(equation.scope) if equation.scope else contextlib.nullcontext(), context:
        results = primitive.bind(*arrays, **params)
    return list(results) if primitive.multiple_results else [results]
