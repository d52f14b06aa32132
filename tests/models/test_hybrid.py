"""The hybrid model: its configuration, its shapes, and the demo's train step planned beside plain ``jax.jit``."""

from __future__ import annotations

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxarena as ja
from jaxarena.models import hybrid
from jaxarena.testing import tolerance

SMALL = {
    "width": 64,
    "heads": 2,
    "kv_heads": 1,
    "delta_key_heads": 1,
    "delta_value_heads": 2,
    "experts": 4,
    "expert_width": 32,
    "shared_width": 32,
}


def train_step_of(config: hybrid.HybridConfig) -> tuple[Any, Any]:
    optimizer = optax.adamw(1e-3)

    def train_step(params: Any, opt_state: Any, tokens: Any) -> Any:
        (_, parts), gradients = jax.value_and_grad(hybrid.loss, has_aux=True)(params, tokens[:, :-1], tokens[:, 1:], config)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, parts["cross_entropy"], gradients

    return optimizer, train_step


@functools.cache
def state_of(config: hybrid.HybridConfig, length: int = 45) -> tuple[Any, Any, jax.Array]:
    params = hybrid.init(jax.random.key(0), config)
    tokens = jax.random.randint(jax.random.key(1), (2, length + 1), 0, config.vocabulary)
    return params, train_step_of(config)[0].init(params), tokens


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_P4_train_step_has_the_same_bits_whatever_the_arena_held(dtype: str) -> None:
    config = hybrid.HybridConfig(dtype=dtype, **SMALL)
    _, train_step = train_step_of(config)
    state = state_of(config)
    step = ja.jit(train_step)
    plan = step.plan(*state)
    plan.verify()
    zeros, arena = step(plan.allocate(0), *state)
    again, _ = step(arena, *state)
    poisoned, _ = step(plan.allocate(255), *state)
    apart = ja.jit(train_step, reuse=False)
    without_reuse, _ = apart(apart.plan(*state).allocate(255), *state)
    for other in (again, poisoned, without_reuse):
        chex.assert_trees_all_equal(zeros, other, strict=True)
    assert apart.plan(*state).bytes > plan.bytes


@functools.cache
def loss_and_gradients_of(config: hybrid.HybridConfig) -> Any:
    def loss_and_gradients(params: Any, tokens: Any) -> Any:
        return jax.value_and_grad(lambda p: hybrid.loss(p, tokens[:, :-1], tokens[:, 1:], config)[0])(params)

    return loss_and_gradients


@functools.cache
def exact_run(config: hybrid.HybridConfig) -> tuple[ja.Plan, Any]:
    """The plan of the loss and its gradients, and what they are in a poisoned arena."""
    params, _, tokens = state_of(config)
    step = ja.jit(loss_and_gradients_of(config))
    plan = step.plan(params, tokens)
    return plan, step(plan.allocate(255), params, tokens)[0]


# Every expert is chosen: a choice is not continuous, and a rounding that turns one changes its token's gradient at will.
CONTINUOUS = SMALL | {"experts_per_token": SMALL["experts"]}


def test_losses_and_gradients_are_those_of_plain_jit_in_float32() -> None:
    config = hybrid.HybridConfig(**CONTINUOUS)
    function = loss_and_gradients_of(config)
    params, _, tokens = state_of(config)
    _, (loss, gradients) = exact_run(config)
    plain_loss, plain_gradients = jax.jit(function)(params, tokens)
    # XLA fuses the two programs differently: a value passes some 16 launches a layer, whose roundings add up as a root.
    limit = tolerance(jnp.float32, config.width, stages=round((16 * config.layers) ** 0.5))
    chex.assert_trees_all_close(loss, plain_loss, rtol=limit)
    for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(plain_gradients), strict=True):
        chex.assert_trees_all_close(ours, theirs, rtol=0, atol=limit * float(jnp.abs(theirs).max()))


@pytest.mark.slow
def test_losses_and_gradients_in_bfloat16_are_as_near_to_float32_as_those_of_plain_jit() -> None:
    config = hybrid.HybridConfig(dtype="bfloat16", **CONTINUOUS)
    function = loss_and_gradients_of(config)
    params, _, tokens = state_of(config)
    _, (loss, gradients) = exact_run(config)
    plain_loss, plain_gradients = jax.jit(function)(params, tokens)
    exact_loss, exact_gradients = jax.jit(loss_and_gradients_of(hybrid.HybridConfig(**CONTINUOUS)))(params, tokens)
    limit = tolerance(jnp.bfloat16, config.width, stages=round((16 * config.layers) ** 0.5))
    chex.assert_trees_all_close(loss, plain_loss, rtol=limit)
    chex.assert_trees_all_close(loss, exact_loss, rtol=limit)
    # How much eight untrained layers amplify a rounding is no property of the dtype: plain bfloat16's own distance from float32 tells.
    for (path, ours), theirs, exact in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(plain_gradients), jax.tree.leaves(exact_gradients), strict=True
    ):
        distance, plain_distance = float(jnp.linalg.norm((ours - exact).ravel())), float(jnp.linalg.norm((theirs - exact).ravel()))
        assert distance <= 1.5 * plain_distance + limit * float(jnp.linalg.norm(exact.ravel())), jax.tree_util.keystr(path)


