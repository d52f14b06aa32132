"""gated_delta_rule with states carried in and out, and with packed segments: against the step-by-step oracle, split and joined."""

from __future__ import annotations

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena.ops import delta_spans
from jaxarena.ops.gated_delta_rule import gated_delta_rule
from jaxarena.testing import (
    assert_close_to_oracle,
    assert_step_repeatable,
    check_against_oracle,
    check_modes,
    check_shard_map,
    check_vmap,
    gradient_launches,
    normal,
    oracle,
    value_and_gradients,
)
from tests.ops.common import DTYPES, raises
from tests.ops.delta_cases import arguments, naive, naive_outputs, state_for

ALL = (0, 1, 2, 3, 4, 5)


def from_state(q, k, v, g, beta, state, **params):
    return gated_delta_rule(q, k, v, g, beta, initial_state=state, return_state=True, **params)


def check(args, dtype=jnp.float32, argnums=ALL, **params):
    terms = args[0].shape[1] * args[0].shape[3]
    naive_params = {name: value for name, value in params.items() if name in ("scale", "segment_ids")}
    expected = jax.jit(functools.partial(naive, l2norm_eps=1e-6 if params.get("qk_l2norm") else None, **naive_params))
    check_against_oracle(functools.partial(from_state, **params), expected, args, argnums, dtype=dtype, terms=terms)


@pytest.mark.parametrize("dtype", DTYPES)
def test_D1_states_in_and_out(dtype):
    args = arguments((2, 70, 2, 4, 9, 7), dtype)
    check([*args, state_for(args)], dtype)


@pytest.mark.slow
@hypothesis.settings(max_examples=12)
@hypothesis.given(
    batch=st.integers(1, 3),
    time=st.integers(17, 150).filter(lambda t: t % 8),
    heads=st.sampled_from([(1, 1), (1, 3), (3, 3), (2, 6)]),
    # A key of one number, normed, is its sign: its gradient is nothing but rounding.
    sizes=st.tuples(st.integers(2, 21), st.integers(1, 21)).filter(lambda s: s[0] != s[1]),
    chunk_size=st.sampled_from([3, 16, 29, 64]),
)
def test_D1_D10_any_shape(batch, time, heads, sizes, chunk_size):
    args = arguments((batch, time, *heads, *sizes))
    check([*args, state_for(args)], chunk_size=chunk_size, qk_l2norm=True)


@pytest.mark.parametrize("span_bytes", [1, 2**11])
def test_spans_change_only_rounding(monkeypatch, span_bytes):
    """Sequences are taken whole, by one chunk at a time, and by several with a last span that is not full."""
    args = arguments((2, 83, 1, 2, 5, 3))
    run = jax.jit(lambda args: value_and_gradients(functools.partial(from_state, chunk_size=8), args, ALL))
    whole = run([*args, state_for(args)])
    for name in ("FORWARD_BYTES", "BACKWARD_BYTES"):
        monkeypatch.setattr(delta_spans, name, span_bytes)
    jax.clear_caches()
    parts = jax.jit(lambda args: value_and_gradients(functools.partial(from_state, chunk_size=8), args, ALL))
    chex.assert_trees_all_close(parts([*args, state_for(args)]), whole, rtol=1e-5, atol=1e-5)
    jax.clear_caches()


def test_a_state_of_zeros_is_none():
    args = arguments((2, 37, 1, 2, 5, 4))
    zero = jnp.zeros((2, 2, 5, 4))
    o = gated_delta_rule(*args)
    chex.assert_trees_all_equal(o, gated_delta_rule(*args, initial_state=zero))
    chex.assert_trees_all_equal(gated_delta_rule(*args, return_state=True), from_state(*args, zero))


def test_split_and_join():
    """37 + 1 + 62 steps are 100, in values and in gradients."""
    args = arguments((2, 100, 1, 2, 6, 5))
    state = state_for(args)

    def in_parts(*args):
        *args, state = args
        parts = []
        for part in (slice(0, 37), slice(37, 38), slice(38, 100)):
            o, state = from_state(*(a[:, part] for a in args), state)
            parts.append(o)
        return jnp.concatenate(parts, axis=1), state

    whole, parts = (jax.jit(lambda *a, op=op: value_and_gradients(op, a, ALL))(*args, state) for op in (from_state, in_parts))
    chex.assert_trees_all_close(parts, whole, rtol=1e-5, atol=1e-5)


