"""Routing: which experts are chosen and with what weights, ties, groups, bias, extreme scores, the losses and their gradients."""

from __future__ import annotations

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena.ops.moe import moe
from jaxarena.ops.route import Routing, moe_route
from jaxarena.testing import normal
from tests.ops.common import raises
from tests.ops.moe_cases import arguments, chosen_experts, jitted

DEFAULTS = Routing(top_k=1, scoring="softmax", groups=None, renormalize=True, scale=1.0)

run_route = jax.jit(moe_route, static_argnames=("routing", "biased", "rows"))


def route(logits, *bias, **options):
    """The weights and the choices for given logits, each row those of a token."""
    logits = jnp.asarray(logits, jnp.float32)
    biases = [jnp.asarray(b, jnp.float32) for b in bias]
    return run_route(jnp.eye(logits.shape[0]), logits, *biases, routing=DEFAULTS._replace(**options), biased=bool(bias), rows=8)[:2]


def test_M5_choices_are_made_in_float32():
    probability = np.array([[0.30001, 0.30002, 0.2, 0.19997]])
    assert route(np.log(probability))[1].tolist() == [[1]]
    x = jnp.ones((1, 1), jnp.bfloat16)
    assert run_route(x, jnp.asarray(np.log(probability), jnp.float32), routing=DEFAULTS, biased=False, rows=8)[1].tolist() == [[1]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [(), (np.zeros(512),)], ids=["plain", "bias"])
def test_M5_equal_experts_are_chosen_by_index(scoring, bias):
    logits = np.full((3, 512), -1.0)
    logits[1, [400, 7]] = 2.0
    logits[2] = np.where(np.arange(512) % 2, 0.0, -0.0)
    run = functools.partial(route, logits, *bias, top_k=4, scoring=scoring)
    weights, choice = run()
    assert choice.tolist() == [[0, 1, 2, 3], [7, 400, 0, 1], [0, 1, 2, 3]]
    for _ in range(19):
        chex.assert_trees_all_equal((weights, choice), run())


def test_M6_weights():
    logits = [[2.0, 1.0, 0.0, -1.0]]
    chex.assert_trees_all_close(route(logits, top_k=2, renormalize=False)[0], jnp.array([[0.6439, 0.2369]]), atol=5e-5)
    chex.assert_trees_all_close(route(logits, top_k=2)[0], jnp.array([[0.7311, 0.2689]]), atol=5e-5)
    sigmoid = 1 / (1 + np.exp([[-2.0, -1.0]]))
    run = functools.partial(route, logits, top_k=2, scoring="sigmoid")
    chex.assert_trees_all_close(run(renormalize=False, scale=2.5)[0], jnp.asarray(2.5 * sigmoid, jnp.float32), rtol=1e-6)
    chex.assert_trees_all_close(run(scale=2.5)[0], jnp.asarray(2.5 * sigmoid / sigmoid.sum(), jnp.float32), rtol=1e-6)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_M6_one_renormalised_choice_has_weight_scale_and_trains_no_router(scoring):
    x, router, *weights = arguments((20,), 6, 4, 5)
    run = jitted(moe, top_k=1, scoring=scoring, scale=2.3)
    drouter = jax.grad(lambda router: jnp.sum(run(x, router, *weights).y))(router)
    chex.assert_trees_all_equal(drouter, jnp.zeros_like(drouter))
    chex.assert_trees_all_equal(route(x @ router, scoring=scoring, scale=2.3)[0], jnp.full((20, 1), 2.3))


@pytest.mark.parametrize(("scoring", "value"), [("softmax", -1e4), ("sigmoid", -200.0), ("sigmoid", 200.0), ("softmax", 1e4)])
def test_M7_extreme_equal_scores_share_the_weight(scoring, value):
    logits = np.stack([np.full(6, value), np.array([0.5, -0.5, 0.1, 0.0, 1.0, -1.0])])
    weights, choice = route(logits, top_k=4, scoring=scoring)
    chex.assert_trees_all_equal(weights[0], jnp.full(4, 0.25))
    assert choice[0].tolist() == [0, 1, 2, 3]
    alone = route(logits[1:], top_k=4, scoring=scoring)
    chex.assert_trees_all_equal((weights[1:], choice[1:]), alone)


def test_M7_scores_that_underflow_are_ranked_by_their_logits():
    logits = [[-300.0, -200.0, 0.0, -200.5], [-200.0, -300.0, -201.0, -250.0]]
    for scoring in ("softmax", "sigmoid"):
        weights, choice = route(logits, top_k=2, scoring=scoring)
        assert choice.tolist() == [[2, 1], [0, 2]]
        ratio = jax.nn.sigmoid(jnp.array([1.0, -1.0]))
        chex.assert_trees_all_close(weights, jnp.stack([jnp.array([1.0, 0.0]), ratio]), rtol=1e-6)


