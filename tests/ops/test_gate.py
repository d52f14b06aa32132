"""gate: values and gradients against float64, exact answers, extreme gates, and what holds for every op."""

from __future__ import annotations

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest

from jaxarena.ops.gate import gate
from jaxarena.testing import (
    assert_step_repeatable,
    check_against_oracle,
    check_modes,
    check_shard_map,
    check_vmap,
    gradient_launches,
    normal,
    value_and_gradients,
)
from tests.ops.common import DTYPES, raises

ACTIVATIONS = {"sigmoid": jax.nn.sigmoid, "silu": jax.nn.silu}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7, 33), (2, 3, 5, 65)])
def test_matches_the_oracle(shape, dtype, activation):
    args = [normal(0, shape, dtype), normal(1, shape, dtype, scale=3.0)]
    check_against_oracle(
        functools.partial(gate, activation=activation),
        lambda x, g: x * ACTIVATIONS[activation](g),
        args,
        (0, 1),
        dtype=dtype,
        terms=1,
        stages=2,
    )


def test_gate_dtype_may_differ():
    y, (dx, dgate) = value_and_gradients(gate, [normal(0, (3, 5), jnp.bfloat16), normal(1, (3, 5))], (0, 1))
    assert (y.dtype, dx.dtype, dgate.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)


def test_exact_answers():
    x = jnp.arange(6.0).reshape(2, 3)
    y, (dx, dgate) = value_and_gradients(gate, [x, jnp.zeros((2, 3))], (0, 1))
    chex.assert_trees_all_equal(y, x / 2)
    chex.assert_trees_all_equal(dgate, dx * x / 2)  # dx = dy / 2 and dgate = dy * x / 4
    y, (dx, dgate) = value_and_gradients(functools.partial(gate, activation="silu"), [x, jnp.zeros((2, 3))], (0, 1))
    chex.assert_trees_all_equal((y, dx), (jnp.zeros((2, 3)), jnp.zeros((2, 3))))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_gates_stay_finite(dtype, activation):
    x = normal(0, (1, 4), dtype)
    extreme = jnp.asarray([[-1e30, -1e4, 1e4, 1e30]], dtype)
    value, gradients = value_and_gradients(functools.partial(gate, activation=activation), [x, extreme], (0, 1))
    chex.assert_tree_all_finite((value, gradients))
    chex.assert_trees_all_equal(value[:, :2], jnp.zeros((1, 2), dtype))


@hypothesis.given(shape=st.sampled_from([(1,), (7, 5), (2, 3, 1, 9)]), activation=st.sampled_from(sorted(ACTIVATIONS)))
def test_is_linear_in_x(shape, activation):
    x, g = normal(0, shape), normal(1, shape)
    op = functools.partial(gate, activation=activation)
    chex.assert_trees_all_equal(op(4 * x, g), 4 * op(x, g))


def test_J7_no_rows():
    y, gradients = value_and_gradients(gate, [jnp.zeros((2, 0, 5)), jnp.zeros((2, 0, 5))], (0, 1))
    chex.assert_shape((y, *gradients), (2, 0, 5))


def test_a_frozen_argument_costs_no_launch():
    args = [normal(0, (3, 5)), normal(1, (3, 5))]
    assert gradient_launches(gate, args, (0,)) == ["gate_dx"]
    assert gradient_launches(gate, args, (1,)) == ["gate_dgate"]


def test_in_a_planned_step():
    def step(x, g):
        return jax.value_and_grad(lambda x, g: jnp.sum(gate(gate(x, g, activation="silu"), g) ** 3), argnums=(0, 1))(x, g)

    assert_step_repeatable(step, normal(0, (2, 7, 3, 65)), normal(1, (2, 7, 3, 65)))


def test_vmap_is_a_loop():
    check_vmap(gate, [normal(0, (3, 4, 5)), normal(1, (3, 4, 5))], (0, 1), (0, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_J5_J8_modes(dtype):
    check_modes(functools.partial(gate, activation="silu"), [normal(0, (5, 33), dtype), normal(1, (5, 33), dtype)], (0, 1))


def test_J3_shard_map():
    check_shard_map(gate, [normal(0, (4, 5)), normal(1, (4, 5))], (0, 1), (True, False))


def test_errors_name_the_argument():
    x = jnp.ones((2, 6))
    with raises(TypeError, "gate: gate must be bfloat16 or float32, got int32"):
        gate(x, jnp.ones((2, 6), jnp.int32))
    with raises(TypeError, "gate: x must be bfloat16 or float32, got float16"):
        gate(x.astype(jnp.float16), x)
    with raises(ValueError, "gate: gate must have shape (2, 6) (the shape of x), got shape (6,)"):
        gate(x, x[0])
    with raises(ValueError, "gate: activation must be one of 'sigmoid', 'silu', got 'tanh'"):
        gate(x, x, activation="tanh")
    with raises(ValueError, "gate: x must have shape (..., d), got shape ()"):
        gate(jnp.ones(()), jnp.ones(()))
