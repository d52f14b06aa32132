"""A function's jaxpr made into a :class:`~jaxarena.graph.Block`: calls inlined, dead code dropped, scans with launches kept as loops.

Inlined are nested ``jit``, ``custom_jvp``, ``custom_vjp`` (outside a gradient they stay calls) and ``jax.checkpoint``. A jaxpr that is
reached twice is one object, so each call has an environment of its own. A checkpoint that asks for it (``prevent_cse``) keeps a
barrier on its inputs, or XLA would merge the recomputation with the first pass and hold on to what was to be dropped.
``checkpoint_name`` leaves no equation, only the name of its value. What belongs to the backward pass is told by JAX's own name stack.
``cond`` and ``while`` stay whole equations: the launches in them run as their XLA references.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal
from jax.extend.core.primitives import scan_p
from jax.interpreters import partial_eval as pe

from jaxarena.graph import Atom, Block, Equation, Loop, Node, Value, values
from jaxarena.ops.interface import launch_of

__all__ = ["Graph"]

# The calls that are inlined, and the parameter that holds what they call.
_CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}


class Graph:
    """A step as ``jax.jit(...).trace(...)`` gave it: ``inputs`` (closed-over constants first), ``block``, ``outputs``.

    Attributes:
      constants: the arrays for the first ``len(constants)`` inputs.
      names: what ``jax.ad_checkpoint.checkpoint_name`` calls values.
    """

    def __init__(self, traced: jax.stages.Traced):
        self.constants: list[Any] = list(traced.closure_convert()[0])
        jaxpr, _ = pe.dce_jaxpr(traced.jaxpr, True, instantiate=True)
        self.inputs = [Value(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)]
        self.names: dict[Value, str] = {}
        nodes: list[Node] = []
        self.outputs = _Inliner(self.names).inline(jaxpr, [], self.inputs, nodes)
        self.block = Block(nodes)
        _drop_dead_code(self.block, set(values(self.outputs)))


class _Inliner:
    """Walks jaxprs; ``names`` takes the names that values are given."""

    def __init__(self, names: dict[Value, str]):
        self.names = names

    def inline(
        self,
        jaxpr: Any,
        constants: Sequence[Atom],
        arguments: Sequence[Atom],
        nodes: list[Node],
        scope: str = "",
        is_backward: bool = False,
    ) -> list[Atom]:
        """Appends what ``jaxpr`` does to ``nodes``; returns its results."""
        env: dict[Any, Atom] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))

        def read(atom: Any) -> Atom:
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            inputs = [read(a) for a in eqn.invars]
            stack = str(eqn.source_info.name_stack)
            name = "/".join(filter(None, (scope, _named_scopes(stack))))
            backward = is_backward or "transpose(" in stack
            if eqn.primitive.name in _CALLS:
                inner = eqn.params[_CALLS[eqn.primitive.name]]
                if eqn.params.get("prevent_cse") and eqn.params.get("differentiated", True):
                    inputs = _barrier(inputs, eqn, nodes, name, backward)
                results = self.inline(inner, _constants(inner), inputs, nodes, name, backward)
                env.update(zip(eqn.outvars, results, strict=True))
                continue
            if eqn.primitive.name == "name":
                env[eqn.outvars[0]] = inputs[0]
                self.names.update({v: eqn.params["name"] for v in values(inputs)})
                continue
            outputs = [Value(v.aval) for v in eqn.outvars]
            env.update(zip(eqn.outvars, outputs, strict=True))
            if eqn.primitive is scan_p and _has_launches(eqn.params["jaxpr"]):
                nodes.append(self.loop(eqn, inputs, outputs, name, backward))
            else:
                nodes.append(Equation(eqn.primitive, eqn.params, eqn.ctx, inputs, outputs, name, bool(eqn.effects), backward))
        return [read(v) for v in jaxpr.outvars]

    def loop(self, eqn: Any, inputs: list[Atom], outputs: list[Value], scope: str, is_backward: bool) -> Loop:
        # ft_in is how scan's parameters say which operands are constants, carries and scanned arrays.
        consts, init, xs = map(list, eqn.params["ft_in"].update(inputs).unpack())
        inner = eqn.params["jaxpr"]
        body_inputs = [Value(v.aval) for v in inner.invars[len(consts) :]]
        carries, elements = body_inputs[: len(init)], body_inputs[len(init) :]
        nodes: list[Node] = []
        results = self.inline(inner, _constants(inner), [*consts, *body_inputs], nodes, scope, is_backward)
        n = len(init)
        return Loop(
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
            init=init,
            xs=xs,
            carries=carries,
            elements=elements,
            body=Block(nodes),
            carry_outs=results[:n],
            ys=results[n:],
            finals=outputs[:n],
            stacks=outputs[n:],
            scope=scope,
            is_backward=is_backward,
        )


def _named_scopes(stack: str) -> str:
    """The user's ``jax.named_scope`` names in a name stack: ``transpose(jvp(model))/layer0`` is ``model/layer0``."""
    while (plain := re.sub(r"\w+\(([^()]*)\)", r"\1", stack)) != stack:
        stack = plain
    return "/".join(filter(None, stack.split("/")))


def _constants(jaxpr: Any) -> list[Atom]:
    return [Literal(c, jax.typeof(c)) for c in jaxpr.consts]


def _barrier(inputs: list[Atom], eqn: Any, nodes: list[Node], scope: str, is_backward: bool) -> list[Atom]:
    guarded = {v: Value(v.aval) for v in values(inputs)}
    nodes.append(Equation(lax.optimization_barrier_p, {}, eqn.ctx, list(guarded), list(guarded.values()), scope, False, is_backward))
    return [guarded[a] if isinstance(a, Value) else a for a in inputs]


def _has_launches(jaxpr: Any) -> bool:
    """Whether launches run in ``jaxpr`` where the planner can see them: not inside ``cond`` or ``while``."""
    for eqn in jaxpr.eqns:
        if launch_of(eqn.primitive):
            return True
        inner = eqn.params.get(_CALLS.get(eqn.primitive.name, "jaxpr" if eqn.primitive is scan_p else ""))
        if inner is not None and _has_launches(inner):
            return True
    return False


def _drop_dead_code(block: Block, live: set[Value]) -> None:
    """Keeps what ``live`` and effects need; adds to ``live`` all that the kept nodes read."""
    kept: list[Node] = []
    for node in reversed(block.nodes):
        if isinstance(node, Loop):
            used = [k for k, s in enumerate(node.stacks) if s in live]
            node.ys, node.stacks = [node.ys[k] for k in used], [node.stacks[k] for k in used]
            if not node.stacks and not any(f in live for f in node.finals) and not _has_effects(node.body):
                continue
            _drop_dead_code(node.body, inner := set(values([*node.carry_outs, *node.ys])))
            live.update(inner)
            scanned = [k for k, e in enumerate(node.elements) if e in inner]
            node.xs, node.elements = [node.xs[k] for k in scanned], [node.elements[k] for k in scanned]
        elif not node.has_effects and not any(v in live for v in node.outputs):
            continue
        live.update(values(node.inputs))
        kept.append(node)
    block.nodes = kept[::-1]


def _has_effects(block: Block) -> bool:
    return any(_has_effects(n.body) if isinstance(n, Loop) else n.has_effects for n in block.nodes)
