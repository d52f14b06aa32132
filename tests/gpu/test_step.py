"""A planned step on an NVIDIA GPU: in place, the same bits whatever the arena held, and the plain result."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxarena as ja
from jaxarena.models import hybrid
from jaxarena.testing import check_step, tolerance
from tests.programs import integers, times, twice

pytestmark = pytest.mark.gpu


def test_exact_program_in_loops() -> None:
    def step(x: Any, weights: Any) -> Any:
        def loss(x: Any) -> Any:
            h, kept = jax.lax.scan(lambda h, w: (times(twice(h), w), h), x, weights)
            return h.sum() + kept.sum()

        return jax.value_and_grad(loss)(x)

    check_step(step, integers(0, 37, 200) % 2, integers(1, 3, 37, 200) % 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hybrid_model_is_in_place_and_independent_of_what_the_arena_held(dtype: str) -> None:
    config = hybrid.HybridConfig(layers=8, dtype=dtype)
    params = hybrid.init(jax.random.key(0), config)
    tokens = jax.random.randint(jax.random.key(1), (2, 201), 0, config.vocabulary)

    def loss(params: Any, tokens: Any) -> Any:
        return jax.value_and_grad(lambda p: hybrid.loss(p, tokens[:, :-1], tokens[:, 1:], config)[0])(params)

    step = ja.jit(loss)
    plan = step.plan(params, tokens)
    plan.verify()
    memory = step.lower(plan.allocate(), params, tokens).compile().memory_analysis()
    assert memory.alias_size_in_bytes == plan.bytes
    first, _ = step(plan.allocate(0), params, tokens)
    chex.assert_tree_all_finite(first)
    # Gradients of gathered rows add up in no fixed order under XLA on a GPU, so only the loss is held to its bits here.
    second, _ = step(plan.allocate(255), params, tokens)
    chex.assert_trees_all_equal(first[0], second[0])
    plain = jax.jit(loss)(params, tokens)
    chex.assert_trees_all_close(first[0], plain[0], rtol=tolerance(jnp.dtype(dtype), config.width, stages=4 * config.layers))
