"""Grouping choices by expert, against a plain loop; grouped products, against ``lax.ragged_dot``."""

from __future__ import annotations

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxarena.ops.grouped import block_rows, group_choices, grouped_weight_gradient, over_blocks, take_rows
from jaxarena.testing import integers, normal

run_group = jax.jit(group_choices, static_argnames=("experts", "rows"))


def group_by_hand(choice, experts, rows):
    """Experts one after another, each choice in order, each group filled up with -1."""
    source, expert = [], []
    for e in range(experts):
        group = list(np.flatnonzero(choice.reshape(-1) == e))
        group += [-1] * (-len(group) % rows)
        source += group
        expert += [e] * (len(group) // rows)
    return source, expert


def check_group(choice, experts, rows):
    groups, counts = jax.tree.map(np.asarray, run_group(jnp.asarray(choice, jnp.int32), experts=experts, rows=rows))
    source, place, expert = groups
    assert all(a.dtype == np.int32 for a in (source, place, expert, counts))
    assert source.size == expert.size * rows
    by_hand, experts_by_hand = group_by_hand(choice, experts, rows)
    filled = len(by_hand)
    np.testing.assert_array_equal(source[:filled], by_hand)
    np.testing.assert_array_equal(expert[: filled // rows], experts_by_hand)
    assert np.all(source[filled:] == -1) and np.all(expert[filled // rows :] == experts - 1)
    np.testing.assert_array_equal(source[place.reshape(-1)], np.arange(choice.size))
    np.testing.assert_array_equal(counts, np.bincount(choice.reshape(-1), minlength=experts))


# Few shapes, so that most examples run a compiled function.
@hypothesis.given(
    shape=st.sampled_from([(5, 3, 7, 2), (17, 1, 3, 8), (4, 2, 2, 8)]), seed=st.integers(0, 10**6), skew=st.sampled_from([0.0, 1.0, 8.0])
)
def test_groups_are_those_of_a_loop(shape, seed, skew):
    tokens, top_k, experts, rows = shape
    random = np.random.default_rng(seed)
    scores = random.gumbel(size=(tokens, experts)) - skew * np.arange(experts)
    check_group(np.argsort(-scores, axis=1)[:, :top_k], experts, rows)


@pytest.mark.parametrize("sizes", [[8, 0, 8, 0], [0, 0, 0, 16], [16, 0, 0, 0], [1, 8, 16, 32, 63, 65]])
def test_M1_empty_experts_and_tails(sizes):
    check_group(np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))[:, None], len(sizes), 8)


def test_blocks_suffice_for_the_worst_groups_and_are_no_more():
    """Every group but one ends one row into a block: the most blocks that so many choices can need."""
    experts, rows = 5, 8
    sizes = [rows + 1] * (experts - 1) + [4 * rows + 1]
    (source, _, expert), _ = run_group(jnp.asarray(np.repeat(np.arange(experts), sizes)[:, None], jnp.int32), experts=experts, rows=rows)
    assert expert.size == sum(-(-size // rows) for size in sizes) and bool(jnp.all(source.reshape(-1, rows)[:, 0] >= 0))


def test_no_tokens():
    groups, counts = group_choices(jnp.zeros((0, 2), jnp.int32), experts=3, rows=8)
    chex.assert_shape(tuple(groups), [(0,), (0, 2), (0,)])
    chex.assert_trees_all_equal(counts, jnp.zeros(3, jnp.int32))


@pytest.mark.parametrize(
    ("choices", "experts", "rows"),
    [(0, 4, 8), (64, 32, 8), (163840, 512, 64), (196608, 128, 128), (4096, 128, 32), (100, 1, 64), (4095, 32, 64), (4096, 8, 64)],
)
def test_block_rows(choices, experts, rows):
    assert block_rows(choices, experts) == rows


def products(x, weight, choice, b):
    """The grouped product of every token with its expert's matrix, and the gradient of the matrices for the gradient ``b``."""
    experts = weight.shape[0]
    (source, place, expert), _ = group_choices(choice[:, None], experts=experts, rows=block_rows(x.shape[0], experts))
    rows, gradient_rows = take_rows(x, source), take_rows(b, source)
    y = over_blocks(lambda matrix, block: block @ matrix, (weight,), expert, rows)
    return y[place[:, 0]], grouped_weight_gradient(rows, gradient_rows, expert, experts=experts)


def ragged(x, weight, choice, b):
    order = jnp.argsort(choice, stable=True)
    sizes = jnp.bincount(choice, length=weight.shape[0]).astype(jnp.int32)
    y, pull_back = jax.vjp(functools.partial(lax.ragged_dot, group_sizes=sizes), x[order], weight)
    return y[jnp.argsort(order)], pull_back(b[order])[1]


@pytest.mark.parametrize(
    "choice",
    [np.arange(32), *(np.repeat(np.arange(6), sizes) for sizes in ([1, 8, 16, 32, 63, 65], [1, 0, 0, 0, 0, 0], [3, 0, 33, 0, 63, 0]))],
    ids=["one each", "tails", "one token", "gaps"],
)
def test_M10_products_are_those_of_ragged_dot(choice):
    experts = int(choice.max()) + 1
    choice = jnp.asarray(np.random.default_rng(1).permutation(choice), jnp.int32)
    x, weight, b = normal(0, (choice.size, 96)), normal(1, (experts, 96, 40)), normal(2, (choice.size, 40))
    got, expected = (jax.jit(f)(x, weight, choice, b) for f in (products, ragged))
    for a, e in zip(got, expected, strict=True):
        chex.assert_trees_all_close(a, e, rtol=0, atol=1e-5 * float(jnp.max(jnp.abs(e))))


def test_M1_the_gradient_of_an_empty_expert_is_exactly_zero():
    choice = integers(0, (50,), 0, 3) * 2  # experts 1, 3, 5 and 6 get nothing
    _, dweight = products(normal(0, (50, 9)), normal(1, (7, 9, 5)), choice, normal(2, (50, 5)))
    empty = jnp.array([1, 3, 5, 6])
    chex.assert_trees_all_equal(dweight[empty], jnp.zeros((4, 9, 5)))
    assert bool(jnp.all(jnp.any(dweight[jnp.array([0, 2, 4])] != 0, axis=(1, 2))))


def test_pads_are_zero_whatever_the_tokens_hold():
    x = jnp.full((3, 5), jnp.nan)
    (source, _, _), _ = group_choices(jnp.array([[2], [0], [2]], jnp.int32), experts=4, rows=8)
    rows = take_rows(x, source)
    chex.assert_trees_all_equal(rows[source < 0], jnp.zeros((rows.shape[0] - 3, 5)))
