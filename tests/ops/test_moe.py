"""moe: values and gradients against every token through every expert in float64, exact answers, what any op does."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxarena as ja
from jaxarena.ops.moe import SharedExpert, moe
from jaxarena.testing import (
    assert_step_repeatable,
    check_against_oracle,
    check_modes,
    check_shard_map,
    check_vmap,
    gradient_launches,
    live_launches,
    unit_roundoff,
    value_and_gradients,
)
from tests.ops.common import DTYPES, raises
from tests.ops.moe_cases import ALL, all_arguments, arguments, jitted, naive, of_arrays, swiglu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lead", "d", "experts", "f", "params"),
    [
        ((3, 37), 24, 11, 20, {"top_k": 3}),
        ((65,), 9, 4, 5, {"top_k": 2, "renormalize": False}),
        ((1, 1), 5, 3, 7, {"top_k": 1, "renormalize": False, "scale": 2.5}),
        ((41,), 10, 6, 7, {"top_k": 3, "scoring": "sigmoid", "scale": 2.5}),
        ((5, 7), 8, 12, 3, {"top_k": 4, "scoring": "sigmoid", "renormalize": False, "groups": (4, 2)}),
        ((43,), 7, 10, 6, {"top_k": 2, "groups": (5, 3)}),
    ],
)
def test_matches_the_oracle(lead, d, experts, f, params, dtype):
    check_against_oracle(
        jitted(moe, **params),
        jitted(naive, **params),
        arguments(lead, d, experts, f, dtype),
        ALL,
        dtype=dtype,
        terms=max(int(np.prod(lead)), d),
        stages=4,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("gated", "params"),
    [
        (True, {"top_k": 2}),
        (False, {"top_k": 3, "scoring": "sigmoid", "groups": (3, 2), "scale": 1.5}),
    ],
)
def test_with_shared_expert_residual_bias_and_a_float32_router(gated, params, dtype):
    args = all_arguments((2, 33), 12, 6, 10, 7, dtype, jnp.float32, gated=gated)
    run, oracle = (jitted(of_arrays(function), **params) for function in (moe, naive))
    differentiable = [number for number in range(len(args)) if number != 5]  # the bias has no gradient
    check_against_oracle(run, oracle, args, differentiable, dtype=dtype, terms=66, stages=4)


@pytest.mark.parametrize("top_k", [1, 2])
def test_M3_every_token_to_the_same_experts(top_k):
    x, router, gate_up, down = arguments((257,), 10, 8, 6)
    x = x.at[:, 0].set(1.0)
    router = router.at[0].set(0.0).at[0, 3].set(50.0).at[0, 5].set(40.0)
    result, (_, _, dgate_up, ddown) = value_and_gradients(jitted(moe, top_k=top_k), [x, router, gate_up, down], ALL)
    # The second expert's share of the weight is about exp(-10): it is computed all the same.
    expected = jitted(naive, top_k=top_k)(x, router, gate_up, down)
    chex.assert_trees_all_close(result, expected, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(result.balance_loss, jnp.float32(8 / top_k), rtol=0.05)
    chex.assert_trees_all_close(result.load, jnp.zeros(8).at[jnp.array([3, 5][:top_k])].set(1 / top_k))
    for e in range(8):
        untouched = bool(jnp.all(dgate_up[e] == 0) & jnp.all(ddown[e] == 0))
        assert untouched is (e not in (3, 5)[:top_k])


def test_M9_equal_experts_are_one_dense_network():
    x, router, gate_up, down = arguments((300,), 16, 8, 12, jnp.bfloat16)
    gate_up, down = (jnp.broadcast_to(w[:1], w.shape) for w in (gate_up, down))
    run = jax.jit(lambda *args: value_and_gradients(functools.partial(moe, top_k=4), args, ALL))
    result = run(x, router, gate_up, down)
    dense = swiglu(*(a.astype(jnp.float32) for a in (x, gate_up[0], down[0])))
    # Activated rows round on their way, and the sum once more.
    limit = 4 * unit_roundoff(jnp.bfloat16) * float(jnp.max(jnp.abs(dense)))
    chex.assert_trees_all_close(result[0].y.astype(jnp.float32), dense, rtol=0, atol=limit)
    for _ in range(19):
        chex.assert_trees_all_equal(result, run(x, router, gate_up, down))


def ragged_layer(x, router, gate_up, down):
    """Every token through its best expert, by ``lax.ragged_dot``."""
    choice = jnp.argmax(x @ router, axis=-1)
    order = jnp.argsort(choice, stable=True)
    sizes = jnp.bincount(choice, length=router.shape[1]).astype(jnp.int32)
    gate, up = jnp.split(lax.ragged_dot(x[order], gate_up, sizes), 2, axis=-1)
    return lax.ragged_dot(jax.nn.silu(gate) * up, down, sizes)[jnp.argsort(order)]


@pytest.mark.parametrize("tokens", [1, 3, 9, 33, 63, 99])
def test_M10_tails_are_those_of_ragged_dot(tokens):
    args = arguments((tokens,), 48, 5, 24)
    run = jax.jit(lambda *args: (moe(*args, top_k=1).y, ragged_layer(*args)))
    y, expected = run(*args)
    chex.assert_trees_all_close(y, expected, rtol=0, atol=1e-5 * float(jnp.max(jnp.abs(expected))))


def test_permuting_experts_changes_nothing():
    x, router, gate_up, down = arguments((40,), 8, 6, 5)
    order = np.random.default_rng(0).permutation(6)
    run = jitted(moe, top_k=2)
    result, permuted = run(x, router, gate_up, down), run(x, router[:, order], gate_up[order], down[order])
    expected = result._replace(load=result.load[order])
    chex.assert_trees_all_close(permuted, expected, rtol=1e-5, atol=1e-5)


def test_nan_stays_in_its_token():
    args = arguments((40,), 8, 6, 5)
    run = jitted(moe, top_k=2)
    clean, spoiled = run(*args).y, run(args[0].at[7].set(jnp.nan), *args[1:]).y
    keep = jnp.arange(40) != 7
    chex.assert_trees_all_close(spoiled[keep], clean[keep], rtol=1e-6, atol=1e-6)
    assert bool(jnp.all(jnp.isnan(spoiled[7])))


@pytest.mark.parametrize("lead", [(0,), (2, 0)])
def test_J7_no_tokens(lead):
    args = all_arguments(lead, 8, 6, 5, 3)
    result, gradients = value_and_gradients(jitted(of_arrays(moe), top_k=2), args, range(len(args)))
    chex.assert_shape(result.y, (*lead, 8))
    chex.assert_trees_all_equal(result[1:], (jnp.float32(0.0), jnp.float32(0.0), jnp.zeros(6)))
    chex.assert_trees_all_equal(gradients, jax.tree.map(jnp.zeros_like, tuple(args)))


def test_frozen_weights_cost_no_launch():
    args, op = all_arguments((9,), 8, 6, 5, 3), functools.partial(of_arrays(moe), top_k=2)
    weights = {
        "moe_drouter": 1,
        "moe_dgate_up": 2,
        "moe_ddown": 3,
        "shared_expert_dgate_up": 6,
        "shared_expert_ddown": 7,
        "shared_expert_dgate": 8,
    }
    assert weights.keys() <= set(gradient_launches(op, args, tuple(range(9))))
    frozen = gradient_launches(op, args, (0,))
    assert "moe_dx" in frozen and not weights.keys() & set(frozen)
    for name, number in weights.items():
        launches = set(gradient_launches(op, args, (number,)))
        assert weights.keys() & launches == {name} and "moe_dx" not in launches


def test_the_forward_pass_is_two_launches():
    assert live_launches(functools.partial(of_arrays(moe), top_k=2), *all_arguments((9,), 8, 6, 5, 3)) == ["moe_route", "moe_experts"]


def test_J3_vmap_is_a_loop():
    args = arguments((3, 12), 8, 6, 5)
    check_vmap(jitted(moe, top_k=2, scoring="sigmoid", groups=(3, 2)), args, ALL, (0, None, None, None))


@pytest.mark.parametrize(("dtype", "params"), [(jnp.float32, {}), (jnp.bfloat16, {"scoring": "sigmoid", "groups": (3, 2), "scale": 2.0})])
def test_J5_J8_modes(dtype, params):
    args = all_arguments((21,), 8, 6, 5, 3, dtype)
    check_modes(functools.partial(of_arrays(moe), top_k=2, **params), args, tuple(range(9)))


def test_J3_shard_map():
    def op(*args):
        return of_arrays(moe)(*args, top_k=2).y

    check_shard_map(op, all_arguments((21,), 8, 6, 5, 3), tuple(range(9)), (True, *(False,) * 3, True, *(False,) * 4))


def test_P4_in_a_planned_step():
    args = all_arguments((5, 7), 12, 6, 10, 7)
    params = {"top_k": 3, "scoring": "sigmoid", "groups": (3, 2), "renormalize": False}

    def step(*args):
        return value_and_gradients(functools.partial(of_arrays(moe), **params), args, range(len(args)))

    plan = assert_step_repeatable(step, *args)
    planned, _ = ja.jit(step)(plan.allocate(255), *args)
    chex.assert_trees_all_close(planned, jax.jit(step)(*args), rtol=1e-4, atol=1e-5)


def test_errors_name_the_argument():
    x, router, gate_up, down = arguments((5,), 8, 6, 4)
    shared = SharedExpert(*all_arguments((5,), 8, 6, 4, 3)[6:])
    call = functools.partial(moe, x, router, gate_up, down)
    with raises(TypeError, "moe: x must be bfloat16 or float32, got float16"):
        moe(x.astype(jnp.float16), router, gate_up, down, top_k=2)
    with raises(TypeError, "moe: router must have the dtype of x, float32, got bfloat16"):
        moe(x, router.astype(jnp.bfloat16), gate_up, down, top_k=2)
    with raises(TypeError, "moe: down must have the dtype of x, float32, got bfloat16"):
        moe(x, router, gate_up, down.astype(jnp.bfloat16), top_k=2)
    with raises(ValueError, "moe: router must have shape (8, 6)", "got shape (7, 6)"):
        moe(x, router[:7], gate_up, down, top_k=2)
    with raises(ValueError, "moe: gate_up must have shape (6, 8, 8)", "got shape (6, 8, 7)"):
        moe(x, router, gate_up[..., :7], down, top_k=2)
    with raises(ValueError, "moe: down must have shape (6, 4, 8)", "got shape (5, 4, 8)"):
        moe(x, router, gate_up, down[:5], top_k=2)
    with raises(ValueError, "moe: shared.gate must have shape (8, 1)", "got shape (8, 2)"):
        call(top_k=2, shared=shared._replace(gate=jnp.ones((8, 2))))
    with raises(TypeError, "moe: shared.down must have the dtype of x, float32, got bfloat16"):
        call(top_k=2, shared=shared._replace(down=shared.down.astype(jnp.bfloat16)))
    with raises(ValueError, "moe: residual must have shape (5, 8)", "got shape (4, 8)"):
        call(top_k=2, residual=x[:4])
    with raises(TypeError, "moe: residual must have the dtype of x, float32, got bfloat16"):
        call(top_k=2, residual=x.astype(jnp.bfloat16))
    with raises(TypeError, "moe: bias must be float32, got bfloat16"):
        call(top_k=2, bias=jnp.zeros(6, jnp.bfloat16))
    with raises(ValueError, "moe: bias must have shape (6,)", "got shape (5,)"):
        call(top_k=2, bias=jnp.zeros(5))