@pytest.mark.parametrize(("scoring", "value"), [("softmax", -1e4), ("sigmoid", -200.0)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_M7_gradients_of_extreme_scores_are_finite(scoring, value, renormalize):
    x, router, *weights = arguments((9,), 6, 4, 5)
    router = router.at[0].set(value)
    x = x.at[:, 0].set(1.0)

    def loss(x, router):
        result = moe(x, router, *weights, top_k=2, scoring=scoring, renormalize=renormalize)
        return jnp.sum(result.y) + result.balance_loss + 1e-4 * result.z_loss

    chex.assert_tree_all_finite(jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, router))


def test_the_bias_moves_the_choice_and_not_the_weights():
    logits = np.log([[0.5, 0.3, 0.15, 0.05]])
    weights, choice = route(logits, [0.0, 0.0, 0.0, 1.0], top_k=2, renormalize=False)
    assert choice.tolist() == [[3, 0]]
    chex.assert_trees_all_close(weights, jnp.array([[0.05, 0.5]]), rtol=1e-6)
    args = arguments((15,), 6, 4, 5)
    dbias = jax.grad(lambda bias: sum(jnp.sum(a) for a in moe(*args, top_k=2, bias=bias)))(normal(0, (4,)))
    chex.assert_trees_all_equal(dbias, jnp.zeros(4))


def test_groups_are_ranked_by_their_best_or_their_two_best():
    scores = np.array([[0.6, 0.1, 0.05, 0.5, 0.45, 0.01]])  # group 0 holds the best expert, group 1 the best pair
    logits = np.log(scores / (1 - scores))
    assert route(logits, top_k=2, scoring="sigmoid", groups=(2, 1))[1].tolist() == [[3, 4]]
    assert route(logits, top_k=2, scoring="softmax", groups=(2, 1))[1].tolist() == [[0, 1]]
    # With a bias the sum of two decides for softmax too: 0.3 + 0.25 against 0.4 + 0.02.
    logits = np.log([[0.4, 0.02, 0.01, 0.3, 0.25, 0.02]])
    assert route(logits, np.zeros(6), top_k=2, groups=(2, 1))[1].tolist() == [[3, 4]]
    # Equal groups: the lower index.
    assert route(np.zeros((1, 6)), top_k=2, groups=(3, 1))[1].tolist() == [[0, 1]]
    # A group of one expert has one score.
    assert route([[0.0, 3.0, 1.0, 2.0]], top_k=2, scoring="sigmoid", groups=(4, 2))[1].tolist() == [[1, 3]]


@hypothesis.given(
    seed=st.integers(0, 10**6),
    scoring=st.sampled_from(["softmax", "sigmoid"]),
    groups=st.sampled_from([None, (4, 2), (6, 3)]),
    biased=st.booleans(),
)
def test_choices_are_those_of_a_full_sort(seed, scoring, groups, biased):
    random = np.random.default_rng(seed)
    logits = random.normal(size=(17, 12)) * 2
    bias = random.normal(size=12) * 0.2 if biased else None
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True) if scoring == "softmax" else 1 / (1 + np.exp(-logits))
    _, choice = route(logits, *([] if bias is None else [bias]), top_k=3, scoring=scoring, groups=groups)
    expected = np.asarray(chosen_experts(jnp.asarray(scores), top_k=3, scoring=scoring, bias=bias, groups=groups))
    got = np.zeros_like(expected)
    np.put_along_axis(got, np.asarray(choice), True, axis=1)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_losses_of_a_uniform_router(scoring):
    x, router, *weights = arguments((30,), 8, 6, 5)
    result = moe(x, jnp.zeros_like(router), *weights, top_k=2, scoring=scoring)
    chex.assert_trees_all_close(result.balance_loss, jnp.float32(1.0), rtol=1e-6)
    chex.assert_trees_all_close(result.z_loss, jnp.float32(np.log(6) ** 2), rtol=1e-6)
    chex.assert_trees_all_equal(result.load, jnp.array([0.5, 0.5, 0.0, 0.0, 0.0, 0.0]))


def test_load_has_no_gradient():
    x, router, *weights = arguments((30,), 8, 6, 5)
    dx = jax.grad(lambda x: jnp.sum(moe(x, router, *weights, top_k=2).load * jnp.arange(6)))(x)
    chex.assert_trees_all_equal(dx, jnp.zeros_like(x))


def test_errors_name_the_option():
    call = functools.partial(moe, *arguments((5,), 8, 6, 4))
    with raises(ValueError, "moe: top_k must be at most the number of experts, 6, got 7"):
        call(top_k=7)
    with raises(ValueError, "moe: top_k must be at least 1, got 0"):
        call(top_k=0)
    with raises(ValueError, "moe: renormalize must be one of True, False, got None"):
        call(top_k=2, renormalize=None)
    with raises(ValueError, "moe: scoring must be one of 'softmax', 'sigmoid', got 'relu'"):
        call(top_k=2, scoring="relu")
    with raises(ValueError, "moe: scale must be positive, got 0"):
        call(top_k=2, scale=0)
    with raises(TypeError, "moe: groups must be a tuple (n_groups, groups_per_token) or None, got 3"):
        call(top_k=2, groups=3)
    with raises(ValueError, "moe: groups[0] must divide the number of experts, 6, got 4"):
        call(top_k=2, groups=(4, 2))
    with raises(ValueError, "moe: groups[1] must be at most groups[0] = 3, got 4"):
        call(top_k=2, groups=(3, 4))
    with raises(ValueError, "moe: top_k must be at most the 2 experts of the groups open to a token (groups=(3, 1)), got 3"):
        call(top_k=3, groups=(3, 1))
