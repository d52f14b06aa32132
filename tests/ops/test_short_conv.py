"""short_conv: values and gradients against float64, causality, splits of time, and what holds for every op."""

from __future__ import annotations

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest

from jaxarena.ops.short_conv import short_conv
from tests.ops.common import (
    DTYPES,
    check_against_oracle,
    check_modes,
    check_shard_map,
    check_vmap,
    gradient_launches,
    normal,
    raises,
    value_and_gradients,
)


def naive(x, weight, *, activation="silu"):
    """Element by element in time and taps."""
    taps = weight.shape[0]
    rows = []
    for t in range(x.shape[1]):
        terms = [weight[j] * x[:, t - taps + 1 + j] for j in range(taps) if t - taps + 1 + j >= 0]
        rows.append(sum(terms))
    z = jnp.stack(rows, axis=1)
    return z if activation is None else jax.nn.silu(z)


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape,taps", [((1, 1, 1), 1), ((2, 13, 33), 4), ((3, 2, 5), 4)])
def test_matches_the_oracle(shape, taps, dtype, activation):
    args = [normal(0, shape, dtype), normal(1, (taps, shape[2]), dtype)]
    check_against_oracle(
        functools.partial(short_conv, activation=activation),
        functools.partial(naive, activation=activation),
        args,
        (0, 1),
        dtype=dtype,
        terms=taps * shape[0] * shape[1],
        stages=2,
    )


def test_small_integers_have_exact_answers():
    x = jnp.arange(1.0, 6.0).reshape(1, 5, 1)
    weight = jnp.asarray([[100.0], [10.0], [1.0]])
    chex.assert_trees_all_equal(short_conv(x, weight, activation=None).reshape(5), jnp.asarray([1.0, 12.0, 123.0, 234.0, 345.0]))
    ones = jax.grad(lambda x, w: jnp.sum(short_conv(x, w, activation=None)), argnums=(0, 1))(x, weight)
    chex.assert_trees_all_equal(ones[0].reshape(5), jnp.asarray([111.0, 111.0, 111.0, 11.0, 1.0]))
    chex.assert_trees_all_equal(ones[1].reshape(3), jnp.asarray([6.0, 10.0, 15.0]))


@hypothesis.given(cut=st.integers(1, 10), taps=st.sampled_from([1, 2, 5]), seed=st.integers(0, 99))
def test_is_causal(cut, taps, seed):
    x, weight = normal(seed, (2, 11, 3)), normal(seed + 1, (taps, 3))
    later = x.at[:, cut:].set(jnp.nan)
    chex.assert_trees_all_equal(short_conv(later, weight)[:, :cut], short_conv(x, weight)[:, :cut])
    # ... and the gradient of a row comes from later rows only.
    _, pull_back = jax.vjp(lambda x: short_conv(x, weight), x)
    (dx,) = pull_back(jnp.ones_like(x).at[:, cut:].set(0))
    chex.assert_trees_all_equal(dx[:, cut:], jnp.zeros_like(dx[:, cut:]))


def test_extreme_values_stay_finite():
    x = jnp.asarray([-1e30, 1e30, -1e4, 1e4]).reshape(1, 4, 1)
    chex.assert_tree_all_finite(value_and_gradients(short_conv, [x, jnp.ones((2, 1))], (0, 1)))


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3)])
def test_J7_empty(shape):
    y, (dx, dweight) = value_and_gradients(short_conv, [jnp.zeros(shape), jnp.ones((4, 3))], (0, 1))
    chex.assert_shape((y, dx), shape)
    chex.assert_trees_all_equal(dweight, jnp.zeros((4, 3)))


def test_a_frozen_weight_costs_no_launch():
    args = [normal(0, (2, 7, 3)), normal(1, (4, 3))]
    assert gradient_launches(short_conv, args, (0,)) == ["short_conv_dx"]
    assert gradient_launches(short_conv, args, (1,)) == ["short_conv_dweight"]


def test_vmap_is_a_loop():
    check_vmap(short_conv, [normal(0, (3, 2, 7, 5)), normal(1, (3, 4, 5))], (0, 1), (0, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_J5_J8_modes(dtype):
    check_modes(short_conv, [normal(0, (2, 7, 5), dtype), normal(1, (4, 5))], (0, 1))


def test_J3_shard_map():
    check_shard_map(short_conv, [normal(0, (2, 7, 5)), normal(1, (4, 5))], (0, 1), (True, False))


def test_errors_name_the_argument():
    x, weight = jnp.ones((2, 7, 5)), jnp.ones((4, 5))
    with raises(TypeError, "short_conv: x must be bfloat16 or float32, got int32"):
        short_conv(x.astype(jnp.int32), weight)
    with raises(TypeError, "short_conv: weight must be bfloat16 or float32, got float16"):
        short_conv(x, weight.astype(jnp.float16))
    with raises(ValueError, "short_conv: x must have shape (batch, time, channels), got shape (7, 5)"):
        short_conv(x[0], weight)
    with raises(ValueError, "short_conv: weight must have 5 elements along axis 1 (the channels of x), got shape (4, 6)"):
        short_conv(x, jnp.ones((4, 6)))
    with raises(ValueError, "short_conv: weight must have at least one tap, got shape (0, 5)"):
        short_conv(x, jnp.ones((0, 5)))
    with raises(ValueError, "short_conv: activation must be one of 'silu', None, got 'relu'"):
        short_conv(x, weight, activation="relu")
