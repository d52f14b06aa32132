"""short_conv: values and gradients against float64, causality, splits of time, and what holds for every op."""

from __future__ import annotations

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena.ops.short_conv import short_conv
from jaxarena.testing import (
    assert_step_repeatable,
    check_against_oracle,
    check_modes,
    check_shard_map,
    check_step,
    check_vmap,
    gradient_launches,
    normal,
    value_and_gradients,
)
from tests.ops.common import DTYPES, raises


def naive(x, weight, state=None, *, activation="silu", segment_ids=None, return_state=False):
    """Element by element in batch, time and taps, over a list of the rows that each row may see."""
    (batch, time, channels), taps = x.shape, weight.shape[0]
    zero = jnp.zeros(channels, x.dtype)
    y, last = [], []
    for b in range(batch):
        seen = [zero] * (taps - 1) if state is None else list(state[b])
        for t in range(time):
            if segment_ids is not None and t > 0 and segment_ids[b, t] != segment_ids[b, t - 1]:
                seen = [zero] * (taps - 1)
            seen = [*seen, x[b, t]]
            y.append(sum(weight[j] * seen[len(seen) - taps + j] for j in range(taps)))
        last += seen[len(seen) - taps + 1 :]
    z = jnp.stack(y).reshape(x.shape)
    y = z if activation is None else jax.nn.silu(z)
    return (y, jnp.stack(last).reshape(batch, taps - 1, channels)) if return_state else y


def carried(x, weight, state, **params):
    return short_conv(x, weight, state=state, return_state=True, **params)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("time,packed", [(1, False), (2, True), (11, False), (11, True)])
def test_with_a_state_matches_the_oracle(time, packed, dtype):
    """Fewer rows than the state holds, too: the state then keeps some of its own."""
    ids = np.asarray([[7] * 4 + [3] * 2 + [7] + [9] * 4, [0] * 11])[:, -time:].astype(np.int32) if packed else None
    args = [normal(0, (2, time, 5), dtype), normal(1, (4, 5), dtype), normal(2, (2, 3, 5), dtype)]
    ours = functools.partial(carried, segment_ids=None if ids is None else jnp.asarray(ids))
    expected = functools.partial(naive, segment_ids=ids, return_state=True)
    check_against_oracle(ours, expected, args, (0, 1, 2), dtype=dtype, terms=2 * time * 4, stages=2)


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


@hypothesis.settings(max_examples=10)
@hypothesis.given(pieces=st.lists(st.integers(0, 4), min_size=2, max_size=5), taps=st.integers(1, 5), seed=st.integers(0, 99))
def test_pieces_are_one_pass_bit_for_bit(pieces, taps, seed):
    x, weight = normal(seed, (2, sum(pieces), 17)), normal(seed + 1, (taps, 17))
    y, state = short_conv(x, weight, return_state=True)
    parts, so_far = [], None
    for rows in jnp.split(x, np.cumsum(pieces)[:-1], axis=1):
        part, so_far = short_conv(rows, weight, state=so_far, return_state=True)
        parts.append(part)
    chex.assert_trees_all_equal((jnp.concatenate(parts, axis=1), so_far), (y, state), strict=True)
    chex.assert_trees_all_equal(y, short_conv(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_and_decode_are_one_pass_bit_for_bit(dtype):
    x, weight = normal(0, (3, 45, 131), dtype), normal(1, (4, 131), dtype)
    one_pass = jax.jit(lambda x: short_conv(x, weight, return_state=True))
    decode = jax.jit(lambda x, state: short_conv(x, weight, state=state, return_state=True))
    y, state = one_pass(x)
    part, so_far = one_pass(x[:, :22])
    parts = [part]
    for t in range(22, 45):
        part, so_far = decode(x[:, t : t + 1], so_far)
        parts.append(part)
    chex.assert_trees_all_equal((jnp.concatenate(parts, axis=1), so_far), (y, state), strict=True)


def test_gradients_flow_through_the_state():
    args = [normal(0, (2, 13, 3)), normal(1, (4, 3)), normal(2, (2, 3, 3))]

    def in_pieces(x, weight, state):
        first, state = carried(x[:, :2], weight, state)
        second, state = carried(x[:, 2:7], weight, state)
        third, state = carried(x[:, 7:], weight, state)
        return jnp.concatenate([first, second, third], axis=1), state

    got, wanted = (value_and_gradients(f, args, (0, 1, 2)) for f in (in_pieces, carried))
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-5)


@hypothesis.settings(max_examples=10)
@hypothesis.given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5), taps=st.integers(1, 5), seed=st.integers(0, 99))
def test_packed_sequences_are_separate_ones(sizes, taps, seed):
    """Also where two segments of one id have another between them; the last state is the last segment's."""
    x, weight, dy = normal(seed, (1, sum(sizes), 3)), normal(seed + 1, (taps, 3)), normal(seed + 2, (1, sum(sizes), 3))
    ids = jnp.asarray(np.repeat(np.arange(len(sizes)) % 2, sizes)[None], jnp.int32)
    cuts = np.cumsum(sizes)[:-1]

    def separate(x):
        results = [short_conv(part, weight, return_state=True) for part in jnp.split(x, cuts, axis=1)]
        return jnp.concatenate([y for y, _ in results], axis=1), results[-1][1]

    def run(op):
        (y, last), pull_back = jax.vjp(op, x)
        return y, last, pull_back((dy, jnp.ones_like(last)))

    packed = run(lambda x: short_conv(x, weight, segment_ids=ids, return_state=True))
    chex.assert_trees_all_close(packed, run(separate), rtol=1e-6, atol=1e-6)


