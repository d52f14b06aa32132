"""gated_delta_rule a few steps at a time from a carried state: against the chunked form and the oracle, row by row, in place."""

from __future__ import annotations

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena.ops.gated_delta_rule import gated_delta_rule
from jaxarena.testing import (
    assert_close_to_oracle,
    assert_step_repeatable,
    check_against_oracle,
    check_modes,
    check_shard_map,
    check_vmap,
    live_launches,
    oracle,
    poison,
    value_and_gradients,
)
from tests.ops.common import DTYPES, raises
from tests.ops.delta_cases import arguments, naive, state_for

ALL = (0, 1, 2, 3, 4, 5)


def decode(q, k, v, g, beta, state, **params):
    return gated_delta_rule(q, k, v, g, beta, initial_state=state, return_state=True, **params)


def test_few_steps_run_one_by_one():
    for time, launch in ((1, "delta_rule_decode"), (16, "delta_rule_decode"), (17, "gated_delta_rule_state_forward")):
        args = arguments((1, time, 1, 1, 4, 3))
        assert live_launches(decode, *args, state_for(args)) == [launch]


@hypothesis.settings(max_examples=2)
@hypothesis.given(
    dtype=st.sampled_from(DTYPES),
    batch=st.integers(1, 3),
    time=st.integers(1, 16),
    heads=st.sampled_from([(1, 1), (1, 3), (2, 4)]),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)).filter(lambda s: s[0] != s[1]),
)
def test_D1_D10_matches_the_oracle(dtype, batch, time, heads, sizes):
    args = arguments((batch, time, *heads, *sizes), dtype)
    op, expected = functools.partial(decode, qk_l2norm=True), jax.jit(functools.partial(naive, l2norm_eps=1e-6))
    check_against_oracle(op, expected, [*args, state_for(args)], ALL, dtype=dtype, terms=time * sizes[0], stages=2)


@pytest.mark.parametrize("time", [1, 2, 65, 129])
def test_D1_chunks_then_one_step(time):
    args = arguments((2, time, 1, 2, 5, 4))

    def chunks_then_decode(*args):
        o, state = gated_delta_rule(*(a[:, :-1] for a in args), return_state=True)
        last, state = decode(*(a[:, -1:] for a in args), state)
        return jnp.concatenate([o, last], axis=1), state

    got = jax.jit(chunks_then_decode)(*args)
    assert_close_to_oracle(got, oracle(naive, *args), dtype=jnp.float32, terms=time * 5)


def test_D2_a_step_overwrites_exactly():
    key = jnp.zeros((1, 9, 1, 6)).at[..., 2].set(1.0)
    v = jnp.arange(36.0).reshape(1, 9, 1, 4)
    zero, one = jnp.zeros((1, 9, 1)), jnp.ones((1, 9, 1))
    o, state = decode(key, key, v, zero, one, jnp.full((1, 1, 6, 4), 7.0), scale=1.0)
    chex.assert_trees_all_equal(o, v)
    chex.assert_trees_all_equal(state, jnp.full((1, 1, 6, 4), 7.0).at[:, :, 2].set(v[:, -1]))


def test_D3_gates_of_every_size():
    run, run_naive = (jax.jit(functools.partial(value_and_gradients, op, argnums=ALL)) for op in (decode, naive))
    for gate in (0.0, -1e-4, -1e4, -np.inf):
        args = arguments((1, 3, 1, 2, 6, 5), gates=gate)
        args = [*args, state_for(args)]
        got = run(args)
        assert_close_to_oracle(got, oracle(run_naive, args), dtype=jnp.float32, terms=18)
        if gate <= -1e4:
            (_, state), (*_, dstate) = got
            chex.assert_trees_all_equal(run([*args[:5], jnp.zeros_like(args[5])])[0][1], state)
            chex.assert_trees_all_equal(dstate, jnp.zeros_like(dstate))


def test_packed_segments():
    args = arguments((2, 7, 1, 2, 5, 4))
    ids = jnp.asarray([[3, 3, 3, 4, 4, 3, 3], [1, 2, 3, 4, 5, 6, 7]], jnp.int32)
    op, expected = functools.partial(decode, segment_ids=ids), jax.jit(functools.partial(naive, segment_ids=ids))
    check_against_oracle(op, expected, [*args, state_for(args)], ALL, dtype=jnp.float32, terms=35)


def trajectory(args, state, steps):
    """``steps`` decode steps, one token a call."""
    step = jax.jit(functools.partial(decode, qk_l2norm=True))
    o = []
    for t in range(steps):
        out, state = step(*(a[:, t : t + 1] for a in args), state)
        o.append(out)
    return jnp.concatenate(o, axis=1), state


