"""project: values and gradients against float64, exact answers, residual and swiglu, and what holds for every op."""

from __future__ import annotations

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest

from jaxarena.ops.project import project
from jaxarena.testing import (
    check_against_oracle,
    check_modes,
    check_shard_map,
    check_vmap,
    gradient_launches,
    integers,
    live_launches,
    normal,
    value_and_gradients,
)
from tests.ops.common import DTYPES, raises

SHAPES = (((1,), 1, 1), ((2, 5), 129, 66), ((2, 3, 5), 17, 3), ((), 19, 5))

swiglu = functools.partial(project, activation="swiglu")


def with_residual(x, weight, residual):
    return project(x, weight, residual=residual)


def naive_swiglu(x, weight):
    a, u = jnp.split(x @ weight, 2, axis=-1)
    return jax.nn.silu(a) * u


def arguments(rows, k, n, dtype):
    return [normal(0, (*rows, k), dtype), normal(1, (k, n), dtype, scale=k**-0.5), normal(2, (*rows, n), dtype)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,k,n", SHAPES)
def test_matches_the_oracle(rows, k, n, dtype):
    x, weight, _ = arguments(rows, k, n, dtype)
    check_against_oracle(project, jnp.matmul, [x, weight], (0, 1), dtype=dtype, terms=max(k, n, x.size // k))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,k,n", SHAPES)
def test_with_residual_matches_the_oracle(rows, k, n, dtype):
    args = arguments(rows, k, n, dtype)
    terms = max(k, n, args[0].size // k)
    check_against_oracle(with_residual, lambda x, w, r: x @ w + r, args, (0, 1, 2), dtype=dtype, terms=terms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,k,n", SHAPES)
def test_swiglu_matches_the_oracle(rows, k, n, dtype):
    x, weight, _ = arguments(rows, k, 2 * n, dtype)
    # Rounded on the way: the kept rows, their gradient, the result.
    check_against_oracle(swiglu, naive_swiglu, [x, weight], (0, 1), dtype=dtype, terms=max(k, 2 * n, x.size // k), stages=3)


@pytest.mark.parametrize("dtype", DTYPES)
@hypothesis.given(shape=st.sampled_from([(1, 1, 1), (9, 20, 7), (3, 37, 13)]), seed=st.integers(0, 99))
def test_small_integers_have_exact_answers(dtype, shape, seed):
    rows, k, n = shape
    x, weight, residual = (integers(seed + i, s, -2, 3) for i, s in enumerate(((rows, k), (k, n), (rows, n))))
    value, (dx, dweight, dresidual) = jax.value_and_grad(lambda *a: jnp.sum(with_residual(*a).astype(jnp.float32)), argnums=(0, 1, 2))(
        x.astype(dtype), weight.astype(dtype), residual.astype(dtype)
    )
    assert int(value) == int(jnp.sum(x @ weight + residual))
    chex.assert_trees_all_equal(dx.astype(jnp.int32), jnp.broadcast_to(jnp.sum(weight, axis=1), x.shape))
    chex.assert_trees_all_equal(dweight.astype(jnp.int32), jnp.broadcast_to(jnp.sum(x, axis=0)[:, None], weight.shape))
    chex.assert_trees_all_equal(dresidual.astype(jnp.int32), jnp.ones((rows, n), jnp.int32))


def test_the_gate_columns_come_first():
    x = jnp.asarray([[2.0]])
    y = swiglu(x, jnp.asarray([[0.0, 3.0]]))
    chex.assert_trees_all_equal(y, jnp.zeros((1, 1)))
    y = swiglu(x, jnp.asarray([[50.0, 3.0]]))
    chex.assert_trees_all_equal(y, jnp.asarray([[600.0]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_has_the_same_bits_with_and_without_a_gradient(dtype):
    x, weight, _ = arguments((5,), 33, 14, dtype)
    chex.assert_trees_all_equal(jax.jit(swiglu)(x, weight), jax.jit(lambda *a: jax.vjp(swiglu, *a)[0])(x, weight))


def test_swiglu_keeps_its_rows_only_for_a_gradient():
    x, weight, _ = arguments((5,), 33, 14, jnp.float32)
    assert live_launches(swiglu, x, weight) == ["project_swiglu"]
    assert gradient_launches(swiglu, [x, weight], (0, 1)) == ["project_swiglu_kept", "swiglu_dz", "project_dx", "project_dweight"]


def test_nan_stays_in_its_row():
    x, weight, _ = arguments((4,), 9, 6, jnp.float32)
    keep = jnp.array([0, 1, 3])
    for op in (project, swiglu):
        chex.assert_trees_all_equal(op(x.at[2, 5].set(jnp.nan), weight)[keep], op(x, weight)[keep])


@pytest.mark.parametrize("op", [project, swiglu])
def test_J7_no_rows(op):
    x, weight = jnp.zeros((2, 0, 7)), jnp.ones((7, 4))
    y, (dx, dweight) = value_and_gradients(op, [x, weight], (0, 1))
    chex.assert_shape((y, dx), [(2, 0, 4 if op is project else 2), (2, 0, 7)])
    chex.assert_trees_all_equal(dweight, jnp.zeros((7, 4)))


def test_a_frozen_argument_costs_no_launch():
    args = arguments((5,), 33, 14, jnp.float32)
    assert gradient_launches(project, args[:2], (0,)) == ["project_dx"]
    assert gradient_launches(project, args[:2], (1,)) == ["project_dweight"]
    assert gradient_launches(with_residual, args, (2,)) == []
    assert gradient_launches(swiglu, args[:2], (0,)) == ["project_swiglu_kept", "swiglu_dz", "project_dx"]


def test_vmap_is_a_loop():
    check_vmap(with_residual, [normal(0, (3, 4, 9)), normal(1, (9, 5)), normal(2, (3, 4, 5))], (0, 1, 2), (0, None, 0))
    check_vmap(swiglu, [normal(0, (3, 4, 9)), normal(1, (3, 9, 6))], (0, 1), (0, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_J5_J8_modes(dtype):
    args = arguments((5,), 33, 14, dtype)
    check_modes(with_residual, args, (0, 1, 2))
    check_modes(swiglu, args[:2], (0, 1))


def test_J3_shard_map():
    args = arguments((4,), 9, 6, jnp.float32)
    check_shard_map(with_residual, args, (0, 1, 2), (True, False, True))
    check_shard_map(swiglu, args[:2], (0, 1), (True, False))


def test_errors_name_the_argument():
    x, weight = jnp.ones((2, 6)), jnp.ones((6, 5))
    with raises(TypeError, "project: x must be bfloat16 or float32, got float16"):
        project(x.astype(jnp.float16), weight)
    with raises(TypeError, "project: weight must have the dtype of x, float32, got bfloat16", "weight.astype(x.dtype)"):
        project(x, weight.astype(jnp.bfloat16))
    with raises(ValueError, "project: weight must have 6 elements along axis 0 (the last axis of x), got shape (7, 5)"):
        project(x, jnp.ones((7, 5)))
    with raises(ValueError, "project: weight must have shape (k, n), got shape (6,)"):
        project(x, weight[:, 0])
    with raises(ValueError, "project: residual must have shape (2, 5) (the rows of x by the columns of weight), got shape (5,)"):
        project(x, weight, residual=jnp.ones(5))
    with raises(TypeError, "project: residual must have the dtype of x"):
        project(x, weight, residual=jnp.ones((2, 5), jnp.bfloat16))
    with raises(ValueError, "project: residual must be None with activation 'swiglu'"):
        swiglu(x, jnp.ones((6, 4)), residual=jnp.ones((2, 2)))
    with raises(ValueError, "project: weight must have an even number of columns with activation 'swiglu'", "got 5"):
        swiglu(x, weight)
    with raises(ValueError, "project: activation must be one of None, 'swiglu', got 'gelu'"):
        project(x, weight, activation="gelu")
