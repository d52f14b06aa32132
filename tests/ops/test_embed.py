"""embed: rows and gradient against float64, repeated and out-of-range tokens, and what holds for every op."""

from __future__ import annotations

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena.ops.embed import embed
from jaxarena.testing import (
    assert_step_repeatable,
    check_against_oracle,
    check_modes,
    check_shard_map,
    check_vmap,
    gradient_launches,
    integers,
    normal,
    value_and_gradients,
)
from tests.ops.common import DTYPES, raises
from tests.programs import twice


def naive(tokens, table):
    """A product with a one-hot matrix."""
    return (tokens[..., None] == jnp.arange(table.shape[0])).astype(table.dtype) @ table


@functools.partial(jax.jit, static_argnums=2)
def gradient(tokens, dy, vocabulary):
    table = jnp.zeros((vocabulary, dy.shape[-1]), dy.dtype)
    return jax.vjp(lambda table: embed(tokens, table), table)[1](dy)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape,vocabulary,d", [((), 3, 5), ((1,), 1, 1), ((37,), 11, 9), ((3, 67), 5, 33), ((2, 3, 7), 1009, 8)])
def test_matches_the_oracle(shape, vocabulary, d, dtype):
    args = [integers(0, shape, 0, vocabulary), normal(1, (vocabulary, d), dtype)]
    check_against_oracle(embed, naive, args, (1,), dtype=dtype, terms=args[0].size)


@hypothesis.given(n=st.sampled_from([1, 2, 7, 64, 97, 111]), vocabulary=st.integers(1, 9), seed=st.integers(0, 99))
def test_integer_gradients_are_exact(n, vocabulary, seed):
    """Few tokens make long runs over several blocks, many reach out of range: counted in integers, so any row in the wrong place shows."""
    tokens = integers(seed, (n,), -2, vocabulary + 2)
    dy = integers(seed + 1, (n, 3), -50, 50)
    expected = np.zeros((9, 3), np.int64)
    for token, row in zip(np.asarray(tokens), np.asarray(dy), strict=True):
        if 0 <= token < 9:
            expected[token] += row
    chex.assert_trees_all_equal(np.asarray(gradient(tokens, dy.astype(jnp.float32), 9)).astype(np.int64), expected)


def test_one_token_only_is_summed_in_float32():
    n = 5003
    dy = jnp.ones((n, 2), jnp.bfloat16)
    d = gradient(jnp.full((n,), 4, jnp.int32), dy, 7)
    # In bfloat16 the sum would stop at 256.
    chex.assert_trees_all_equal(d, jnp.zeros((7, 2), jnp.bfloat16).at[4].set(jnp.bfloat16(n)))


def test_out_of_range_tokens_give_zeros():
    table = normal(0, (5, 3))
    tokens = jnp.asarray([-1, 5, 4, -(2**31), 2**31 - 1], jnp.int32)
    y, (dtable,) = value_and_gradients(embed, [tokens, table], (1,))
    chex.assert_trees_all_equal(y, jnp.zeros((5, 3)).at[2].set(table[4]))
    chex.assert_trees_all_equal(dtable[:4], jnp.zeros((4, 3)))
    assert bool(jnp.all(dtable[4] != 0))


def test_nan_stays_with_its_token():
    tokens = integers(3, (40,), 0, 6)
    dy = normal(4, (40, 5))
    spoiled = gradient(tokens, jnp.where((tokens == 2)[:, None], jnp.nan, dy), 6)
    keep = jnp.array([0, 1, 3, 4, 5])
    chex.assert_trees_all_equal(spoiled[keep], gradient(tokens, dy, 6)[keep])


def test_tokens_in_between_do_not_matter():
    dy = normal(5, (16, 3))
    tokens = jnp.zeros((16,), jnp.int32)
    spread = jnp.stack([tokens, tokens + 1], axis=1).reshape(32)
    spread_dy = jnp.stack([dy, dy], axis=1).reshape(32, 3)
    dtable = gradient(spread, spread_dy, 2)
    chex.assert_trees_all_close(dtable[0], dtable[1], rtol=1e-6)
    chex.assert_trees_all_close(dtable[0], gradient(tokens, dy, 1)[0], rtol=1e-5)


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_J7_no_tokens(shape):
    y, (dtable,) = value_and_gradients(embed, [jnp.zeros(shape, jnp.int32), jnp.ones((7, 3))], (1,))
    chex.assert_shape(y, (*shape, 3))
    chex.assert_trees_all_equal(dtable, jnp.zeros((7, 3)))


def test_the_gradient_keeps_no_forward():
    assert gradient_launches(embed, [integers(0, (5,), 0, 7), normal(1, (7, 3))], (1,)) == ["embed_dtable"]


def test_in_a_planned_step():
    def step(tokens, table):
        return jax.value_and_grad(lambda table: jnp.sum(embed(tokens, twice(table)) ** 3))(table)

    assert_step_repeatable(step, integers(0, (3, 11), -1, 9), normal(1, (8, 131)))


def test_vmap_is_a_loop():
    check_vmap(embed, [integers(0, (3, 10), 0, 7), normal(1, (3, 7, 4))], (1,), (0, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_J5_J8_modes(dtype):
    check_modes(embed, [integers(0, (3, 11), -1, 9), normal(1, (8, 5), dtype)], (1,))


def test_J3_shard_map():
    check_shard_map(embed, [integers(0, (4, 5), 0, 7), normal(1, (7, 3))], (1,), (True, False))


def test_errors_name_the_argument():
    tokens, table = jnp.zeros((2, 3), jnp.int32), jnp.ones((7, 5))
    with raises(TypeError, "embed: tokens must be int32, got float32"):
        embed(jnp.zeros(3), table)
    with raises(TypeError, "embed: tokens must be int32, got int64", "tokens.astype(jnp.int32)"):
        embed(np.zeros(3, np.int64), table)
    with raises(TypeError, "embed: table must be bfloat16 or float32, got float16"):
        embed(tokens, table.astype(jnp.float16))
    with raises(ValueError, "embed: table must have shape (v, d), got shape (5,)"):
        embed(tokens, table[0])
    with raises(ValueError, "embed: table must have at least one row, got shape (0, 5)"):
        embed(tokens, jnp.ones((0, 5)))
