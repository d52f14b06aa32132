"""sample: frequencies, the tokens kept, greedy limits, rows that do not depend on each other, and what holds for every op."""

from __future__ import annotations

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxarena.ops.argmax import argmax
from jaxarena.ops.sample import sample
from jaxarena.testing import check_step, integers, live_launches, normal
from tests.ops.common import DTYPES, raises
from tests.programs import twice

KEY = jax.random.key(11)


def naive(logits, *, temperature=1.0, top_k=None, top_p=None):
    """The probabilities of one row, by a stable sort in float64."""
    x = np.asarray(logits, np.float64)
    order = np.argsort(-x, kind="stable")[:top_k]
    p = np.exp((x[order] - x[order[0]]) / temperature)
    p /= p.sum()
    if top_p is not None:
        kept = np.concatenate([[True], np.cumsum(p)[:-1] < top_p])
        p = np.where(kept, p, 0) / p[kept].sum()
    probabilities = np.zeros(len(x))
    probabilities[order] = p
    return probabilities


@functools.partial(jax.jit, static_argnames=("rows", "top_k", "top_p"))
def draws(logits, seed=0, temperature=1.0, *, rows=20_000, top_k=None, top_p=None):
    """Many tokens of one row of logits."""
    rows = jnp.broadcast_to(logits, (rows, *logits.shape))
    return sample(rows, jax.random.fold_in(KEY, seed), temperature=temperature, top_k=top_k, top_p=top_p)


OPTIONS = ({}, {"top_k": 5}, {"top_p": 0.3}, {"top_p": 0.95}, {"top_k": 9, "top_p": 0.7})


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("options", OPTIONS)
def test_frequencies_are_the_probabilities(options, temperature):
    """Every token's count within 5 standard deviations of a binomial."""
    logits = normal(0, (23,), scale=1.5)
    counts = np.bincount(np.asarray(draws(logits, 1, temperature, **options)), minlength=23)
    p = naive(logits, temperature=temperature, **options)
    assert np.all(np.abs(counts - 20_000 * p) <= 5 * np.sqrt(20_000 * p * (1 - p)))


@pytest.mark.parametrize("options", OPTIONS)
@hypothesis.settings(max_examples=8)
@hypothesis.given(seed=st.integers(0, 99))
def test_only_tokens_that_are_kept_are_drawn(options, seed):
    """Logits of few values, so that most of a boundary's tokens are equal; all that are kept are drawn."""
    logits = integers(seed, (23,), -1, 2).astype(jnp.float32)
    tokens = np.unique(np.asarray(draws(logits, seed, 1.0, **options)))
    chex.assert_trees_all_equal(tokens, np.flatnonzero(naive(logits, **options)).astype(np.int32))


def test_every_token_of_a_large_vocabulary_can_be_drawn():
    """Equal logits: 2000 draws of 151 936 tokens, of which about 13 pairs are equal, from one end to the other, odd and even."""
    tokens = np.asarray(draws(jnp.zeros(151_936), rows=2000))
    assert len(np.unique(tokens)) > 1950
    assert tokens.min() < 1000 and tokens.max() >= 151_000 and tokens.max() < 151_936
    assert 0.4 < np.mean(tokens % 2) < 0.6


def test_a_likely_token_does_not_hide_unlikely_ones():
    """Half of the weight lies on one token, half on 100 000, each of which has less than a 23-bit number can tell apart."""
    logits = jnp.zeros(100_001).at[7].set(jnp.log(100_000.0))
    tokens = np.asarray(draws(logits, rows=2000))
    others = tokens[tokens != 7]
    assert 850 < len(others) < 1150
    assert len(np.unique(others)) > 0.97 * len(others)


def test_equal_logits_are_kept_by_lower_index():
    chex.assert_trees_all_equal(np.unique(draws(jnp.asarray([-0.0, 0.0, -0.0, 0.0]), top_k=2)), np.asarray([0, 1], np.int32))
    # A quarter each: three reach 0.75 exactly.
    chex.assert_trees_all_equal(np.unique(draws(jnp.ones(4), top_p=0.75)), np.asarray([0, 1, 2], np.int32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1e-30}, {"top_k": 1}, {"top_p": 1e-6}])
def test_greedy_limits_are_argmax(options, dtype):
    logits = normal(1, (9, 67), dtype, scale=10)
    chex.assert_trees_all_equal(sample(logits, KEY, **options), argmax(logits), strict=True)


def test_a_temperature_for_each_row():
    logits = normal(2, (4, 3, 67))
    temperature = jnp.asarray([0.0, 0.7, 1.3, -1.0])[:, None].repeat(3, axis=1)
    tokens = sample(logits, KEY, temperature=temperature)
    greedy = argmax(logits)
    chex.assert_trees_all_equal((tokens[0], tokens[3]), (greedy[0], greedy[3]))
    for i, t in ((1, 0.7), (2, 1.3)):
        chex.assert_trees_all_equal(tokens[i], sample(logits, KEY, temperature=t)[i])
        chex.assert_trees_all_equal(tokens[i], sample(logits, KEY, temperature=jnp.float32(t))[i])


