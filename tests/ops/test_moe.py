"""moe: values and gradients against every token through every expert in float64, routing rules, exact answers, what any op does."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena.ops.moe import SharedExpert, moe, moe_route
from jaxarena.testing import unit_roundoff
from tests.ops.common import (
    DTYPES,
    check_against_oracle,
    check_modes,
    check_shard_map,
    check_vmap,
    gradient_launches,
    normal,
    raises,
    value_and_gradients,
)

ALL = (0, 1, 2, 3)


def swiglu(x, gate_up, down):
    gate, up = jnp.split(x @ gate_up, 2, axis=-1)
    return (gate * jax.nn.sigmoid(gate) * up) @ down


def naive(x, router, gate_up, down, *shared, top_k, renormalize=True):
    """Every token through every expert, weighted by zero where it was not chosen."""
    tokens = x.reshape(-1, x.shape[-1])
    probability = jax.nn.softmax(tokens @ router, axis=-1)
    chosen = jnp.argsort(jnp.argsort(-probability, axis=-1, stable=True), axis=-1) < top_k
    weights = jnp.where(chosen, probability, 0.0)
    if renormalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    y = jnp.einsum("ne,end->nd", weights, jax.vmap(swiglu, in_axes=(None, 0, 0))(tokens, gate_up, down))
    if shared:
        shared_gate_up, shared_down, gate = shared
        y = y + jax.nn.sigmoid(tokens @ gate) * swiglu(tokens, shared_gate_up, shared_down)
    share = jnp.mean(chosen, axis=0, dtype=probability.dtype) / top_k
    return y.reshape(x.shape), router.shape[1] * jnp.sum(share * jnp.mean(probability, axis=0))


def with_shared(x, router, gate_up, down, *shared, **params):
    return moe(x, router, gate_up, down, shared=SharedExpert(*shared), **params)


def jitted(function, **params):
    """One compilation for the whole function: its operations one by one take several times as long."""
    return jax.jit(functools.partial(function, **params))


def arguments(lead, d, experts, f, dtype=jnp.float32, router_dtype=None):
    return [
        normal(0, (*lead, d), dtype),
        normal(1, (d, experts), router_dtype or dtype, scale=d**-0.5),
        normal(2, (experts, d, 2 * f), dtype, scale=d**-0.5),
        normal(3, (experts, f, d), dtype, scale=f**-0.5),
    ]


def shared_arguments(d, s, dtype=jnp.float32):
    return [normal(4, (d, 2 * s), dtype, scale=d**-0.5), normal(5, (s, d), dtype, scale=s**-0.5), normal(6, (d, 1), dtype, scale=d**-0.5)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lead", "d", "experts", "f", "params"),
    [
        ((3, 37), 24, 11, 20, {"top_k": 3}),
        ((65,), 9, 4, 5, {"top_k": 2, "renormalize": False}),
        ((1, 1), 5, 3, 7, {"top_k": 1, "renormalize": False}),
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
def test_with_a_shared_expert_and_a_float32_router(dtype):
    args = [*arguments((2, 33), 12, 6, 10, dtype, jnp.float32), *shared_arguments(12, 7, dtype)]
    params = {"top_k": 2}
    check_against_oracle(jitted(with_shared, **params), jitted(naive, **params), args, tuple(range(7)), dtype=dtype, terms=66, stages=4)


@pytest.mark.parametrize("top_k", [1, 2])
def test_M3_every_token_to_the_same_experts(top_k):
    x, router, gate_up, down = arguments((257,), 10, 8, 6)
    x = x.at[:, 0].set(1.0)
    router = router.at[0].set(0.0).at[0, 3].set(50.0).at[0, 5].set(40.0)
    (y, balance), (_, _, dgate_up, ddown) = value_and_gradients(jitted(moe, top_k=top_k), [x, router, gate_up, down], ALL)
    # The second expert's share of the weight is about exp(-10): it is computed all the same.
    expected, _ = jitted(naive, top_k=top_k)(x, router, gate_up, down)
    chex.assert_trees_all_close(y, expected, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(balance, jnp.float32(8 / top_k), rtol=0.05)
    for e in range(8):
        untouched = bool(jnp.all(dgate_up[e] == 0) & jnp.all(ddown[e] == 0))
        assert untouched is (e not in (3, 5)[:top_k])


def route(logits, top_k, renormalize=True):
    """The router's weights and choices for given logits, each a float32 row."""
    logits = jnp.asarray(logits, jnp.float32)
    return moe_route(jnp.eye(logits.shape[0]), logits, top_k=top_k, renormalize=renormalize)[:2]


def test_M5_choices_are_made_in_float32():
    probability = np.array([[0.30001, 0.30002, 0.2, 0.19997]])
    _, choice = route(np.log(probability), 1)
    assert choice.tolist() == [[1]]
    _, choice, _ = moe_route(jnp.ones((1, 1), jnp.bfloat16), jnp.asarray(np.log(probability), jnp.float32), top_k=1, renormalize=True)
    assert choice.tolist() == [[1]]


def test_M5_equal_experts_are_chosen_by_index():
    logits = np.full((3, 512), -1.0)
    logits[1, [400, 7]] = 2.0
    logits[2] = np.where(np.arange(512) % 2, 0.0, -0.0)
    run = functools.partial(route, logits, 4)
    weights, choice = run()
    assert choice.tolist() == [[0, 1, 2, 3], [7, 400, 0, 1], [0, 1, 2, 3]]
    for _ in range(19):
        chex.assert_trees_all_equal((weights, choice), run())


def test_M6_weights():
    logits = [[2.0, 1.0, 0.0, -1.0]]
    chex.assert_trees_all_close(route(logits, 2, False)[0], jnp.array([[0.6439, 0.2369]]), atol=5e-5)
    chex.assert_trees_all_close(route(logits, 2, True)[0], jnp.array([[0.7311, 0.2689]]), atol=5e-5)