def test_batch_is_single_sequences():
    args = arguments((3, 41, 1, 2, 6, 5))
    args = [*args, state_for(args)]
    run = jax.jit(lambda args: value_and_gradients(lambda *a: jax.tree.map(jnp.sin, from_state(*a)), args, ALL)[0])
    singles = [run([a[i : i + 1] for a in args]) for i in range(3)]
    chex.assert_trees_all_close(run(args), jax.tree.map(lambda *rows: jnp.concatenate(rows), *singles), rtol=1e-5, atol=1e-5)


def test_identity_keys_fill_the_state_exactly():
    eye = jnp.eye(24)[None, :, None]
    v = jnp.asarray(np.random.default_rng(0).integers(-9, 10, (1, 24, 1, 5)), jnp.float32)
    zero, one = jnp.zeros((1, 24, 1)), jnp.ones((1, 24, 1))
    _, state = gated_delta_rule(eye, eye, v, zero, one, scale=1.0, return_state=True)
    chex.assert_trees_all_equal(state[0, 0], v[0, :, 0])
    # Written at full strength over what was there, a state of anything ends as the same.
    _, over = from_state(eye, eye, v, zero, one, 3 * state + 1, scale=1.0)
    chex.assert_trees_all_equal(over, state)


def test_D3_the_state_after_a_reset_is_exact():
    args = arguments((1, 70, 1, 2, 8, 5), gates=-1e-2)
    args[3] = args[3].at[:, 40].set(-jnp.inf)
    run = jax.jit(lambda *a: value_and_gradients(from_state, a, ALL))
    (_, state), gradients = run(*args, state_for(args))
    (_, fresh), _ = run(*(a[:, 40:] for a in args), jnp.zeros((1, 2, 8, 5)))
    chex.assert_trees_all_close(state, fresh, rtol=1e-5, atol=1e-6)
    chex.assert_tree_all_finite(gradients)


def test_D8_the_state_only_decays_at_a_zero_key():
    args = arguments((1, 40, 1, 1, 4, 3))
    args[1] = args[1].at[:, 5:].set(0.0)
    _, before = gated_delta_rule(*(a[:, :5] for a in args), qk_l2norm=True, return_state=True)
    _, after = gated_delta_rule(*args, qk_l2norm=True, return_state=True)
    # The relative error of an exponential is the absolute error of its exponent: 35 roundings of sums down to -30.
    chex.assert_trees_all_close(after, before * jnp.exp(jnp.sum(args[3][:, 5:])), rtol=6e-5)


LENGTHS = ((5, 1, 64, 20), (90,), (40, 50))


def packed_ids():
    """Segments of ``LENGTHS`` in 3 rows; an id may come back after another."""
    rows = [np.repeat(np.arange(len(lengths)) % 2 + row, lengths) for row, lengths in enumerate(LENGTHS)]
    return jnp.asarray(np.stack(rows), jnp.int32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_segments_against_the_oracle(dtype):
    args = arguments((3, 90, 1, 2, 6, 5), dtype)
    check([*args, state_for(args)], dtype, segment_ids=packed_ids())


@pytest.mark.slow
def test_packed_segments_are_separate_sequences():
    """The first segment starts from the given state, the last one's is returned; no gradient crosses a boundary."""
    args = arguments((3, 90, 1, 2, 6, 5))
    state = state_for(args)
    (o, last), gradients = jax.jit(lambda *a: value_and_gradients(functools.partial(from_state, segment_ids=packed_ids()), a, ALL))(
        *args, state
    )
    do, dlast = normal(1000, o.shape, jnp.bfloat16).astype(o.dtype), normal(1001, last.shape, jnp.bfloat16).astype(o.dtype)
    run = jax.jit(lambda args, cotangents: (lambda r: (r[0], r[1](cotangents)))(jax.vjp(from_state, *args)))
    for row, lengths in enumerate(LENGTHS):
        ends = np.cumsum(lengths)
        for i, (end, length) in enumerate(zip(ends, lengths, strict=True)):
            part = (slice(row, row + 1), slice(end - length, end))
            first, final = i == 0, end == ends[-1]
            start = state[row : row + 1] * first
            (o_alone, last_alone), d_alone = run([*(a[part] for a in args), start], (do[part], dlast[row : row + 1] * final))
            close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=2e-5)
            close(o[part], o_alone)
            close(tuple(d[part] for d in (*gradients[:3], gradients[4])), (*d_alone[:3], d_alone[4]))
            # The gate of a segment's first step scales a state of zeros, but for the first segment's.
            skip = 0 if first else 1
            close(gradients[3][part][:, skip:], d_alone[3][:, skip:])
            chex.assert_trees_all_equal(gradients[3][part][:, :skip], jnp.zeros((1, skip, 2)))
            if first:
                close(gradients[5][row : row + 1], d_alone[5])
            if final:
                close(last[row : row + 1], last_alone)


