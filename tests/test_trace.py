"""From a function to a graph: what is inlined, what stays whole, what is dropped."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxarena.graph import Block, Equation, Loop
from jaxarena.testing import check_step
from jaxarena.trace import Graph
from tests.programs import integers, times, twice, twice_forward


def graph_of(function: Any, *args: Any) -> Graph:
    return Graph(jax.jit(function).trace(*args))


def names(block: Block) -> list[Any]:
    """Launches by name, loops as lists; XLA's equations by their primitive."""
    return [
        names(n.body) if isinstance(n, Loop) else n.launch.name if isinstance(n, Equation) and n.launch else n.primitive.name
        for n in block.nodes
    ]


X = jnp.ones((5, 32))


def test_nested_jits_are_inlined_each_with_an_environment_of_its_own() -> None:
    inner = jax.jit(lambda x, y: twice_forward(x) - y)
    step = lambda x: inner(inner(x, x), x + 1)  # noqa: E731
    assert names(graph_of(step, X).block) == ["twice", "sub", "add", "twice", "sub"]
    check_step(step, integers(0, 5, 32))


def test_custom_derivatives_outside_a_gradient_are_inlined() -> None:
    assert names(graph_of(lambda x: jax.nn.relu(twice(x)), X).block) == ["twice", "max"]


def test_dead_code_is_dropped_also_in_loops_and_calls() -> None:
    def step(x: Any) -> Any:
        times(x, x)

        def body(h: Any, _: Any) -> Any:
            return twice(h), times(h, h)

        h, _ = lax.scan(body, x, None, length=3)
        return jax.jit(lambda a: (a + 1, twice_forward(a)))(h)[0]

    assert names(graph_of(step, X).block) == [["twice"], "add"]


def test_loops_without_launches_and_branches_stay_whole() -> None:
    def step(x: Any) -> Any:
        y, _ = lax.scan(lambda c, _: (c + 1, None), x, None, length=3)
        return lax.cond(y[0, 0] > 0, twice_forward, lambda v: v, y)

    found = names(graph_of(step, X).block)
    assert "scan" in found
    assert "cond" in found
    assert "twice" not in found


def test_checkpoint_is_inlined_behind_a_barrier() -> None:
    def step(x: Any) -> Any:
        return jax.grad(lambda x: jax.checkpoint(lambda x: times(twice(x), x))(x).sum())(x)

    found = names(graph_of(step, X).block)
    assert found.count("optimization_barrier") == 1
    assert found.index("optimization_barrier") < found.index("twice")


def test_scopes_of_the_user_are_kept_without_those_of_transformations() -> None:
    def step(x: Any) -> Any:
        def loss(x: Any) -> Any:
            with jax.named_scope("layer"), jax.named_scope("mixer"):
                return times(x, x).sum()

        return jax.grad(loss)(x)

    launches = [n for n in graph_of(step, X).block.nodes if isinstance(n, Equation) and n.launch]
    assert {n.scope for n in launches} == {"layer/mixer"}


def test_constants_come_first_among_the_inputs() -> None:
    weight = integers(1, 5, 32)
    graph = graph_of(lambda x: twice_forward(x + weight), X)
    assert len(graph.inputs) == 1 + len(graph.constants)
    check_step(lambda x: twice_forward(x + weight), integers(2, 5, 32))
