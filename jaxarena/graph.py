"""The step as a graph: values, equations, loops. What tracing makes and every later pass reads.

A :class:`Block` is a straight list of nodes: equations and loops. An equation whose primitive is a launch of ours is one
kernel launch; every other equation is XLA's. A loop is a ``lax.scan`` with launches in its body, kept as one body.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import Literal, Primitive

from jaxarena.ops.interface import Launch, launch_of
from jaxarena.panels import Layout

__all__ = ["Atom", "Block", "Copy", "Equation", "Loop", "Node", "Value", "values"]


class Value:
    """One array of the step; two values are the same only if they are one object."""

    __slots__ = ("aval",)

    def __init__(self, aval: Any):
        self.aval = aval

    def __repr__(self) -> str:
        return f"<{self.aval.str_short()} at {id(self):#x}>"


# A literal of JAX's has an ``aval`` and its array or number as ``val``.
Atom = Value | Literal


@dataclasses.dataclass(eq=False)
class Equation:
    """One primitive applied to atoms. ``context`` is JAX's own (matmul modes and the like), entered when it is run.

    ``is_backward`` says that it belongs to the backward pass of a ``jax.grad`` in the step.
    """

    primitive: Primitive
    params: dict[str, Any]
    context: Any
    inputs: list[Atom]
    outputs: list[Value]
    scope: str
    has_effects: bool = False
    is_backward: bool = False

    @property
    def launch(self) -> Launch | None:
        return launch_of(self.primitive)


@dataclasses.dataclass(eq=False)
class Loop:
    """A ``lax.scan`` planned once for its body.

    ``carries[k]`` is the body's view of what starts as ``init[k]``, becomes ``carry_outs[k]`` and ends as ``finals[k]``;
    ``elements[k]`` is the body's slice of ``xs[k]``; ``ys[k]`` stacks to ``stacks[k]``. What the body reads from outside is
    simply an outer value.
    """

    length: int
    reverse: bool
    unroll: int
    init: list[Atom]
    xs: list[Atom]
    carries: list[Value]
    elements: list[Value]
    body: Block
    carry_outs: list[Atom]
    ys: list[Atom]
    finals: list[Value]
    stacks: list[Value]
    scope: str
    is_backward: bool = False

    @property
    def inputs(self) -> list[Atom]:
        """All that the loop reads from outside, the body's own reads included."""
        inside: set[Value] = {*self.carries, *self.elements}
        outer: list[Atom] = [*self.init, *self.xs]
        for node in self.body.nodes:
            outer += [v for v in values(node.inputs) if v not in inside]
            inside.update(node.outputs)
        return outer + [v for v in values([*self.carry_outs, *self.ys]) if v not in inside]

    @property
    def outputs(self) -> list[Value]:
        return [*self.finals, *self.stacks]


Node = Equation | Loop


@dataclasses.dataclass(eq=False)
class Block:
    """Nodes in order; every value is made before it is read."""

    nodes: list[Node]


@dataclasses.dataclass(frozen=True)
class Copy:
    """What is known of a value that is a copy for the backward pass: what it copies, by name and value, and the layout it is to have."""

    name: str
    source: Value
    layout: Layout


def values(atoms: Sequence[Atom]) -> Iterator[Value]:
    """The values among atoms, literals left out."""
    return (a for a in atoms if isinstance(a, Value))
