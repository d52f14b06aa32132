"""The oracle runner and its tolerances: right results pass, wrong ones fail and say where."""

from __future__ import annotations

import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxarena.testing
from jaxarena.testing import (
    assert_close_to_oracle,
    assert_op_matches_reference,
    check_against_oracle,
    check_modes,
    check_shard_map,
    check_vmap,
    gradient_launches,
    integers,
    live_launches,
    normal,
    oracle,
    poison,
    tolerance,
    unit_roundoff,
)
from tests.programs import times, twice


def square(x):
    return x * x


@jax.custom_vjp
def square_with_wrong_gradient(x):
    return x * x


square_with_wrong_gradient.defvjp(lambda x: (x * x, x), lambda x, dy: (1.01 * x * dy,))


def test_unit_roundoffs():
    assert (unit_roundoff(jnp.float32), unit_roundoff(jnp.bfloat16)) == (2.0**-24, 2.0**-8)


@given(dtype=st.sampled_from([jnp.float32, jnp.bfloat16]), terms=st.integers(1, 3000), seed=st.integers(0, 2**32 - 1))
def test_a_rounded_sum_is_within_its_tolerance(dtype, terms, seed):
    x = np.asarray(normal(seed, (5, terms), dtype))
    ours = np.add.accumulate(x.astype(np.float32), axis=1)[:, -1].astype(x.dtype)
    assert_close_to_oracle(ours, oracle(lambda x: x.sum(axis=1), x), dtype=dtype, terms=terms)


def test_the_oracle_runs_in_float64_and_leaves_integers():
    value, index = oracle(lambda x, i: (x + 2.0**-40, i), jnp.ones(3), jnp.arange(3))
    assert value.dtype == np.float64 and index.dtype == np.int32
    np.testing.assert_array_equal(value, 1 + 2.0**-40)


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        ({"a": np.float32([1, 2.001])}, r"result\['a'\]: error 0.0005 of the largest value, limit .* \(float32, sums of 1, 1 roundings\)"),
        ({"a": np.float32([1, np.nan])}, r"result\['a'\]: 1 values are not finite, expected 0"),
        ({"a": np.float32([1])}, r"result\['a'\]: shape \(1,\), expected \(2,\)"),
    ],
)
def test_a_wrong_result_is_named(actual, message):
    with pytest.raises(AssertionError, match=message):
        assert_close_to_oracle(actual, {"a": np.array([1.0, 2.0])}, dtype=jnp.float32)


def test_gradients_are_checked_too():
    args = (normal(0, (3, 7)),)
    check_against_oracle(square, square, args, (0,), dtype=jnp.float32, terms=1)
    with pytest.raises(AssertionError, match="gradient of argument 0"):
        check_against_oracle(square_with_wrong_gradient, square, args, (0,), dtype=jnp.float32, terms=1)


def test_an_op_beside_its_reference():
    args = (normal(0, (3, 7)),)
    assert_op_matches_reference(square, lambda x: x**2, args, (0,), dtype=jnp.float32, stages=2)
    with pytest.raises(AssertionError, match=r"not almost equal|not close|Not equal"):
        assert_op_matches_reference(square_with_wrong_gradient, square, args, (0,), dtype=jnp.float32)
    with pytest.raises(AssertionError, match=r"[Dd]types?"):
        assert_op_matches_reference(lambda x: square(x).astype(jnp.bfloat16), square, args, dtype=jnp.bfloat16)


def test_an_op_that_follows_a_mode_is_caught():
    args = (normal(0, (3, 7)),)
    check_modes(square, args, (0,))
    with pytest.raises(AssertionError):
        check_modes(lambda x: x.astype(jnp.zeros(()).dtype), args, (0,))  # float64 where x64 is on


def test_an_op_that_mixes_a_batch_is_caught():
    args = (normal(0, (3, 7, 5)), normal(1, (5,)))
    check_vmap(lambda x, w: x * w, args, (0, 1), (0, None))
    check_shard_map(lambda x, w: x * w, args, (0, 1), (True, False))

    @jax.custom_batching.custom_vmap
    def mixed(x):
        return x * 1.0

    mixed.def_vmap(lambda size, batched, x: (x[::-1], True))
    with pytest.raises(AssertionError):
        check_vmap(mixed, args[:1], (), (0,))


def test_launches_that_nobody_reads_are_not_counted():
    x = integers(0, (2, 3), -3, 4, jnp.float32)
    assert live_launches(lambda x: (twice(x), times(x, x))[0], x) == ["twice"]
    assert live_launches(jax.jit(lambda x: twice(twice(x))), x) == ["twice", "twice"]
    assert gradient_launches(times, (x, x), (0,)) == ["times"]
    assert gradient_launches(times, (x, x), (0, 1)) == ["times", "times"]


def test_poison_is_nan_and_minus_one():
    assert np.isnan(np.asarray(poison((3, 5), jnp.bfloat16), np.float32)).all()
    assert (np.asarray(poison((2,), jnp.int32)) == -1).all()


def test_tolerances_grow_with_format_and_length():
    assert tolerance(jnp.bfloat16) > 1000 * tolerance(jnp.float32)
    assert tolerance(jnp.float32, 10_000) > tolerance(jnp.float32, 100) > tolerance(jnp.float32)


def test_without_chex_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "chex", None)
    spec = importlib.util.spec_from_file_location("testing_again", jaxarena.testing.__file__)
    with pytest.raises(ImportError, match=r"jaxarena.testing needs chex.*pip install 'jaxarena\[test\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
