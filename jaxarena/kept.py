"""Which arrays the backward pass reads in another storage than they were made in.

What the forward pass keeps for the backward pass is most of a train step's memory. A **storage policy** keeps some of it in bf16 or in
int8 words with block scales (:mod:`jaxarena.storage`): right after such an array is made it is written a second time, in that storage,
and the backward pass reads this copy. The forward pass goes on with the array itself, so the loss does not change; gradients see the
rounded array. The array's own memory is free as soon as the forward pass is done with it.

A policy is one storage for all, or a dict from patterns (:func:`fnmatch.fnmatchcase`) to storages, of which the first match counts;
``None`` leaves an array as it is. A pattern is matched with the name that ``jax.ad_checkpoint.checkpoint_name`` gave the array and with
the launch that made it, scope in front: ``layer0/project``. It applies to floating-point rows made by a launch (row vectors such as a
log-sum-exp decide how exact a backward pass is and are few) where the storage takes less room.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as jp

from jaxarena import panels
from jaxarena.graph import Atom, Block, Copy, Equation, Loop, Node, Value, values
from jaxarena.panels import Layout
from jaxarena.residence import is_part, is_reshape
from jaxarena.storage import STORAGE_OF_DTYPE
from jaxarena.trace import Graph

__all__ = ["STORAGES", "StoragePolicy", "check_policy", "keep"]

StoragePolicy = str | Mapping[str, str | None] | None

STORAGES = ("bf16", "int8", "int8x2")
"""What kept arrays can be stored in."""


def check_policy(storage: StoragePolicy) -> dict[str, str | None]:
    """The policy as a dict.

    Raises:
      TypeError: when it is neither a string nor a dict.
      ValueError: for an unknown storage.
    """
    if storage is None:
        return {}
    policy = {"*": storage} if isinstance(storage, str) else storage
    if not isinstance(policy, Mapping):
        raise TypeError(f"jaxarena.jit: storage must be None, a string or a dict from patterns to storages, got {storage!r}")
    for pattern, name in policy.items():
        if name is not None and name not in STORAGES:
            raise ValueError(f"jaxarena.jit: storage {name!r} for {pattern!r} must be one of {', '.join(map(repr, STORAGES))} or None")
    return dict(policy)


def keep(graph: Graph, policy: Mapping[str, str | None]) -> dict[Value, Copy]:
    """Puts the copies into the graph and has the backward pass read them.

    Returns:
      The copies.

    Raises:
      ValueError: names a pattern that matches no array the backward pass reads, and what there is.
    """
    keeper = _Keeper(graph, policy)
    if policy:
        keeper.top()
    return keeper.made


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows that a launch made: their root (the value under reshapes), how they lie, and the names that patterns are matched with."""

    root: Value
    layout: Layout
    names: tuple[str, ...]


