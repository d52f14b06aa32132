"""rotary: values and gradients against float64, what a rotation keeps, positions, and what holds for every op."""

from __future__ import annotations

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena.ops.rotary import rotary
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


def naive(x, positions=None, *, base=10000.0, rotary_dim=None):
    """One complex multiplication a pair."""
    half = (rotary_dim or x.shape[-1]) // 2
    positions = jnp.arange(x.shape[1]) if positions is None else positions
    angles = positions[..., None, None] * base ** (-jnp.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * jnp.exp(1j * angles)
    return jnp.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape,params", [((1, 1, 1, 2), {}), ((2, 67, 3, 10), {}), ((3, 33, 2, 66), {"rotary_dim": 16, "base": 500.0})])
def test_matches_the_oracle(shape, params, dtype):
    op, expected = functools.partial(rotary, **params), functools.partial(naive, **params)
    check_against_oracle(op, expected, [normal(0, shape, dtype)], (0,), dtype=dtype, stages=2, terms=1)


@pytest.mark.parametrize("base", [1.0, 10000.0, 1e7])
@pytest.mark.parametrize("shape", [(7,), (2, 7)])
@pytest.mark.parametrize("most", [50, 10**6, 2**31 - 1])
def test_positions_match_the_oracle(most, shape, base):
    """Angles are right at any position: an angle in float32 would be off by 0.06 radians at a million."""
    args = [normal(0, (2, 7, 3, 10)), integers(1, shape, -most, most + 1).at[..., 3].set(most)]
    op = functools.partial(rotary, base=base, rotary_dim=8)
    expected = functools.partial(naive, base=base, rotary_dim=8)
    check_against_oracle(lambda x, p: op(x, positions=p), expected, args, (0,), dtype=jnp.float32, stages=2, terms=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_A5_decoded_rows_are_those_of_a_full_pass(dtype):
    """One row a sequence, each at its own position."""
    x, at = normal(0, (3, 45, 2, 16), dtype), jnp.asarray([0, 17, 44], jnp.int32)
    full = rotary(x)
    decoded = rotary(x[jnp.arange(3), at][:, None], positions=at[:, None])
    chex.assert_trees_all_equal(decoded[:, 0], full[jnp.arange(3), at])


def test_a_layers_base_is_its_own():
    x = normal(0, (1, 5, 2, 6))
    both = jax.jit(lambda x: (rotary(x, base=1e4), rotary(x, base=1e6)))(x)
    for y, base in zip(both, (1e4, 1e6), strict=True):
        chex.assert_trees_all_close(y, rotary(x, base=base), rtol=1e-6, atol=1e-6)
    assert bool(jnp.any(both[0] != both[1]))


def test_default_positions_count_from_zero():
    x = normal(0, (2, 9, 3, 8), jnp.bfloat16)
    y = rotary(x)
    chex.assert_trees_all_equal(y[:, 0], x[:, 0])
    chex.assert_trees_all_equal(y, rotary(x, positions=jnp.arange(9, dtype=jnp.int32)))
    chex.assert_trees_all_equal(y, rotary(x, positions=jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), (2, 9))))


def test_elements_past_rotary_dim_are_unchanged():
    x = normal(0, (2, 5, 3, 10)).at[..., 7].set(jnp.nan)
    y, (dx,) = value_and_gradients(functools.partial(rotary, rotary_dim=4), [x], (0,))
    chex.assert_trees_all_equal(y[..., 4:], x[..., 4:])
    chex.assert_tree_all_finite((y[..., :4], dx))


def test_a_quarter_turn_is_exact_in_its_pairing():
    # One pair turns by its position in radians; at size 4 the second pair of base 1 turns as fast, so pairs are (0, 2) and (1, 3).
    x = jnp.asarray([1.0, 10.0, 100.0, 1000.0]).reshape(1, 1, 1, 4)
    c, s = np.cos(3.0), np.sin(3.0)
    y = rotary(x, positions=jnp.asarray([3], jnp.int32), base=1.0)
    expected = np.asarray([c - 100 * s, 10 * c - 1000 * s, 100 * c + s, 1000 * c + 10 * s], np.float32)
    chex.assert_trees_all_close(np.asarray(y).reshape(4), expected, rtol=1e-5)


