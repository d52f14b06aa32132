"""argmax: ties, NaN, against NumPy, no gradient, and what holds for every op."""

from __future__ import annotations

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxarena.ops.argmax import argmax
from jaxarena.testing import check_step, integers, live_launches, normal, poison
from tests.ops.common import DTYPES, raises
from tests.programs import twice


@pytest.mark.parametrize("dtype", DTYPES)
@hypothesis.given(rows=st.sampled_from([(), (1,), (7,), (2, 3)]), v=st.sampled_from([1, 2, 33, 1009]), seed=st.integers(0, 99))
def test_matches_numpy_with_many_ties(dtype, rows, v, seed):
    logits = integers(seed, (*rows, v), -3, 4).astype(dtype)
    chex.assert_trees_all_equal(argmax(logits), np.argmax(np.asarray(logits, np.float32), axis=-1).astype(np.int32), strict=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_are_as_in_jnp(dtype):
    nan, inf = jnp.nan, jnp.inf
    logits = jnp.asarray([[1, nan, inf, nan], [-0.0, 0.0, -1, 0.0], [-inf] * 4, [-inf, -3e38, -inf, -3e38], [2, inf, inf, 0]], dtype)
    chex.assert_trees_all_equal(argmax(logits), jnp.asarray([1, 0, 0, 1, 1], jnp.int32))
    chex.assert_trees_all_equal(argmax(logits), jnp.argmax(logits, axis=-1))
    chex.assert_trees_all_equal(argmax(poison((2, 5), dtype)), jnp.zeros(2, jnp.int32))


def test_N2_rows_do_not_depend_on_each_other():
    logits = normal(0, (67, 1009), jnp.bfloat16)
    alone = jnp.concatenate([argmax(logits[i : i + 1]) for i in range(67)])
    chex.assert_trees_all_equal(argmax(logits), alone)


def test_no_gradient_flows_through_it():
    logits = normal(0, (3, 7))

    def loss(x):
        return jnp.sum(x**2) + jnp.sum(argmax(x).astype(x.dtype))

    chex.assert_trees_all_equal(jax.grad(loss)(logits), 2 * logits)
    assert live_launches(jax.grad(loss), logits) == []


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5)])
def test_J7_no_rows(shape):
    chex.assert_shape(argmax(jnp.zeros(shape)), shape[:-1])


def test_vmap_is_a_loop():
    logits = normal(0, (3, 4, 9))
    chex.assert_trees_all_equal(jax.vmap(argmax)(logits), jnp.stack([argmax(x) for x in logits]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_J5_J8_modes(dtype):
    logits = normal(0, (3, 17), dtype)
    run = jax.jit(argmax)
    plain = run(logits)
    with jax.numpy_dtype_promotion("strict"):
        chex.assert_trees_all_equal(run(logits), plain, strict=True)
    with jax.enable_x64(True):
        chex.assert_trees_all_equal(run(logits), plain, strict=True)


def test_J3_shard_map():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    logits = normal(0, (4, 9))
    mapped = jax.shard_map(argmax, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))
    chex.assert_trees_all_equal(jax.jit(mapped)(logits), argmax(logits))


def test_in_a_planned_step():
    check_step(lambda x: argmax(twice(x)) + argmax(x), normal(0, (5, 3, 133)))


def test_errors_name_the_argument():
    with raises(TypeError, "argmax: logits must be bfloat16 or float32, got int32"):
        argmax(jnp.ones(3, jnp.int32))
    with raises(ValueError, "argmax: logits must have shape (..., v), got shape ()"):
        argmax(jnp.ones(()))
    with raises(ValueError, "argmax: logits must have at least one element along the last axis, got shape (3, 0)"):
        argmax(jnp.ones((3, 0)))
