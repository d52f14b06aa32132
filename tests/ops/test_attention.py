"""attention: values and gradients against float64, exact answers, large scores, and what holds for every op."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena.ops.attention import attention
from jaxarena.testing import (
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

ALL = (0, 1, 2)


def naive(q, k, v, *, causal=True, scale=None):
    repeats = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(a, repeats, axis=2) for a in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


def arguments(shape, dtype=jnp.float32, *, size=1.0):
    """q, k, v for (batch, time, heads, key heads, d, dv)."""
    b, t, h, g, d, dv = shape
    return [normal(0, (b, t, h, d), dtype, scale=size), normal(1, (b, t, g, d), dtype, scale=size), normal(2, (b, t, g, dv), dtype)]


def check(args, dtype, **params):
    # Scores round to float32 before an exponential, and in bfloat16 p and ds round before their products.
    op, expected = functools.partial(attention, **params), jax.jit(functools.partial(naive, **params))
    check_against_oracle(op, expected, args, ALL, dtype=dtype, terms=args[0].shape[1] * args[0].shape[3], stages=2)


@pytest.mark.parametrize("time", [1, 63, 65, 127, 129, 192])
def test_A1_any_length(time):
    check(arguments((1, time, 2, 1, 8, 5), jnp.bfloat16), jnp.bfloat16)


@pytest.mark.slow
def test_A1_a_long_sequence_repeats_bit_for_bit():
    args = arguments((1, 1021, 2, 2, 64, 64), jnp.bfloat16)
    check(args, jnp.bfloat16)
    run = jax.jit(lambda *args: value_and_gradients(attention, args, ALL))
    first = run(*args)
    for _ in range(9):
        chex.assert_trees_all_equal(first, run(*args))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
def test_heads_sizes_and_blocks_all_different(dtype, causal):
    check(arguments((2, 261, 6, 2, 12, 17), dtype), dtype, causal=causal, scale=0.3)


@pytest.mark.parametrize("size", [1, 72, *(pytest.param(size, marks=pytest.mark.slow) for size in (80, 96, 104, 192)), 256])
def test_A10_head_sizes(size):
    check(arguments((2, 130, 3, 3, size, size)), jnp.float32)


@pytest.mark.parametrize("time", [300, pytest.param(1024, marks=pytest.mark.slow)])
def test_A3_large_scores(time):
    check(arguments((1, time, 1, 1, 128, 8), size=3.0), jnp.float32)


def test_A3_one_key_above_all():
    time, at = 140, 9
    k = jnp.zeros((1, time, 1, 4)).at[:, at, :, 0].set(1e4)
    q = jnp.zeros((1, time, 1, 4)).at[..., 0].set(1.0)
    v = normal(3, (1, time, 1, 6))
    o, (dq, dk, dv) = value_and_gradients(functools.partial(attention, scale=1.0), [q, k, v], ALL)
    sees = jnp.arange(time) >= at
    chex.assert_trees_all_equal(o[:, at:], jnp.broadcast_to(v[:, at : at + 1], o[:, at:].shape))
    # The rows before it average what they see, and only they feed the keys before it.
    chex.assert_trees_all_close(o[:, at - 1], jnp.mean(v[:, :at], axis=1), rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_equal(dv[:, at + 1 :], jnp.zeros_like(dv[:, at + 1 :]))
    # Two sums of six products, whose roundings a key of 1e4 multiplies.
    chex.assert_trees_all_close(dq[0, sees], jnp.zeros_like(dq[0, sees]), atol=1e4 * 6 * 2.0**-22)
    chex.assert_tree_all_finite((dq, dk, dv))


def test_equal_scores_average_the_values():
    q, k = jnp.zeros((1, 8, 2, 3)), normal(0, (1, 8, 1, 3))
    v = integers(1, (1, 8, 1, 5), -8, 9).astype(jnp.float32)
    running = jnp.cumsum(v, axis=1) / jnp.arange(1.0, 9.0)[:, None, None]
    chex.assert_trees_all_close(attention(q, k, v), jnp.repeat(running, 2, axis=2), rtol=1e-6)
    everywhere = jnp.broadcast_to(jnp.mean(v, axis=1, keepdims=True), (1, 8, 2, 5))
    chex.assert_trees_all_close(attention(q, k, v, causal=False), everywhere, rtol=1e-6)


def test_a_constant_value_comes_back_exactly_and_scores_get_no_gradient():
    q, k, _ = arguments((1, 150, 2, 1, 4, 3))
    v = jnp.full((1, 150, 1, 3), 2.0)
    o, (dq, dk, _) = value_and_gradients(attention, [q, k, v], ALL)
    chex.assert_trees_all_close(o, jnp.full_like(o, 2.0), rtol=1e-6)
    chex.assert_trees_all_close((dq, dk), (jnp.zeros_like(dq), jnp.zeros_like(dk)), atol=1e-5)


def test_log_sum_exp():
    q, k, v = arguments((2, 131, 4, 2, 5, 3))
    _, lse = attention(q, k, v, scale=0.5, return_lse=True)
    chex.assert_shape(lse, (2, 4, 131))
    scores = 0.5 * jnp.einsum("bqhd,bkhd->bhqk", q, jnp.repeat(k, 2, axis=2))
    expected = jax.nn.logsumexp(jnp.where(jnp.tril(jnp.ones((131, 131), bool)), scores, -jnp.inf), axis=-1)
    chex.assert_trees_all_close(lse, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_the_past_does_not_see_the_future(causal):
    args = arguments((1, 200, 2, 1, 4, 3))
    changed = [a.at[:, 140:].multiply(2.0) for a in args]
    same = bool(jnp.all(attention(*args, causal=causal)[:, :140] == attention(*changed, causal=causal)[:, :140]))
    assert same is causal


def test_permuting_keys_changes_nothing_without_a_mask():
    q, k, v = arguments((1, 33, 2, 1, 4, 3))
    order = np.random.default_rng(0).permutation(33)
    chex.assert_trees_all_close(
        attention(q, k[:, order], v[:, order], causal=False), attention(q, k, v, causal=False), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("shape", [(0, 7, 2, 1, 4, 3), (2, 0, 2, 1, 4, 3)])
def test_J7_empty(shape):
    args = arguments(shape)
    o, gradients = value_and_gradients(attention, args, ALL)
    chex.assert_shape(o, (*shape[:3], 3))
    chex.assert_trees_all_equal_shapes_and_dtypes(tuple(args), gradients)


def test_what_is_kept_grows_with_time_not_its_square():
    args = arguments((1, 300, 2, 1, 4, 3))
    kept = jax.tree.leaves(jax.vjp(attention, *args)[1])
    o, lse = attention(*args, return_lse=True)
    assert sum(a.nbytes for a in kept) == sum(a.nbytes for a in (*args, o, lse))


def test_frozen_arguments_cost_no_pass():
    args = arguments((1, 9, 2, 1, 4, 3))
    forward = ["attention_forward", "attention_row_terms"]
    assert gradient_launches(attention, args, (0,)) == [*forward, "attention_query_pass"]
    assert gradient_launches(attention, args, (1, 2)) == [*forward, "attention_key_pass"]


def test_vmap_is_a_loop():
    args = [jnp.stack([a, a + 1.0]) for a in arguments((1, 131, 2, 1, 4, 3))]
    check_vmap(jax.jit(attention), args, ALL, (0, 0, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_J5_J8_modes(dtype):
    check_modes(attention, arguments((1, 131, 2, 1, 4, 3), dtype), ALL)


def test_J3_shard_map():
    check_shard_map(attention, arguments((2, 131, 2, 1, 4, 3)), ALL, (True, True, True))


def test_errors_name_the_argument():
    q, k, v = arguments((2, 5, 4, 2, 3, 6))
    with raises(TypeError, "attention: k must be bfloat16 or float32, got int32"):
        attention(q, k.astype(jnp.int32), v)
    with raises(TypeError, "attention: v must have the dtype of q, float32, got bfloat16"):
        attention(q, k, v.astype(jnp.bfloat16))
    with raises(ValueError, "at most as many rows as k when causal, got 5 queries and 3 keys"):
        attention(q, k[:, :3], v[:, :3])
    with raises(ValueError, "k must have shape (2, 5, 2, 3)", "got shape (2, 5, 2, 2)"):
        attention(q, k[..., :2], v)
    with raises(ValueError, "v must have shape (2, 5, 2, 6)", "got shape (2, 5, 1, 6)"):
        attention(q, k, v[:, :, :1])
    with raises(ValueError, "causal must be one of True, False, got 'left'"):
        attention(q, k, v, causal="left")
    with raises(ValueError, "scale must be finite, got inf"):
        attention(q, k, v, scale=float("inf"))
    with raises(ValueError, "q must have shape (batch, time, heads, size), got shape (5, 4, 3)"):
        attention(q[0], k, v)


@pytest.mark.parametrize(("heads", "key_heads"), [(3, 2), (33, 2), (8, 0)])
def test_A7_heads_that_do_not_divide(heads, key_heads):
    q, k = jnp.ones((1, 4, heads, 2)), jnp.ones((1, 4, key_heads, 2))
    with raises(ValueError, f"got {heads} query heads and {key_heads} key heads"):
        attention(q, k, k)