def test_M6_one_renormalised_choice_has_weight_one_and_trains_no_router():
    args = arguments((20,), 6, 4, 5)
    chex.assert_trees_all_equal(moe_route(*args[:2], top_k=1, renormalize=True)[0], jnp.ones((20, 1)))
    drouter = jax.grad(lambda router: jnp.sum(moe(args[0], router, *args[2:], top_k=1)[0]))(args[1])
    chex.assert_trees_all_equal(drouter, jnp.zeros_like(drouter))


def test_M7_tiny_scores_share_the_weight():
    chex.assert_trees_all_equal(route(np.full((2, 6), -1e4), 4)[0], jnp.full((2, 4), 0.25))


def test_M9_equal_experts_are_one_dense_network():
    x, router, gate_up, down = arguments((300,), 16, 8, 12, jnp.bfloat16)
    gate_up, down = (jnp.broadcast_to(w[:1], w.shape) for w in (gate_up, down))
    run = jax.jit(lambda *args: value_and_gradients(functools.partial(moe, top_k=4), args, ALL))
    result = run(x, router, gate_up, down)
    dense = swiglu(*(a.astype(jnp.float32) for a in (x, gate_up[0], down[0])))
    # Hidden rows and results round on their way to the sum of the choices, which rounds once more.
    limit = 4 * unit_roundoff(jnp.bfloat16) * float(jnp.max(jnp.abs(dense)))
    chex.assert_trees_all_close(result[0][0].astype(jnp.float32), dense, rtol=0, atol=limit)
    for _ in range(19):
        chex.assert_trees_all_equal(result, run(x, router, gate_up, down))


def test_permuting_experts_changes_nothing():
    x, router, gate_up, down = arguments((40,), 8, 6, 5)
    order = np.random.default_rng(0).permutation(6)
    run = jitted(moe, top_k=2)
    chex.assert_trees_all_close(run(x, router[:, order], gate_up[order], down[order]), run(x, router, gate_up, down), rtol=1e-5, atol=1e-5)


def test_balance_loss_of_a_uniform_router_is_one():
    x, router, gate_up, down = arguments((30,), 8, 6, 5)
    _, balance = moe(x, jnp.zeros_like(router), gate_up, down, top_k=2)
    chex.assert_trees_all_close(balance, jnp.float32(1.0), rtol=1e-6)


def test_nan_stays_in_its_token():
    args = arguments((40,), 8, 6, 5)
    run = jitted(moe, top_k=2)
    clean, _ = run(*args)
    spoiled, _ = run(args[0].at[7].set(jnp.nan), *args[1:])
    keep = jnp.arange(40) != 7
    chex.assert_trees_all_close(spoiled[keep], clean[keep], rtol=1e-6, atol=1e-6)
    assert bool(jnp.all(jnp.isnan(spoiled[7])))


@pytest.mark.parametrize("lead", [(0,), (2, 0)])
def test_J7_no_tokens(lead):
    args = arguments(lead, 8, 6, 5)
    (y, balance), gradients = value_and_gradients(jitted(moe, top_k=2), args, ALL)
    chex.assert_shape(y, (*lead, 8))
    chex.assert_trees_all_equal(balance, jnp.float32(0.0))
    chex.assert_trees_all_equal(gradients, tuple(jnp.zeros_like(a) for a in args))


def test_frozen_weights_cost_no_launch():
    args = [*arguments((9,), 8, 6, 5), *shared_arguments(8, 3)]
    op = functools.partial(with_shared, top_k=2)
    weights = {"moe_drouter": 1, "moe_dgate_up": 2, "moe_ddown": 3}
    every = gradient_launches(op, args, tuple(range(7)))
    assert weights.keys() <= set(every)
    frozen = gradient_launches(op, args, (0,))
    assert "moe_dx" in frozen and not weights.keys() & set(frozen) and "project_dweight" not in frozen
    for name, number in weights.items():
        assert weights.keys() & set(gradient_launches(op, args, (number,))) == {name}
        assert "moe_dx" not in gradient_launches(op, args, (number,))


def test_vmap_is_a_loop():
    args = arguments((3, 12), 8, 6, 5)
    check_vmap(jitted(moe, top_k=2), args, ALL, (0, None, None, None))


@pytest.mark.parametrize("dtype", DTYPES)
def test_J5_J8_modes(dtype):
    args = [*arguments((21,), 8, 6, 5, dtype), *shared_arguments(8, 3, dtype)]
    check_modes(functools.partial(with_shared, top_k=2), args, tuple(range(7)))


def test_J3_shard_map():
    args = [*arguments((21,), 8, 6, 5), *shared_arguments(8, 3)]

    def op(*args):
        return with_shared(*args, top_k=2)[0]

    check_shard_map(op, args, tuple(range(7)), (True, *(False,) * 6))


def test_errors_name_the_argument():
    x, router, gate_up, down = arguments((5,), 8, 6, 4)
    shared = SharedExpert(*shared_arguments(8, 3))
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
    with raises(ValueError, "moe: top_k must be at most the number of experts, 6, got 7"):
        moe(x, router, gate_up, down, top_k=7)
    with raises(ValueError, "moe: top_k must be at least 1, got 0"):
        moe(x, router, gate_up, down, top_k=0)
    with raises(ValueError, "moe: renormalize must be one of True, False, got None"):
        moe(x, router, gate_up, down, top_k=2, renormalize=None)
    with raises(ValueError, "moe: shared.gate must have shape (8, 1)", "got shape (8, 2)"):
        moe(x, router, gate_up, down, top_k=2, shared=shared._replace(gate=jnp.ones((8, 2))))