@pytest.mark.parametrize("options", [{}, {"top_k": 8, "top_p": 0.9}])
def test_N2_rows_do_not_depend_on_how_many_there_are(options):
    logits = normal(3, (33, 1009), scale=3)
    run = jax.jit(lambda logits: sample(logits, KEY, **options))
    tokens = run(logits)
    for rows in (1, 8):
        chex.assert_trees_all_equal(run(logits[:rows]), tokens[:rows])
    chex.assert_trees_all_equal(run(logits.reshape(3, 11, 1009)), tokens.reshape(3, 11))
    chex.assert_trees_all_equal(run(logits.at[5:].set(jnp.nan))[:5], tokens[:5])
    assert len(np.unique(np.asarray(run(jnp.broadcast_to(logits[0], logits.shape))))) > 2  # rows draw numbers of their own


@pytest.mark.parametrize("options", [{}, {"top_k": 3, "top_p": 0.5}])
def test_rows_without_a_finite_largest_logit_give_their_argmax(options):
    nan, inf = jnp.nan, jnp.inf
    logits = jnp.asarray([[1, 2, nan, 0, nan], [1, inf, 3, inf, 0], [-inf] * 5, [-inf, -inf, -5, -inf, -inf], [0, 1, 2, 3, -nan]])
    chex.assert_trees_all_equal(sample(logits, KEY, **options), jnp.asarray([2, 1, 0, 2, 4], jnp.int32))


def test_tokens_at_minus_infinity_are_never_drawn():
    logits = jnp.where(jnp.arange(101) % 3 == 1, 0.0, -jnp.inf)
    assert np.all(np.asarray(draws(logits)) % 3 == 1)


def test_keys():
    """A typed key and its data are the same, of any kind; another key draws otherwise."""
    logits = jnp.zeros((50, 67))
    tokens = sample(logits, KEY)
    chex.assert_trees_all_equal(tokens, sample(logits, jax.random.key_data(KEY)))
    for other in (jax.random.key(12), jax.random.key(11, impl="rbg")):
        assert bool(jnp.any(tokens != sample(logits, other)))


def test_no_gradient_flows_through_it():
    logits = normal(0, (3, 7))

    def loss(x):
        return jnp.sum(x**2) + jnp.sum(sample(x, KEY).astype(x.dtype))

    chex.assert_trees_all_equal(jax.grad(loss)(logits), 2 * logits)
    assert live_launches(jax.grad(loss), logits) == []


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5)])
def test_J7_no_rows(shape):
    chex.assert_shape(sample(jnp.zeros(shape), KEY, top_k=2), shape[:-1])


def test_vmap_over_keys_is_a_loop():
    logits, keys = normal(0, (3, 4, 9)), jax.random.split(KEY, 3)
    op = functools.partial(sample, top_k=6, top_p=0.9)
    chex.assert_trees_all_equal(jax.vmap(op)(logits, keys), jnp.stack([op(x, key) for x, key in zip(logits, keys, strict=True)]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_J5_J8_modes(dtype):
    logits, key = normal(0, (5, 17), dtype), jax.random.key_data(KEY)
    run = jax.jit(functools.partial(sample, top_k=9, top_p=0.9, temperature=0.7))
    plain = run(logits, key)
    with jax.numpy_dtype_promotion("strict"):
        chex.assert_trees_all_equal(run(logits, key), plain, strict=True)
    with jax.enable_x64(True):
        chex.assert_trees_all_equal(run(logits, key), plain, strict=True)


def test_J3_shard_map():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    logits, data = normal(0, (4, 9)), PartitionSpec("data")
    mapped = jax.shard_map(functools.partial(sample, top_p=0.9), mesh=mesh, in_specs=(data, PartitionSpec()), out_specs=data)
    chex.assert_trees_all_equal(jax.jit(mapped)(logits, KEY), sample(logits, KEY, top_p=0.9))


def test_in_a_planned_step():
    def step(logits, key, temperature):
        logits = twice(logits)
        return sample(logits, key, top_k=7, top_p=0.8, temperature=temperature)

    check_step(step, normal(0, (3, 133)), KEY, jnp.asarray([0.0, 0.5, 2.0]))


def test_errors_name_the_argument():
    logits = jnp.ones((2, 5))
    with raises(TypeError, "sample: logits must be bfloat16 or float32, got int32"):
        sample(logits.astype(jnp.int32), KEY)
    with raises(ValueError, "sample: logits must have at least one element along the last axis, got shape (2, 0)"):
        sample(jnp.ones((2, 0)), KEY)
    with raises(TypeError, "sample: key must be a key of jax.random.key or its uint32 data, got int"):
        sample(logits, 3)
    with raises(TypeError, "sample: key must be a key of jax.random.key or its uint32 data, got int32"):
        sample(logits, jnp.zeros(2, jnp.int32))
    with raises(ValueError, "sample: key must be one key, got shape (2,): map over keys with jax.vmap"):
        sample(logits, jax.random.split(KEY))
    with raises(ValueError, "sample: key must have shape (2,) (the data of one threefry2x32 key), got shape (3,)"):
        sample(logits, jnp.zeros(3, jnp.uint32))
    with raises(ValueError, "sample: temperature must be at least 0, got -1.0"):
        sample(logits, KEY, temperature=-1.0)
    with raises(ValueError, "sample: temperature must be a number or float32 of shape () or (2,) (the rows of logits)", "of shape (3,)"):
        sample(logits, KEY, temperature=jnp.ones(3))
    with raises(ValueError, "sample: top_k must be at least 1, got 0"):
        sample(logits, KEY, top_k=0)
    with raises(TypeError, "sample: top_k must be a Python int, got float 2.0"):
        sample(logits, KEY, top_k=2.0)
    with raises(ValueError, "sample: top_p must be above 0 and at most 1, got 0"):
        sample(logits, KEY, top_p=0)
