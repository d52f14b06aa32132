"""attention with fewer queries than keys, windows, segments, lengths, softcap and lse: against float64, and what must equal what."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxarena.ops.attention import attention
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

ALL = (0, 1, 2)


def naive(
    q, k, v, *, causal=True, scale=None, window=None, softcap=None, segment_ids=None, lengths=None, query_lengths=None, return_lse=False
):
    queries, keys = q.shape[1], k.shape[1]
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if softcap is None else softcap * jnp.tanh(s / softcap)
    ends = jnp.full(q.shape[0], keys) if lengths is None else jnp.asarray(lengths)
    query_ends = jnp.full(q.shape[0], queries) if query_lengths is None else jnp.asarray(query_lengths)
    query, key = jnp.arange(queries)[None, :, None], jnp.arange(keys)[None, None]
    position = (ends - query_ends)[:, None, None] + query
    seen = (key < ends[:, None, None]) & (query < query_ends[:, None, None])
    if causal:
        seen &= key <= position
    if window is not None:
        seen &= key > position - window
    if segment_ids is not None:
        of_q, of_k = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        seen &= jnp.asarray(of_q)[:, :, None] == jnp.asarray(of_k)[:, None, :]
    seen = seen[:, None]
    some = jnp.any(seen, axis=-1)
    top = jnp.where(some, jnp.max(jnp.where(seen, s, -jnp.inf), axis=-1), 0)
    p = jnp.where(seen, jnp.exp(jnp.where(seen, s, 0) - top[..., None]), 0)
    total = jnp.sum(p, axis=-1)
    o = jnp.einsum("bhqk,bkhd->bqhd", p / jnp.where(some, total, 1)[..., None], v)
    lse = jnp.where(some, top + jnp.log(jnp.where(some, total, 1)), -jnp.inf)
    return (o, lse) if return_lse else o


def arguments(batch, queries, keys, heads, key_heads, d, dv, dtype=jnp.float32):
    return [
        normal(0, (batch, queries, heads, d), dtype),
        normal(1, (batch, keys, key_heads, d), dtype),
        normal(2, (batch, keys, key_heads, dv), dtype),
    ]


def check(args, dtype=jnp.float32, **params):
    terms = args[1].shape[1] * args[0].shape[3]
    op, expected = functools.partial(attention, **params), jax.jit(functools.partial(naive, **params))
    check_against_oracle(op, expected, args, ALL, dtype=dtype, terms=terms, stages=3)


@pytest.mark.parametrize(
    ("queries", "keys", "dtypes", "params"),
    [
        (70, 201, DTYPES, {}),
        (201, 70, DTYPES[:1], {"causal": False}),
        (1, 131, DTYPES[1:], {}),
        (150, 150, DTYPES[:1], {"window": 1}),
        (261, 261, DTYPES, {"window": 40}),
        (9, 270, DTYPES[:1], {"window": 140}),
        (140, 140, DTYPES[1:], {"softcap": 0.7}),
        (30, 135, DTYPES, {"softcap": 2.0, "window": 20}),
    ],
)
def test_values_and_gradients(queries, keys, dtypes, params):
    for dtype in dtypes:
        check(arguments(2, queries, keys, 4, 2, 6, 5, dtype), dtype, **params)


@pytest.mark.parametrize("params", [{}, {"window": 9}, {"causal": False}, {"softcap": 1.5}])
def test_lengths_query_lengths_and_segments(params):
    args = arguments(3, 20, 150, 4, 2, 6, 5)
    if not params:
        check(args, lengths=jnp.asarray([150, 131, 20], jnp.int32))
    ids = integers(3, (3, 150), 0, 3).sort(axis=1)
    lengths, query_lengths = jnp.asarray([150, 140, 33], jnp.int32), jnp.asarray([20, 7, 0], jnp.int32)
    check(args, segment_ids=(ids[:, -20:], ids), lengths=lengths, query_lengths=query_lengths, **params)


@pytest.mark.parametrize("params", [{}, {"lengths": jnp.asarray([40, 3], jnp.int32)}, {"window": 4, "softcap": 1.0}])
def test_lse_has_a_gradient(params):
    op, expected = functools.partial(attention, return_lse=True, **params), jax.jit(functools.partial(naive, return_lse=True, **params))
    args = arguments(2, 3, 40, 4, 2, 6, 5)
    check_against_oracle(op, expected, args, ALL, dtype=jnp.float32, terms=240, stages=3)


def test_A4_rows_that_see_no_key():
    args = arguments(1, 5, 9, 2, 1, 4, 3)
    op = functools.partial(attention, lengths=jnp.asarray([2], jnp.int32), return_lse=True)
    (o, lse) = op(*args)
    chex.assert_trees_all_equal(o[:, :3], jnp.zeros_like(o[:, :3]))
    chex.assert_trees_all_equal(lse[..., :3], jnp.full_like(lse[..., :3], -jnp.inf))
    o, (dq, dk, dv) = value_and_gradients(functools.partial(attention, lengths=jnp.asarray([2], jnp.int32)), args, ALL)
    chex.assert_trees_all_equal(dq[:, :3], jnp.zeros_like(dq[:, :3]))
    chex.assert_tree_all_finite((o, dq, dk, dv))
    chex.assert_trees_all_equal((dk[:, 2:], dv[:, 2:]), (jnp.zeros_like(dk[:, 2:]), jnp.zeros_like(dv[:, 2:])))
    # Rows 3 and 4 are those of a sequence of two.
    alone = attention(args[0][:, 3:], args[1][:, :2], args[2][:, :2])
    chex.assert_trees_all_close(o[:, 3:], alone, rtol=1e-6)


def test_A5_continuations_are_the_last_rows():
    q, k, v = arguments(2, 5, 5, 4, 2, 6, 3)
    full = attention(q, k, v)
    chex.assert_trees_all_close(attention(q[:, 4:], k, v), full[:, 4:], rtol=1e-6, atol=1e-6)
    chex.assert_trees_all_close(attention(q[:, 3:], k, v), full[:, 3:], rtol=1e-6, atol=1e-6)


@settings(max_examples=3, deadline=None)
@given(st.sets(st.integers(1, 148), min_size=1, max_size=2), st.sampled_from([None, 7]), st.integers(0, 99))
def test_packed_sequences_are_separate_ones(cuts, window, seed):
    q, k, v = (normal(seed + i, (1, 149, h, d)) for i, (h, d) in enumerate([(4, 5), (2, 5), (2, 3)]))
    cuts = sorted(cuts)
    ids = jnp.searchsorted(jnp.asarray(cuts), jnp.arange(149), side="right")[None].astype(jnp.int32)
    run = jax.jit(lambda *args: value_and_gradients(functools.partial(attention, segment_ids=ids, window=window), args, ALL))
    packed = run(q, k, v)
    parts = [attention(*part, window=window) for part in zip(*(jnp.split(x, cuts, axis=1) for x in (q, k, v)), strict=True)]
    chex.assert_trees_all_close(packed[0], jnp.concatenate(parts, axis=1), rtol=1e-5, atol=1e-5)
    chex.assert_tree_all_finite(packed)


@settings(max_examples=4, deadline=None)
@given(st.integers(1, 3), st.integers(1, 20), st.integers(0, 160), st.sampled_from([None, 11]), st.integers(0, 99))
def test_a_batch_with_lengths_is_its_rows(batch, queries, more, window, seed):
    keys = queries + more
    q, k, v = normal(seed, (batch, queries, 2, 4)), normal(seed + 1, (batch, keys, 1, 4)), normal(seed + 2, (batch, keys, 1, 3))
    lengths = integers(seed, (batch,), queries, keys + 1)
    together = attention(q, k, v, lengths=lengths, window=window)
    for i in range(batch):
        n = int(lengths[i])
        alone = attention(q[i : i + 1], k[i : i + 1, :n], v[i : i + 1, :n], window=window)
        chex.assert_trees_all_close(together[i : i + 1], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (6, 2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_N2_with_lengths_a_sequence_has_the_same_bits_in_any_batch(heads, key_heads, dtype):
    args = arguments(33, 1, 261, heads, key_heads, 16, 24, dtype)
    lengths = integers(5, (33,), 1, 262)
    run = jax.jit(lambda q, k, v, lengths: attention(q, k, v, lengths=lengths, return_lse=True))
    together = run(*args, lengths)
    for first, count in ((0, 1), (32, 1), (0, 8)):
        part = run(*(a[first : first + count] for a in (*args, lengths)))
        chex.assert_trees_all_equal(part, jax.tree.map(lambda a: a[first : first + count], together))  # noqa: B023


def test_A1_what_lies_past_a_sequences_end_is_never_seen():
    q, k, v = arguments(2, 3, 140, 2, 1, 4, 3)
    lengths = jnp.asarray([70, 129], jnp.int32)
    past = jnp.arange(140)[None, :, None, None] >= lengths[:, None, None, None]
    op = functools.partial(attention, lengths=lengths, softcap=3.0)
    run = jax.jit(lambda *args: value_and_gradients(op, args, ALL))
    clean, poisoned = run(q, k, v), run(q, jnp.where(past, jnp.nan, k), jnp.where(past, jnp.nan, v))
    chex.assert_trees_all_equal(clean, poisoned)
    chex.assert_tree_all_finite(clean)


def test_lengths_out_of_range_count_as_none_or_all():
    args = arguments(2, 3, 140, 2, 1, 4, 3)
    out, inside = (
        {"lengths": jnp.asarray(n, jnp.int32), "query_lengths": jnp.asarray(m, jnp.int32)}
        for n, m in (([170, -2], [9, -1]), ([140, 0], [3, 0]))
    )
    chex.assert_trees_all_equal(attention(*args, **out), attention(*args, **inside))


@pytest.mark.slow
@pytest.mark.parametrize("time", [65536, 65537])
def test_N5_decode_against_a_long_cache(time):
    # Each key alone but the last is far below: what is summed is all of them, and the last counts as much as the rest together.
    q, k, v = jnp.ones((2, 1, 1, 1)), jnp.zeros((2, time, 1, 1)), normal(0, (2, time, 1, 1))
    k = k.at[:, -1].set(jnp.log(time - 1.0))
    o, lse = attention(q, k, v, scale=1.0, lengths=jnp.full(2, time, jnp.int32), return_lse=True)
    wide = np.asarray(v, np.float64)[..., 0, 0]
    expected = (wide[:, :-1].mean(axis=1) + wide[:, -1]) / 2
    chex.assert_trees_all_close(o[:, 0, 0, 0], expected.astype(np.float32), rtol=1e-4)
    chex.assert_trees_all_close(lse[:, 0, 0], np.full(2, np.log(2.0 * (time - 1)), np.float32), rtol=1e-6)


def test_in_a_planned_step():
    args = arguments(2, 12, 141, 4, 2, 32, 32)

    def step(q, k, v, lengths):
        loss = lambda q, k, v: jnp.sum(attention(q * 1, k * 1, v * 1, lengths=lengths, window=50, softcap=3.0) ** 2)  # noqa: E731
        return jax.value_and_grad(loss, argnums=ALL)(q, k, v)

    lengths = jnp.asarray([141, 77], jnp.int32)
    assert_step_repeatable(step, *args, lengths)
    step = jax.jit(step)
    chex.assert_trees_all_close(step(*args, lengths)[0], jnp.sum(naive(*args, lengths=lengths, window=50, softcap=3.0) ** 2), rtol=1e-4)


def test_frozen_arguments_cost_no_pass():
    args = arguments(1, 4, 9, 2, 1, 4, 3)
    op = functools.partial(attention, return_lse=True, window=3)
    assert gradient_launches(op, args, (0,)) == ["attention_forward", "attention_row_terms_lse", "attention_query_pass"]


def test_vmap_is_a_loop():
    args = [jnp.stack([a, a + 1.0]) for a in arguments(1, 3, 20, 2, 1, 4, 3)]
    check_vmap(jax.jit(functools.partial(attention, lengths=jnp.asarray([17], jnp.int32))), args, ALL, (0, 0, 0))


def test_J5_J8_modes():
    op = functools.partial(attention, window=5, softcap=2.0, lengths=jnp.asarray([17, 9], jnp.int32), return_lse=True)
    check_modes(op, arguments(2, 3, 20, 2, 1, 4, 3), ALL)


def test_J3_shard_map():
    ids = jnp.asarray([[0, 0, 0, 1, 1, 1, 1, 2, 2]] * 2, jnp.int32)

    def op(q, k, v):
        return attention(q, k, v, segment_ids=ids[: q.shape[0]], lengths=jnp.full(q.shape[0], 9, jnp.int32))

    check_shard_map(op, arguments(2, 9, 9, 2, 1, 4, 3), ALL, (True, True, True))


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("shape", [(0, 3, 7), (2, 0, 7), (2, 0, 0)])
def test_J7_empty(shape, lengths):
    args = arguments(*shape, 2, 1, 4, 3)
    op = functools.partial(attention, window=2, lengths=jnp.full(shape[0], 5, jnp.int32) if lengths else None)
    o, gradients = value_and_gradients(op, args, ALL)
    chex.assert_shape(o, (*shape[:2], 2, 3))
    chex.assert_trees_all_equal(gradients, tuple(jnp.zeros_like(a) for a in args))


def test_no_keys_at_all_gives_zeros():
    q, k, v = arguments(2, 3, 0, 2, 1, 4, 3)
    o, lse = attention(q, k, v, causal=False, return_lse=True)
    chex.assert_trees_all_equal(o, jnp.zeros_like(o))
    chex.assert_trees_all_equal(lse, jnp.full_like(lse, -jnp.inf))


def test_errors_name_the_argument():
    q, k, v = arguments(2, 5, 7, 4, 2, 3, 6)
    with raises(ValueError, "window must be at least 1, got 0"):
        attention(q, k, v, window=0)
    with raises(TypeError, "window must be a Python int, got float 2.0"):
        attention(q, k, v, window=2.0)
    with raises(ValueError, "window must be None unless causal, got 3"):
        attention(q, k, v, window=3, causal=False)
    with raises(ValueError, "softcap must be positive, got -1"):
        attention(q, k, v, softcap=-1)
    with raises(TypeError, "lengths must be int32, got float32"):
        attention(q, k, v, lengths=jnp.ones(2))
    with raises(ValueError, "lengths must have shape (2,) (the batch of q), got shape (3,)"):
        attention(q, k, v, lengths=jnp.ones(3, jnp.int32))
    with raises(ValueError, "query_lengths must be None unless lengths are given, got shape (2,)"):
        attention(q, k, v, query_lengths=jnp.ones(2, jnp.int32))
    with raises(ValueError, "segment_ids must have shape (2, 5) (batch and queries), got shape (2, 7)"):
        attention(q, k, v, segment_ids=jnp.ones((2, 7), jnp.int32))
    with raises(ValueError, "segment_ids must be one array or a pair for queries and keys, got 3 arrays"):
        attention(q, k, v, segment_ids=(jnp.ones((2, 5), jnp.int32),) * 3)