class _Keeper:
    def __init__(self, graph: Graph, policy: Mapping[str, str | None]):
        self.graph, self.policy = graph, policy
        self.made: dict[Value, Copy] = {}
        self.unused = set(policy)
        self.seen: set[str] = set()

    def top(self) -> None:
        block = self.graph.block
        backward = [n for n in block.nodes if n.is_backward]
        kept = {v for n in backward for v in values(n.inputs)} - set(values(self.graph.outputs))
        copies = self.block(block, kept, {})
        for node in backward:
            _substitute(node, copies)
        if self.unused:
            raise ValueError(
                f"jaxarena.jit: storage pattern {min(self.unused)!r} matches no array that the backward pass reads; "
                f"there are {', '.join(sorted(self.seen)) or 'none'}"
            )

    def block(self, block: Block, kept: set[Value], carried: dict[Value, Atom]) -> dict[Value, Value]:
        """Adds the copies of what is kept of a block; returns the value to read for each value that has one.

        ``carried`` are a loop's carries, each with what becomes its next value.
        """
        makers: dict[Value, Node] = {v: n for n in block.nodes for v in n.outputs}
        forward_reads = {v for n in block.nodes if not n.is_backward for v in values(n.inputs)}
        copies: dict[Value, Value] = {}
        of_root: dict[tuple[Value, str], Value] = {}
        nodes: list[Node] = []

        def copy(value: Value) -> None:
            if value in kept and (rows := self._rows(value, makers, carried)) and (storage := self._storage(rows)):
                copies[value] = self._copy(value, rows, storage, of_root, nodes)

        for carry in carried:
            copy(carry)
        for node in block.nodes:
            nodes.append(node)
            if node.is_backward:
                continue
            if isinstance(node, Loop):
                inner = {y for y, s in zip(node.ys, node.stacks, strict=True) if s in kept and s not in forward_reads}
                inner_copies = self.block(node.body, set(values(list(inner))), dict(zip(node.carries, node.carry_outs, strict=True)))
                for k, y in enumerate(node.ys):
                    if isinstance(y, Value) and y in inner and y in inner_copies:
                        node.ys[k] = inner_copies[y]
            else:
                for value in node.outputs:
                    copy(value)
        block.nodes = nodes
        return copies

    def _rows(self, value: Value, makers: dict[Value, Node], carried: dict[Value, Atom]) -> _Rows | None:
        """What is known of a value when a launch made it: directly, or behind reshapes, slices and the turn of a loop."""
        names = [self.graph.names[value]] if value in self.graph.names else []
        root, at, sliced, turned = value, value, False, False
        while True:
            if at in carried:
                following = carried[at]
                if turned or not isinstance(following, Value):
                    return None  # handed on from turn to turn: no launch makes it
                at, turned = following, True
                sliced = True  # the root is the carry itself
            maker = makers.get(at)
            if not isinstance(maker, Equation):
                return None
            if maker.launch is not None:
                break
            if maker.primitive is lax.optimization_barrier_p:
                source = maker.inputs[maker.outputs.index(at)]
                sliced = True
            elif is_part(maker):
                source = maker.inputs[0]
                sliced = sliced or not is_reshape(maker)
            else:
                return None
            if not isinstance(source, Value):
                return None
            at = source
            names += [self.graph.names[at]] if at in self.graph.names else []
            root = root if sliced else at
        row_ndim = maker.launch.row_ndims([v.aval for v in maker.outputs])[maker.outputs.index(at)]
        if row_ndim == 0 or value.aval.dtype not in (jnp.float32, jnp.bfloat16):
            return None
        if root is not at:
            # A part of the rows: its own axes tell how many lie side by side.
            row_ndim = max(1, min(row_ndim - at.aval.ndim + root.aval.ndim, root.aval.ndim))
        names.append(f"{maker.scope}/{maker.launch.name}".lstrip("/"))
        storage = STORAGE_OF_DTYPE[value.aval.dtype]
        return _Rows(root, Layout(tuple(map(int, root.aval.shape)), storage, row_ndim), tuple(names))

    def _storage(self, rows: _Rows) -> str | None:
        """The storage that the policy asks for, where it takes less room than the array itself."""
        self.seen.update(rows.names)
        for pattern, storage in self.policy.items():
            if any(fnmatchcase(name, pattern) for name in rows.names):
                self.unused.discard(pattern)
                smaller = storage is not None and dataclasses.replace(rows.layout, storage=storage).bytes < rows.layout.bytes
                return storage if smaller else None
        return None

    def _copy(self, value: Value, rows: _Rows, storage: str, of_root: dict[tuple[Value, str], Value], nodes: list[Node]) -> Value:
        """The copy of a value: of its root once, and a view of that copy for each shape."""
        layout = dataclasses.replace(rows.layout, storage=storage)
        shape = tuple(map(int, value.aval.shape))
        root = rows.root
        if panels.reshape(layout, panels.full_view(layout), shape) is None:
            root, layout = value, Layout(shape, storage, min(rows.layout.row_ndim, len(shape)))
        if (root, storage) not in of_root:
            made = Value(root.aval)
            nodes.append(Equation(jp.copy_p, {}, None, [root], [made], ""))
            self.made[made] = Copy(rows.names[-1], root, layout)
            of_root[root, storage] = made
        copy = of_root[root, storage]
        if value is root:
            return copy
        view = Value(value.aval)
        params = {"new_sizes": shape, "dimensions": None, "sharding": None}
        nodes.append(Equation(jp.reshape_p, params, None, [copy], [view], ""))
        return view


def _substitute(node: Node, copies: Mapping[Value, Value]) -> None:
    """Has a node, and what is in it, read the copies."""

    def swap(atoms: Iterable[Any]) -> list[Any]:
        return [copies.get(a, a) if isinstance(a, Value) else a for a in atoms]

    if isinstance(node, Equation):
        node.inputs = swap(node.inputs)
        return
    node.init, node.xs = swap(node.init), swap(node.xs)
    node.carry_outs, node.ys = swap(node.carry_outs), swap(node.ys)
    for inner in node.body.nodes:
        _substitute(inner, copies)