@pytest.mark.parametrize(("batch", "dtype", "sizes"), [(3, jnp.bfloat16, (40, 24)), (8, jnp.float32, (7, 5)), (2, jnp.float32, (128, 96))])
def test_D12_each_row_has_the_bits_of_its_own_run(batch, dtype, sizes):
    args = arguments((batch, 20, 1, 3, *sizes), dtype)
    state = state_for(args)
    together = trajectory(args, state, 20)
    alone = [trajectory([a[i : i + 1] for a in args], state[i : i + 1], 20) for i in range(batch)]
    chex.assert_trees_all_equal(together, jax.tree.map(lambda *rows: jnp.concatenate(rows), *alone))


@pytest.mark.parametrize("time", [1, 5])
def test_a_donated_state_is_updated_in_place(time):
    args = arguments((8, time, 1, 2, 32, 64))
    state = state_for(args)
    compiled = jax.jit(decode, donate_argnums=5).lower(*args, state).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == state.nbytes
    assert memory.temp_size_in_bytes < state.nbytes / 2
    expected = decode(*args, state)
    where = state.unsafe_buffer_pointer()
    got = compiled(*args, state)
    assert got[1].unsafe_buffer_pointer() == where
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)


def test_a_row_of_nan_stays_a_row():
    args = arguments((3, 2, 1, 2, 5, 4))
    state = state_for(args)
    clean = decode(*args, state)
    spoiled = decode(*args, state.at[1].set(poison(state.shape[1:], jnp.float32)))
    for row in (0, 2):
        chex.assert_trees_all_equal(jax.tree.map(lambda a, row=row: a[row], clean), jax.tree.map(lambda a, row=row: a[row], spoiled))


@pytest.mark.slow
def test_D9_the_error_does_not_grow_over_4096_steps():
    args = arguments((1, 4096, 1, 1, 16, 8), jnp.bfloat16, gates=-1e-4)
    args[4] = jnp.full_like(args[4], 0.5)

    @jax.jit
    def run(args, state):
        def step(state, xs):
            o, state = decode(*(x[:, None] for x in xs), state)
            return state, (o[:, 0], state)

        return jax.lax.scan(step, state, tuple(jnp.moveaxis(a, 1, 0) for a in args))[1]

    def naive_states(*args):
        o, states = [], []
        state = None
        for part in np.split(np.arange(4096), 64):
            out, state = naive(*(a[:, part] for a in args), state)
            o.append(out)
            states.append(state)
        return jnp.concatenate(o, axis=1), jnp.stack(states)

    o, states = run(args, jnp.zeros((1, 1, 16, 8)))
    chex.assert_equal(states.dtype, jnp.float32)
    expected_o, expected_states = oracle(jax.jit(naive_states), *args)
    assert_close_to_oracle(jnp.moveaxis(o, 0, 1), expected_o, dtype=jnp.bfloat16, terms=16)
    errors = np.max(np.abs(np.asarray(states[63::64], np.float64) - expected_states), axis=(1, 2, 3, 4))
    assert np.max(errors[-16:]) < 2 * np.max(errors[:16])
    assert np.max(errors) < 1e-5 * np.max(np.abs(expected_states))


def test_D9_large_values_stay_finite():
    args = arguments((1, 4, 1, 1, 16, 8), jnp.bfloat16, gates=-1e-4)
    args[2] = jnp.full_like(args[2], 3e4)
    chex.assert_tree_all_finite(decode(*args, state_for(args)))
    with raises(TypeError, "q must be bfloat16 or float32, got float16"):
        decode(*(a.astype(jnp.float16) for a in args[:3]), *args[3:], state_for(args))


@pytest.mark.parametrize("shape", [(0, 1, 1, 2, 4, 3), (2, 0, 1, 2, 4, 3)])
def test_J7_empty(shape):
    args = arguments(shape)
    args = [*args, state_for(args)]
    (o, state), gradients = value_and_gradients(decode, args, ALL)
    chex.assert_equal_shape((o, args[2]))
    chex.assert_trees_all_equal(state, args[5])
    chex.assert_trees_all_equal_shapes_and_dtypes(tuple(args), gradients)


def test_a_planned_step():
    args = arguments((3, 2, 1, 2, 6, 5))
    state = state_for(args)
    assert_step_repeatable(lambda *a: jax.tree.map(jnp.sin, decode(*(jnp.cos(x) for x in a[:5]), a[5])), *args, state)


def test_vmap_is_a_loop():
    args = arguments((2, 3, 1, 2, 4, 3))
    args = [jnp.stack([a, 0.5 * a]) for a in [*args, state_for(args)]]
    check_vmap(jax.jit(decode), args, ALL, (0,) * 6)


def test_J5_J8_modes():
    args = arguments((2, 3, 1, 2, 4, 3), jnp.bfloat16)
    check_modes(functools.partial(decode, qk_l2norm=True), [*args, state_for(args)], ALL)


def test_J3_shard_map():
    args = arguments((2, 3, 1, 2, 4, 3))
    check_shard_map(decode, [*args, state_for(args)], ALL, (True,) * 6)