@hypothesis.given(shift=st.integers(0, 10**6), seed=st.integers(0, 99))
def test_scores_depend_on_the_distance_only(shift, seed):
    q, k = normal(seed, (1, 2, 1, 8)), normal(seed + 1, (1, 2, 1, 8))
    positions = integers(seed, (2,), 0, 100)

    def scores(p):
        return jnp.einsum("bqhd,bkhd->qk", rotary(q, positions=p), rotary(k, positions=p))

    chex.assert_trees_all_close(scores(positions), scores(positions + shift), atol=1e-5)


@hypothesis.given(seed=st.integers(0, 99), size=st.sampled_from([1, 3, 8]))
def test_keeps_lengths(seed, size):
    x = normal(seed, (2, 3, 2, 2 * size))
    chex.assert_trees_all_close(jnp.linalg.norm(rotary(x), axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5)


@pytest.mark.parametrize("shape", [(0, 5, 2, 4), (2, 0, 2, 4)])
def test_J7_empty(shape):
    y, gradients = value_and_gradients(rotary, [jnp.zeros(shape)], (0,))
    chex.assert_shape((y, *gradients), shape)


def test_the_gradient_is_one_launch_and_keeps_no_forward():
    assert gradient_launches(rotary, [normal(0, (1, 3, 2, 4))], (0,)) == ["rotary"]


def test_vmap_is_a_loop():
    check_vmap(lambda x, p: rotary(x, positions=p), [normal(0, (3, 2, 5, 2, 4)), integers(1, (3, 5), 0, 9)], (0,), (0, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_J5_J8_modes(dtype):
    check_modes(functools.partial(rotary, rotary_dim=4), [normal(0, (2, 7, 3, 6), dtype)], (0,))


def test_in_a_planned_step():
    def step(x, positions):
        loss = lambda x: jnp.sum(rotary(rotary(x, positions=positions), rotary_dim=4) ** 3)  # noqa: E731
        return jax.value_and_grad(loss)(x)

    assert_step_repeatable(step, normal(0, (2, 7, 3, 34)), integers(1, (2, 7), 0, 999))


def test_J3_shard_map():
    check_shard_map(rotary, [normal(0, (2, 7, 3, 6))], (0,), (True,))


def test_errors_name_the_argument():
    x = jnp.ones((2, 5, 3, 6))
    with raises(TypeError, "rotary: x must be bfloat16 or float32, got float16"):
        rotary(x.astype(jnp.float16))
    with raises(ValueError, "rotary: x must have shape (batch, time, heads, head_size), got shape (5, 3, 6)"):
        rotary(x[0])
    with raises(ValueError, "rotary: rotary_dim must be even and at most the head size of x, 6, got 8"):
        rotary(x, rotary_dim=8)
    with raises(ValueError, "rotary: rotary_dim must be even and at most the head size of x, 6, got 3"):
        rotary(x, rotary_dim=3)
    with raises(ValueError, "rotary: rotary_dim must be at least 1, got 0"):
        rotary(x, rotary_dim=0)
    with raises(TypeError, "rotary: positions must be int32, got float32"):
        rotary(x, positions=jnp.ones(5))
    with raises(ValueError, "rotary: positions must have shape (5,) ((time,) or (batch, time) of x), got shape (4,)"):
        rotary(x, positions=jnp.ones(4, jnp.int32))
    with raises(ValueError, "rotary: positions must have shape (2, 5) ((time,) or (batch, time) of x), got shape (1, 5)"):
        rotary(x, positions=jnp.ones((1, 5), jnp.int32))
    with raises(ValueError, "rotary: base must be above 0, got -2.0"):
        rotary(x, base=-2.0)
