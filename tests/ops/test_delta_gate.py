"""delta_gate: values and gradients against float64, exact answers, extreme activations, and what holds for every op."""

from __future__ import annotations

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena.ops.delta_gate import delta_gate
from jaxarena.ops.gated_delta_rule import gated_delta_rule
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
from tests.ops.delta_cases import arguments as rule_arguments

ALL = (0, 1, 2)


def naive(a, a_log, dt_bias):
    return -jnp.exp(a_log) * jnp.logaddexp(a + dt_bias, 0.0)


def arguments(shape, dtype=jnp.float32):
    """a, a_log, dt_bias, the parameters as a model starts with them."""
    a_log = jnp.log(jnp.asarray(np.random.default_rng(1).uniform(1, 16, shape[-1]), jnp.float32))
    return [normal(0, shape, dtype, scale=2.0), a_log, normal(2, shape[-1:]) - 4.0]


@hypothesis.settings(max_examples=6)
@hypothesis.given(shape=st.lists(st.integers(1, 19), min_size=1, max_size=4), dtype=st.sampled_from(DTYPES))
def test_matches_the_oracle(shape, dtype):
    # A gate of bfloat16 activations is float32 all the same: only da is rounded to bfloat16.
    args = arguments(tuple(shape), dtype)
    tokens = int(np.prod(shape[:-1]))
    check_against_oracle(delta_gate, naive, args, ALL, dtype=dtype, terms=tokens, stages=2)
    chex.assert_equal(delta_gate(*args).dtype, jnp.float32)
    check_against_oracle(delta_gate, naive, args, (1, 2), dtype=jnp.float32, terms=tokens, stages=4)


def test_exact_answers():
    a, zero = jnp.zeros((2, 3, 4)), jnp.zeros(4)
    g, (da, da_log, ddt_bias) = value_and_gradients(delta_gate, [a, zero, zero], ALL)
    chex.assert_trees_all_close(g, jnp.full((2, 3, 4), -np.log(2.0)), rtol=1e-7)
    chex.assert_trees_all_close(da_log, -np.log(2.0) * -2 * ddt_bias, rtol=1e-6)  # ddt_bias = -sum(dg) / 2
    chex.assert_trees_all_close(jnp.sum(da, (0, 1)), ddt_bias, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_activations_stay_finite(dtype):
    largest = float(jnp.finfo(dtype).max)
    a = jnp.asarray([-largest, -1e4, -80.0, 0.0, 80.0, 1e4, 1e30, largest], dtype)[None, :, None]
    g, gradients = value_and_gradients(delta_gate, [a, jnp.full(1, np.log(16.0), jnp.float32), jnp.zeros(1)], (0, 2))
    chex.assert_tree_all_finite((g, gradients))
    assert bool(jnp.all(g <= 0)) and bool(jnp.all(jnp.diff(g[0, :, 0]) <= 0))
    chex.assert_trees_all_equal(g[0, :2, 0], jnp.zeros(2))
    chex.assert_trees_all_close(g[0, 2, 0], jnp.float32(-16 * np.exp(-80.0)), rtol=1e-5)
    chex.assert_trees_all_close(g[0, 5, 0], -16 * a[0, 5, 0].astype(jnp.float32), rtol=1e-6)


def test_gates_that_overflow_have_gradients_of_zero_where_nothing_comes_back():
    a = jnp.full((1, 2, 1), jnp.finfo(jnp.float32).max)
    _, pull_back = jax.vjp(delta_gate, a, jnp.full(1, 3.0), jnp.zeros(1))
    chex.assert_trees_all_equal(pull_back(jnp.zeros((1, 2, 1))), (jnp.zeros_like(a), jnp.zeros(1), jnp.zeros(1)))


def test_the_rule_takes_it():
    """A reset that an extreme activation asks for: what came before is forgotten, and the gradients are finite."""
    q, k, v, _, beta = rule_arguments((1, 20, 1, 2, 4, 3))
    a = normal(5, (1, 20, 2)).at[:, 11].set(1e30)
    a_log, dt_bias = jnp.zeros(2), jnp.zeros(2)

    def o(a, v):
        return gated_delta_rule(q, k, v, delta_gate(a, a_log, dt_bias), beta)

    chex.assert_trees_all_equal(o(a, v)[:, 11:], o(a, v.at[:, :11].set(0.0))[:, 11:])
    gradient = jax.grad(lambda a: jnp.sum(o(a, v) ** 2))(a)
    chex.assert_tree_all_finite(gradient)
    chex.assert_trees_all_equal(gradient[:, 11], jnp.zeros((1, 2)))


def test_J7_no_tokens():
    args = arguments((2, 0, 3))
    g, (da, da_log, ddt_bias) = value_and_gradients(delta_gate, args, ALL)
    chex.assert_shape((g, da), (2, 0, 3))
    chex.assert_trees_all_equal((da_log, ddt_bias), (jnp.zeros(3), jnp.zeros(3)))


def test_frozen_arguments_cost_no_launch():
    args = arguments((2, 3, 5))
    assert gradient_launches(delta_gate, args, (0,)) == ["delta_gate_da"]
    assert gradient_launches(delta_gate, args, (1, 2)) == ["delta_gate_dparameters"]


def test_a_planned_step():
    args = arguments((3, 9, 5), jnp.bfloat16)
    assert_step_repeatable(jax.grad(lambda *a: jnp.sum(jnp.sin(delta_gate(a[0] * 2, *a[1:]))), argnums=ALL), *args)


def test_vmap_is_a_loop():
    a, a_log, dt_bias = arguments((3, 4, 7, 5))
    check_vmap(delta_gate, [a, a_log, dt_bias], ALL, (0, None, None))


@pytest.mark.parametrize("dtype", DTYPES)
def test_J5_J8_modes(dtype):
    check_modes(delta_gate, arguments((2, 7, 5), dtype), ALL)


def test_J3_shard_map():
    check_shard_map(delta_gate, arguments((2, 7, 5)), ALL, (True, False, False))


def test_errors_name_the_argument():
    a, a_log, dt_bias = arguments((2, 7, 5))
    with raises(TypeError, "delta_gate: a must be bfloat16 or float32, got int32"):
        delta_gate(a.astype(jnp.int32), a_log, dt_bias)
    with raises(TypeError, "a_log must be float32, got bfloat16"):
        delta_gate(a, a_log.astype(jnp.bfloat16), dt_bias)
    with raises(ValueError, "dt_bias must have shape (5,) (the heads of a), got shape (4,)"):
        delta_gate(a, a_log, dt_bias[:4])
    with raises(ValueError, "a must have shape (..., heads), got shape ()"):
        delta_gate(jnp.ones(()), a_log, dt_bias)