def test_segments_alone_need_no_state():
    args = arguments((3, 90, 1, 2, 6, 5))
    o = gated_delta_rule(*args, segment_ids=packed_ids())
    assert_close_to_oracle(o, oracle(functools.partial(naive_outputs, segment_ids=packed_ids()), *args), dtype=jnp.float32, terms=540)
    chex.assert_trees_all_equal(o[1], gated_delta_rule(*args)[1])


@pytest.mark.parametrize("shape", [(0, 25, 1, 2, 4, 3), (2, 0, 1, 2, 4, 3)])
def test_J7_empty(shape):
    args = arguments(shape)
    args = [*args, state_for(args)]
    (o, state), gradients = value_and_gradients(from_state, args, ALL)
    chex.assert_equal_shape((o, args[2]))
    chex.assert_trees_all_equal(state, args[5])
    chex.assert_trees_all_equal_shapes_and_dtypes(tuple(args), gradients)


def test_one_launch_forward_one_backward():
    args = arguments((1, 20, 1, 2, 6, 5))
    args = [*args, state_for(args)]
    assert gradient_launches(from_state, args, (0, 5)) == ["gated_delta_rule_state_backward"]


@pytest.mark.parametrize("span_bytes", [1, 2**22])
def test_a_planned_step(monkeypatch, span_bytes):
    """The same bits whatever lay in the arena before."""
    for name in ("FORWARD_BYTES", "BACKWARD_BYTES"):
        monkeypatch.setattr(delta_spans, name, span_bytes)
    args = arguments((2, 37, 1, 2, 6, 5))

    def step(q, k, v, g, beta, state):
        def loss(*args):
            o, state = from_state(*(jnp.sin(a) for a in args), chunk_size=16, segment_ids=packed_ids()[:2, :37])
            return jnp.sum(o**2) + jnp.sum(state**2)

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 4, 5))(q, k, v, g, beta, state)

    assert_step_repeatable(step, *args, state_for(args))


def test_vmap_is_a_loop():
    args = arguments((1, 21, 1, 2, 4, 3))
    args = [jnp.stack([a, 0.5 * a]) for a in [*args, state_for(args)]]
    check_vmap(jax.jit(functools.partial(from_state, chunk_size=8)), args, ALL, (0,) * 6)


def test_J5_J8_modes():
    args = arguments((1, 19, 1, 2, 4, 3), jnp.bfloat16)
    ids = jnp.asarray([[4] * 11 + [5] * 8], jnp.int32)
    check_modes(functools.partial(from_state, qk_l2norm=True, chunk_size=8, segment_ids=ids), [*args, state_for(args)], ALL)


def test_J3_shard_map():
    args = arguments((2, 19, 1, 2, 4, 3))
    sharded = (True,) * 5
    check_shard_map(functools.partial(from_state, chunk_size=8), [*args, state_for(args)], ALL, (*sharded, True))
    check_shard_map(functools.partial(gated_delta_rule, chunk_size=8, return_state=True), args, ALL[:5], sharded)


@pytest.mark.slow
@pytest.mark.parametrize("time", [65_536, 65_537])
def test_N5_long_sequences(time):
    args = arguments((1, time, 1, 1, 2, 3))
    got = jax.jit(functools.partial(gated_delta_rule, return_state=True))(*args)
    assert_close_to_oracle(got, oracle(jax.jit(naive), *args), dtype=jnp.float32, terms=128)


def test_errors_name_the_argument():
    args = arguments((2, 5, 2, 4, 3, 6))
    state = state_for(args)
    with raises(TypeError, "gated_delta_rule: initial_state must be float32, got bfloat16"):
        gated_delta_rule(*args, initial_state=state.astype(jnp.bfloat16))
    with raises(ValueError, "initial_state must have shape (2, 4, 3, 6)", "got shape (2, 4, 6, 3)"):
        gated_delta_rule(*args, initial_state=jnp.swapaxes(state, 2, 3))
    with raises(ValueError, "return_state must be one of True, False, got 'yes'"):
        gated_delta_rule(*args, return_state="yes")
    with raises(TypeError, "segment_ids must be int32, got float32"):
        gated_delta_rule(*args, segment_ids=jnp.zeros((2, 5)))
    with raises(ValueError, "segment_ids must have shape (2, 5)", "got shape (5,)"):
        gated_delta_rule(*args, segment_ids=jnp.zeros(5, jnp.int32))
