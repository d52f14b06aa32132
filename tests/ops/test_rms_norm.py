"""rms_norm: values and gradients against float64, exact answers, the residual sum, and what holds for every op."""

from __future__ import annotations

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena.ops.rms_norm import rms_norm
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

SHAPES = ((1, 3), (7, 33), (2, 3, 129), (2, 5, 3, 64), (97,))


def naive(x, weight, residual=None, *, eps=1e-6, offset=0.0):
    s = x if residual is None else x + residual
    y = s / jnp.sqrt(jnp.mean(s**2, axis=-1, keepdims=True) + eps) * (offset + weight)
    return y if residual is None else (y, s)


def with_residual(x, weight, residual, **params):
    return rms_norm(x, weight, residual=residual, **params)


def arguments(shape, dtype, weight_dtype=None):
    return [normal(0, shape, dtype), normal(1, shape[-1:], weight_dtype or dtype), normal(2, shape, dtype)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_oracle(shape, dtype):
    x, weight, _ = arguments(shape, dtype)
    for params in ({}, {"eps": 1e-2, "offset": 1.0}):
        check_against_oracle(
            functools.partial(rms_norm, **params), functools.partial(naive, **params), [x, weight], (0, 1), dtype=dtype, terms=x.size
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_with_residual_matches_the_oracle_in_f32(shape):
    terms = int(np.prod(shape))
    check_against_oracle(with_residual, naive, arguments(shape, jnp.float32), (0, 1, 2), dtype=jnp.float32, terms=terms, stages=2)


def test_with_residual_norms_the_rounded_sum_in_bf16():
    x, weight, residual = arguments((3, 5, 65), jnp.bfloat16)
    (y, s), (dx, dweight, dresidual) = value_and_gradients(with_residual, [x, weight, residual], (0, 1, 2))
    chex.assert_trees_all_equal(s, x + residual)
    chex.assert_trees_all_equal(y, rms_norm(s, weight))
    chex.assert_trees_all_equal(dx, dresidual)
    chex.assert_trees_all_equal_dtypes((dx, dweight), (x, weight))

    def from_sum(s, weight):
        return naive(s, weight), s

    check_against_oracle(lambda s, w: with_residual(s, w, jnp.zeros_like(s)), from_sum, [s, weight], (0, 1), dtype=jnp.bfloat16, terms=195)


def test_weight_dtype_may_differ():
    x, weight, _ = arguments((4, 35), jnp.bfloat16, jnp.float32)
    y, (dx, dweight) = value_and_gradients(rms_norm, [x, weight], (0, 1))
    assert (y.dtype, dx.dtype, dweight.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)


def test_constant_rows_have_exact_answers():
    x = jnp.full((3, 5), -4.0)
    weight = jnp.arange(5.0)
    y, (dx, _) = value_and_gradients(functools.partial(rms_norm, eps=0.0, offset=2.0), [x, weight], (0, 1))
    chex.assert_trees_all_close(y, jnp.broadcast_to(-(2.0 + weight), (3, 5)), rtol=1e-6)
    # A norm does not see the length of a row, so its gradient is orthogonal to the row.
    chex.assert_trees_all_close(jnp.sum(dx * x, axis=1), jnp.zeros(3), atol=1e-5)


def test_a_row_of_zeros_gives_zeros_and_a_finite_gradient():
    y, (dx, dweight) = value_and_gradients(rms_norm, [jnp.zeros((2, 6)), jnp.ones(6)], (0, 1))
    chex.assert_trees_all_equal(y, jnp.zeros((2, 6)))
    chex.assert_trees_all_equal(dweight, jnp.zeros(6))
    chex.assert_tree_all_finite(dx)


def test_nan_stays_in_its_row():
    x = normal(3, (4, 9))
    y = rms_norm(x.at[2, 5].set(jnp.nan), jnp.ones(9))
    keep = jnp.array([0, 1, 3])
    chex.assert_trees_all_equal(y[keep], rms_norm(x, jnp.ones(9))[keep])
    assert bool(jnp.all(jnp.isnan(y[2])))


@pytest.mark.parametrize("shape", [(0, 7), (2, 0, 7)])
def test_J7_empty_rows(shape):
    y, (dx, dweight) = value_and_gradients(rms_norm, [jnp.zeros(shape), jnp.ones(7)], (0, 1))
    chex.assert_shape((y, dx), shape)
    chex.assert_trees_all_equal(dweight, jnp.zeros(7))


@hypothesis.given(rows=st.integers(1, 3), d=st.sampled_from([1, 7, 40]), power=st.integers(-8, 8))
def test_scaling_a_row_by_a_power_of_two_changes_nothing(rows, d, power):
    x, weight = normal(rows, (rows, d)), normal(d, (d,))
    scaled = rms_norm(x * 2.0**power, weight, eps=0.0)
    chex.assert_trees_all_close(scaled, rms_norm(x, weight, eps=0.0), rtol=1e-6)


def test_a_frozen_weight_costs_no_launch():
    x, weight, residual = arguments((3, 10), jnp.float32)
    assert gradient_launches(rms_norm, [x, weight], (0,)) == ["rms_norm_dx"]
    assert gradient_launches(rms_norm, [x, weight], (1,)) == ["rms_norm_dweight"]
    assert gradient_launches(with_residual, [x, weight, residual], (0, 2)) == ["add_rms_norm", "add_rms_norm_dx"]


def test_an_unused_result_costs_no_launch():
    """A gradient that is known to be zero is no array of zeros: with either result dropped the launches are those of the other alone."""
    args = arguments((3, 10), jnp.float32)

    def only_y(*arrays):
        return with_residual(*arrays)[0]

    def only_s(*arrays):
        return with_residual(*arrays)[1]

    assert gradient_launches(only_y, args, (0, 1, 2)) == ["add_rms_norm", "rms_norm_dx", "rms_norm_dweight"]
    assert gradient_launches(only_s, args, (0, 1, 2)) == []
    check_against_oracle(only_y, lambda *a: naive(*a)[0], args, (0, 1, 2), dtype=jnp.float32, terms=30, stages=2)
    check_against_oracle(only_s, lambda *a: naive(*a)[1], args, (0, 1, 2), dtype=jnp.float32, terms=30, stages=2)


def test_in_a_planned_step():
    def step(x, weight, residual):
        def loss(x, weight, residual):
            y, s = with_residual(x, weight, residual)
            y, s = with_residual(y, weight, s, offset=1.0)
            return jnp.sum(rms_norm(y, weight) ** 3)

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(x, weight, residual)

    assert_step_repeatable(step, *arguments((2, 7, 130), jnp.float32))


def test_vmap_is_a_loop():
    check_vmap(rms_norm, [normal(0, (3, 4, 9)), normal(1, (9,))], (0, 1), (0, None))


@pytest.mark.parametrize("dtype", DTYPES)
def test_J5_J8_modes(dtype):
    check_modes(with_residual, arguments((5, 33), dtype), (0, 1, 2))


def test_J3_shard_map():
    check_shard_map(with_residual, arguments((4, 33), jnp.float32), (0, 1, 2), (True, False, True))


def test_errors_name_the_argument():
    x, weight = jnp.ones((2, 6)), jnp.ones(6)
    with raises(TypeError, "rms_norm: x must be bfloat16 or float32, got float16"):
        rms_norm(x.astype(jnp.float16), weight)
    with raises(TypeError, "rms_norm: weight must be bfloat16 or float32, got int32"):
        rms_norm(x, jnp.ones(6, jnp.int32))
    with raises(TypeError, "rms_norm: x must be an array, got list"):
        rms_norm([1.0], weight)
    with raises(ValueError, "rms_norm: weight must have 6 elements along axis 0 (the last axis of x), got shape (5,)"):
        rms_norm(x, jnp.ones(5))
    with raises(ValueError, "rms_norm: weight must have shape (d), got shape (1, 6)"):
        rms_norm(x, weight[None])
    with raises(ValueError, "rms_norm: residual must have shape (2, 6) (the shape of x), got shape (3, 6)"):
        rms_norm(x, weight, residual=jnp.ones((3, 6)))
    with raises(TypeError, "rms_norm: residual must have the dtype of x, float32, got bfloat16"):
        rms_norm(x, weight, residual=x.astype(jnp.bfloat16))
    with raises(ValueError, "rms_norm: eps must be at least 0, got -1.0"):
        rms_norm(x, weight, eps=-1.0)
    with raises(TypeError, "rms_norm: offset must be a Python number"):
        rms_norm(x, weight, offset=jnp.ones(()))
    with jax.enable_x64(True), raises(TypeError, "rms_norm: x must be bfloat16 or float32, got float64"):
        rms_norm(np.ones((2, 6)), weight)