def test_P7_train_step_holds_no_copy_of_the_arena() -> None:
    config = hybrid.HybridConfig(**SMALL)
    state = state_of(config)
    step = ja.jit(lambda *state: train_step_of(config)[1](*state)[:3], donate_argnums=(0, 1))
    plan = step.plan(*state)
    memory = step.lower(plan.allocate(), *state).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= plan.bytes
    assert memory.temp_size_in_bytes < plan.bytes


def test_fifty_steps_trace_and_compile_once_and_learn() -> None:
    config = hybrid.HybridConfig(layers=4, **SMALL)
    _, train_step = train_step_of(config)
    step = ja.jit(chex.assert_max_traces(lambda *state: train_step(*state)[:3], n=1), donate_argnums=(0, 1))
    params, opt_state, tokens = jax.tree.map(jnp.copy, state_of(config))
    arena = step.plan(params, opt_state, tokens).allocate()
    losses = []
    for _ in range(50):
        (params, opt_state, loss), arena = step(arena, params, opt_state, tokens)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 1


def test_planning_does_not_grow_with_depth() -> None:
    plans = []
    for layers in (8, 48):
        config = hybrid.HybridConfig(layers=layers)
        optimizer, train_step = train_step_of(config)
        params = jax.eval_shape(lambda config=config: hybrid.init(jax.random.key(0), config))
        tokens = jax.ShapeDtypeStruct((2, 257), jnp.int32)
        plans.append(ja.jit(lambda *s, f=train_step: f(*s)[:3]).plan(params, jax.eval_shape(optimizer.init, params), tokens))
    few, many = plans
    assert len(few.launches) == len(many.launches)
    assert len(few.form.tensors) == len(many.form.tensors)
    assert 5 * few.bytes < many.bytes < 6.5 * few.bytes
    assert many.ratio < 1.05


def test_heads_tied_and_untied() -> None:
    shapes = {
        tied: jax.eval_shape(lambda tied=tied: hybrid.init(jax.random.key(0), hybrid.HybridConfig(tied=tied))) for tied in (True, False)
    }
    assert "head" not in shapes[True]
    chex.assert_shape(shapes[False]["head"], (256, 128))
    assert hybrid.parameter_count(shapes[False]) - hybrid.parameter_count(shapes[True]) == 256 * 128


def test_the_future_does_not_leak_into_the_past() -> None:
    config = hybrid.HybridConfig(layers=4, balance_weight=0.0, **SMALL)
    params, _, tokens = state_of(config)
    # Only the first 20 labels count, so that later tokens must not matter.
    labels = jnp.where(jnp.arange(45) < 20, tokens[:, 1:], -100)
    loss = jax.jit(lambda tokens: hybrid.loss(params, tokens, labels, config)[1]["cross_entropy"])
    changed = tokens[:, :-1].at[:, 20:].set(7)
    chex.assert_trees_all_close(loss(tokens[:, :-1]), loss(changed), rtol=1e-6)
    assert abs(float(loss(tokens[:, :-1]) - loss(tokens[:, :-1].at[:, 5].add(1)))) > 1e-4


@pytest.mark.slow
def test_every_parameter_has_a_gradient() -> None:
    config = hybrid.HybridConfig(layers=4, tied=False, **SMALL)
    params, _, tokens = state_of(config)
    gradients = jax.jit(jax.grad(lambda p: hybrid.loss(p, tokens[:, :-1], tokens[:, 1:], config)[0]))(params)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert float(jnp.abs(gradient).max()) > 0, jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": 6}, "layers must be a multiple of 4.*got 6"),
        ({"heads": 3, "kv_heads": 2}, "heads must be a multiple of kv_heads, got 3 and 2"),
        ({"delta_key_heads": 3}, "delta_value_heads must be a multiple of delta_key_heads, got 4 and 3"),
        ({"rotary_size": 7}, "rotary_size must be even and at most head_size = 32, got 7"),
        ({"experts_per_token": 9}, "experts_per_token must be at most experts = 8, got 9"),
        ({"dtype": "float16"}, "dtype must be 'float32' or 'bfloat16', got 'float16'"),
        ({"width": 0}, "width must be positive, got 0"),
    ],
)
def test_configurations_that_do_not_fit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hybrid.HybridConfig(**fields)


@pytest.mark.parametrize("storage", ["int8", pytest.param("int8x2", marks=pytest.mark.slow)])
def test_kept_arrays_in_words_change_gradients_a_little_and_the_loss_not_at_all(storage: str) -> None:
    config = hybrid.HybridConfig(**CONTINUOUS)
    params, _, tokens = state_of(config)
    exact_plan, (exact_loss, exact) = exact_run(config)
    step = ja.jit(loss_and_gradients_of(config), storage=storage)
    plan = step.plan(params, tokens)
    plan.verify()
    (loss, gradients), _ = step(plan.allocate(255), params, tokens)
    chex.assert_trees_all_equal(loss, exact_loss)
    squares = jax.tree.map(lambda a, b: (jnp.sum((a - b) ** 2), jnp.sum(b**2)), gradients, exact)
    off, size = (sum(pair[k] for pair in jax.tree.leaves(squares, is_leaf=lambda p: isinstance(p, tuple))) for k in (0, 1))
    # A word rounds by 1 / 254 of a block's largest value, which is about 3 deviations; two words by 1 / 65278.
    assert 0 < float(jnp.sqrt(off / size)) < {"int8": 0.05, "int8x2": 2e-4}[storage]
    assert plan.saved_bytes > 0
    assert plan.bytes < exact_plan.bytes
