"""gated_delta_rule: values and gradients against a step-by-step float64 scan, exact answers, extreme gates, and what holds for every op."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena.ops.gated_delta_rule import gated_delta_rule
from jaxarena.testing import (
    assert_close_to_oracle,
    check_against_oracle,
    check_modes,
    check_shard_map,
    check_vmap,
    gradient_launches,
    integers,
    normal,
    oracle,
    value_and_gradients,
)
from tests.ops.common import raises
from tests.ops.delta_cases import arguments, naive_outputs

ALL = (0, 1, 2, 3, 4)


def check(args, dtype=jnp.float32, *, qk_l2norm=False, terms=None, **params):
    eps = params.pop("l2norm_eps", 1e-6) if qk_l2norm else None
    op = functools.partial(gated_delta_rule, qk_l2norm=qk_l2norm, **({"l2norm_eps": eps} if qk_l2norm else {}), **params)
    expected = jax.jit(functools.partial(naive_outputs, l2norm_eps=eps, scale=params.get("scale")))
    terms = terms or args[0].shape[1] * args[0].shape[3]
    check_against_oracle(op, expected, args, ALL, dtype=dtype, terms=terms)


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 1, 1, 1), (3, 2, 1, 2, 5, 3), (1, 63, 2, 2, 7, 4), (2, 64, 1, 3, 3, 9), (1, 65, 2, 4, 8, 5), (2, 127, 1, 1, 6, 11)],
)
def test_D1_any_length(shape):
    check(arguments(shape))


@pytest.mark.parametrize(("dtype", "time"), [(jnp.float32, 128), (jnp.bfloat16, 129)])
def test_D1_normed_keys(dtype, time):
    b, h, d = 2, 3, 10
    args = arguments((b, time, h, h, d, 7), dtype)
    args[0], args[1] = normal(5, (b, time, h, d), dtype), normal(6, (b, time, h, d), dtype, scale=3.0)
    check(args, dtype, qk_l2norm=True, l2norm_eps=1e-3, scale=0.7)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_D10_all_axes_different(dtype):
    check(arguments((2, 70, 3, 6, 32, 48), dtype), dtype)


@pytest.mark.parametrize("chunk_size", [1, 6, 20, 50])
def test_the_chunk_size_changes_only_rounding(chunk_size):
    args = arguments((1, 20, 1, 2, 4, 3))
    assert_close_to_oracle(gated_delta_rule(*args, chunk_size=chunk_size), oracle(naive_outputs, *args), dtype=jnp.float32, terms=80)


def test_D2_identity_keys_store_the_values():
    eye = jnp.eye(8)[None, :, None]
    v = integers(0, (1, 8, 1, 5), -9, 10).astype(jnp.float32)
    zero, one = jnp.zeros((1, 8, 1)), jnp.ones((1, 8, 1))
    chex.assert_trees_all_equal(gated_delta_rule(eye, eye, v, zero, one, scale=1.0), v)
    # Queries in the reverse order read the whole state: a value that is not yet written reads as zero.
    reverse = gated_delta_rule(eye[:, ::-1], eye, v, zero, one, scale=1.0)
    chex.assert_trees_all_equal(reverse, jnp.where(jnp.arange(8)[:, None, None] < 4, 0.0, v[:, ::-1]))


def test_D2_the_same_key_overwrites():
    key = jnp.zeros((1, 129, 1, 6)).at[..., 2].set(1.0)
    v = integers(1, (1, 129, 1, 4), -50, 50).astype(jnp.float32)
    zero, one = jnp.zeros((1, 129, 1)), jnp.ones((1, 129, 1))
    chex.assert_trees_all_equal(gated_delta_rule(key, key, v, zero, one, scale=1.0), v)


@jax.jit
def value_and_cotangents(args, do):
    o, pull_back = jax.vjp(gated_delta_rule, *args)
    return o, pull_back(do)


@pytest.mark.parametrize("gate", [-20.0, -100.0, -1e4, -np.inf])
def test_D3_one_large_gate_forgets(gate):
    args = arguments((1, 70, 1, 2, 8, 5), gates=-1e-2)
    args[3] = args[3].at[:, 40].set(gate)
    do = normal(9, (1, 70, 2, 5)).at[:, :40].set(0.0)
    o, (dq, dk, dv, dg, dbeta) = value_and_cotangents(args, do)
    fresh, gradients = value_and_cotangents([a[:, 40:] for a in args], do[:, 40:])
    limit = 1e-4 if gate == -20.0 else 1e-6
    chex.assert_trees_all_close(o[:, 40:], fresh, atol=limit)
    chex.assert_trees_all_close(tuple(d[:, 40:] for d in (dq, dk, dv, dbeta)), (*gradients[:3], gradients[4]), atol=limit)
    if gate <= -1e4:
        chex.assert_trees_all_equal((dv[:, :40], dg[:, :41]), (jnp.zeros_like(dv[:, :40]), jnp.zeros_like(dg[:, :41])))
    chex.assert_tree_all_finite((dq, dk, dv, dg, dbeta))


def test_D3_gates_of_every_size():
    shape = (1, 67, 1, 2, 6, 5)
    run, run_naive = (jax.jit(functools.partial(value_and_gradients, op, argnums=ALL)) for op in (gated_delta_rule, naive_outputs))
    random = -np.random.default_rng(0).uniform(1, 6, (1, 67, 2))
    for gates in (0.0, -1e-4, random, -1e4, -np.inf):
        args = arguments(shape, gates=gates)
        assert_close_to_oracle(run(args), oracle(run_naive, args), dtype=jnp.float32, terms=67 * 6)


def test_D6_no_gate_is_the_ungated_rule():
    q, k, v, g, beta = arguments((1, 130, 1, 2, 6, 5), gates=0.0)

    def ungated(q, k, v, beta):
        return gated_delta_rule(q, k, v, None, beta)

    args, argnums = [q, k, v, beta], (0, 1, 2, 3)
    naive_ungated = jax.jit(lambda q, k, v, beta: naive_outputs(q, k, v, None, beta))
    check_against_oracle(ungated, naive_ungated, args, argnums, dtype=jnp.float32, terms=130 * 6)
    zeros = functools.partial(value_and_gradients, lambda q, k, v, beta, g: gated_delta_rule(q, k, v, g, beta), argnums=argnums)
    chex.assert_trees_all_equal(jax.jit(value_and_gradients, static_argnums=(0, 2))(ungated, args, argnums), jax.jit(zeros)([*args, g]))


def test_D8_l2norm_of_the_zero_vector():
    args = arguments((1, 11, 1, 1, 4, 3))
    args[0], args[1] = args[0].at[:, 9].set(0.0), args[1].at[:, 5].set(0.0)
    # The slope at zero is eps ** -0.5 = 1000, which is also the size of the gradient.
    check(args, qk_l2norm=True, l2norm_eps=1e-6)


def test_D9_the_error_does_not_grow_with_time():
    args = arguments((1, 4096, 1, 1, 16, 8), jnp.bfloat16, gates=-1e-4)
    args[4] = jnp.full_like(args[4], 0.5)
    got, expected = np.asarray(jax.jit(gated_delta_rule)(*args), np.float64), oracle(naive_outputs, *args)
    assert_close_to_oracle(got, expected, dtype=jnp.bfloat16, terms=16)
    early, late = (np.sqrt(np.mean((got - expected)[:, s] ** 2)) for s in (slice(0, 512), slice(-512, None)))
    assert late < 1.5 * early


def test_the_past_does_not_see_the_future():
    args = arguments((1, 90, 1, 2, 5, 4))
    changed = [a.at[:, 70:].multiply(0.5) for a in args]
    chex.assert_trees_all_equal(gated_delta_rule(*args)[:, :70], gated_delta_rule(*changed)[:, :70])


def test_value_heads_read_their_key_head():
    args = arguments((2, 20, 3, 6, 4, 5))
    repeated = [jnp.repeat(args[0], 2, axis=2), jnp.repeat(args[1], 2, axis=2), *args[2:]]
    chex.assert_trees_all_close(gated_delta_rule(*args), gated_delta_rule(*repeated), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 5, 1, 2, 4, 3), (2, 0, 1, 2, 4, 3)])
def test_J7_empty(shape):
    args = arguments(shape)
    o, gradients = value_and_gradients(gated_delta_rule, args, ALL)
    chex.assert_equal_shape((o, args[2]))
    chex.assert_trees_all_equal_shapes_and_dtypes(tuple(args), gradients)


def test_only_the_inputs_are_kept():
    args = arguments((1, 130, 1, 2, 6, 5))
    kept = jax.tree.leaves(jax.vjp(gated_delta_rule, *args)[1])
    assert sum(a.nbytes for a in kept) == sum(a.nbytes for a in args)
    assert gradient_launches(gated_delta_rule, args, (0, 2)) == ["gated_delta_rule_backward"]


def test_vmap_is_a_loop():
    args = [jnp.stack([a, 0.5 * a]) for a in arguments((1, 9, 1, 2, 4, 3))]
    check_vmap(jax.jit(gated_delta_rule), args, ALL, (0,) * 5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_J5_J8_modes(dtype):
    check_modes(functools.partial(gated_delta_rule, qk_l2norm=True, chunk_size=8), arguments((1, 19, 1, 2, 4, 3), dtype), ALL)


def test_J3_shard_map():
    check_shard_map(functools.partial(gated_delta_rule, chunk_size=4), arguments((2, 9, 1, 2, 4, 3)), ALL, (True,) * 5)


def test_errors_name_the_argument():
    q, k, v, g, beta = arguments((2, 5, 2, 4, 3, 6))
    with raises(TypeError, "gated_delta_rule: q must be bfloat16 or float32, got float16"):
        gated_delta_rule(q.astype(jnp.float16), k, v, g, beta)
    with raises(TypeError, "v must have the dtype of q, float32, got bfloat16"):
        gated_delta_rule(q, k, v.astype(jnp.bfloat16), g, beta)
    with raises(TypeError, "beta must be float32, got bfloat16"):
        gated_delta_rule(q, k, v, g, beta.astype(jnp.bfloat16))
    with raises(ValueError, "k must have shape (2, 5, 2, 3) (the shape of q), got shape (2, 4, 2, 3)"):
        gated_delta_rule(q, k[:, :4], v, g, beta)
    with raises(ValueError, "got 3 value heads and 2 key heads"):
        gated_delta_rule(q, k, v[:, :, :3], g, beta)
    with raises(ValueError, "g must have shape (2, 5, 4)", "got shape (2, 5, 2)"):
        gated_delta_rule(q, k, v, g[..., :2], beta)
    with raises(ValueError, "chunk_size must be at least 1, got 0"):
        gated_delta_rule(q, k, v, g, beta, chunk_size=0)
    with raises(ValueError, "scale must be finite, got nan"):
        gated_delta_rule(q, k, v, g, beta, scale=float("nan"))
    with raises(ValueError, "q must have shape (batch, time, heads, size), got shape (5, 2, 3)"):
        gated_delta_rule(q[0], k, v, g, beta)
