"""What declaring and calling a launch refuses, and in which words."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxarena as ja
from jaxarena.ops import launch
from tests.ops.common import raises


@launch("scaled")
def scaled(x, *, factor):
    return x * factor


def test_a_launch_needs_a_name():
    with raises(TypeError, "launch: name must be a string, got function", 'write @launch("name")'):
        launch(lambda x: x)
    with raises(TypeError, "launch 'a': row_ndim must be an int or a tuple of ints, got 'row'"):
        launch("a", row_ndim="row")


@pytest.mark.parametrize(("factor", "kind"), [([2.0], "list"), (jnp.ones(3), "ArrayImpl")])
def test_parameters_are_static(factor, kind):
    with pytest.raises(TypeError, match=f"launch 'scaled': parameter factor must be hashable and known when .*, got {kind}"):
        scaled(jnp.ones(3), factor=factor)
    with pytest.raises(TypeError, match=r"launch 'scaled': parameter factor must be hashable .*, got .*Tracer"):
        jax.jit(lambda factor: scaled(jnp.ones(3), factor=factor))(2.0)


@pytest.mark.parametrize(("returned", "kind"), [(lambda x: {"y": x}, "dict"), (lambda x: [x, x], "list"), (lambda x: (x, 2.0), "float")])
def test_a_reference_returns_arrays(returned, kind):
    with pytest.raises(TypeError, match=f"launch 'odd': its reference must return an array or a tuple of arrays, got {kind}"):
        launch("odd")(returned)(jnp.ones(3))


def test_each_result_has_its_layout():
    two = launch("two", row_ndim=(1, 0))(lambda x: x + 1)
    with pytest.raises(ValueError, match=r"launch 'two': row_ndim must have one number for each of 1 results, got \(1, 0\)"):
        ja.jit(lambda x: two(two(x))).plan(jnp.ones((3, 5)))


def test_a_launch_alone_has_no_derivative():
    with pytest.raises(TypeError, match="launch 'scaled' has no derivative of its own: differentiate the op that calls it"):
        jax.grad(lambda x: scaled(x, factor=2.0).sum())(jnp.ones(3))