def test_nan_stays_in_its_segment():
    x, weight = normal(0, (1, 9, 2)), normal(1, (4, 2))
    ids = jnp.asarray([[1, 1, 1, 2, 2, 2, 3, 3, 3]], jnp.int32)
    packed = functools.partial(short_conv, weight=weight, segment_ids=ids, return_state=True)
    (y, state), clean = packed(x.at[:, 4].set(jnp.nan)), packed(x)
    rows = jnp.asarray([0, 1, 2, 3, 6, 7, 8])
    chex.assert_trees_all_equal((y[:, rows], state), (clean[0][:, rows], clean[1]))


def test_extreme_values_stay_finite():
    x = jnp.asarray([-1e30, 1e30, -1e4, 1e4]).reshape(1, 4, 1)
    chex.assert_tree_all_finite(value_and_gradients(short_conv, [x, jnp.ones((2, 1))], (0, 1)))


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3)])
def test_J7_empty(shape):
    y, (dx, dweight) = value_and_gradients(short_conv, [jnp.zeros(shape), jnp.ones((4, 3))], (0, 1))
    chex.assert_shape((y, dx), shape)
    chex.assert_trees_all_equal(dweight, jnp.zeros((4, 3)))


def test_J7_no_rows_leave_the_state_as_it_is():
    x, weight, state = jnp.zeros((2, 0, 3)), normal(0, (4, 3)), normal(1, (2, 3, 3))
    ids = jnp.zeros((2, 0), jnp.int32)
    (_, last), (dx, dweight, dstate) = value_and_gradients(functools.partial(carried, segment_ids=ids), [x, weight, state], (0, 1, 2))
    chex.assert_trees_all_equal((last, dweight), (state, jnp.zeros((4, 3))))
    chex.assert_shape((dx, dstate), [(2, 0, 3), (2, 3, 3)])


def test_in_a_planned_step():
    ids = jnp.asarray([[0] * 4 + [1] * 3, [0] * 7], jnp.int32)

    def step(x, weight, state):
        def loss(x, weight, state):
            y, state = carried(x, weight, state, segment_ids=ids)
            y, state = carried(y, weight, state)
            return jnp.sum(short_conv(y, weight, activation=None) ** 2), state

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(x, weight, state)

    args = [normal(0, (2, 7, 130)), normal(1, (4, 130)), normal(2, (2, 3, 130))]
    assert_step_repeatable(step, *args)
    check_step(lambda x, weight: short_conv(x, weight, return_state=True), args[0], normal(1, (1, 130)))


def test_a_frozen_weight_costs_no_launch():
    args = [normal(0, (2, 7, 3)), normal(1, (4, 3))]
    assert gradient_launches(short_conv, args, (0,)) == ["short_conv_dx"]
    assert gradient_launches(short_conv, args, (1,)) == ["short_conv_dweight"]
    assert gradient_launches(carried, [*args, normal(2, (2, 3, 3))], (0, 2)) == ["short_conv_dx"]


def test_vmap_is_a_loop():
    check_vmap(short_conv, [normal(0, (3, 2, 7, 5)), normal(1, (3, 4, 5))], (0, 1), (0, 0))
    check_vmap(carried, [normal(0, (3, 2, 7, 5)), normal(1, (4, 5)), normal(2, (3, 2, 3, 5))], (0, 1, 2), (0, None, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_J5_J8_modes(dtype):
    check_modes(short_conv, [normal(0, (2, 7, 5), dtype), normal(1, (4, 5))], (0, 1))
    packed = functools.partial(carried, segment_ids=jnp.zeros((2, 7), jnp.int32))
    check_modes(packed, [normal(0, (2, 7, 5), dtype), normal(1, (4, 5)), normal(2, (2, 3, 5), dtype)], (0, 1, 2))


def test_J3_shard_map():
    check_shard_map(short_conv, [normal(0, (2, 7, 5)), normal(1, (4, 5))], (0, 1), (True, False))
    check_shard_map(carried, [normal(0, (2, 7, 5)), normal(1, (4, 5)), normal(2, (2, 3, 5))], (0, 1, 2), (True, False, True))
    check_shard_map(lambda x, w: short_conv(x, w, return_state=True), [normal(0, (2, 7, 5)), normal(1, (4, 5))], (0, 1), (True, False))


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
    with raises(TypeError, "short_conv: state must have the dtype of x, float32, got bfloat16"):
        short_conv(x, weight, state=jnp.ones((2, 3, 5), jnp.bfloat16))
    with raises(ValueError, "short_conv: state must have shape (2, 3, 5) (batch, taps - 1 and channels), got shape (2, 4, 5)"):
        short_conv(x, weight, state=jnp.ones((2, 4, 5)))
    with raises(TypeError, "short_conv: segment_ids must be int32, got float32"):
        short_conv(x, weight, segment_ids=jnp.ones((2, 7)))
    with raises(ValueError, "short_conv: segment_ids must have shape (2, 7) (batch and time of x), got shape (7,)"):
        short_conv(x, weight, segment_ids=jnp.ones(7, jnp.int32))
    with raises(ValueError, "short_conv: return_state must be one of True, False, got 'yes'"):
        short_conv(x, weight, return_state="yes")
