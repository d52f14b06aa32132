"""The hybrid model token by token: caches and states against one pass, over one arena with training."""

from __future__ import annotations

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxarena as ja
from jaxarena.models import hybrid
from tests.models.test_hybrid import SMALL, state_of


def test_A5_prefill_then_decode_is_one_pass() -> None:
    config = hybrid.HybridConfig(**SMALL)
    params, _, tokens = state_of(config)
    step = ja.jit(functools.partial(hybrid.extend, config=config), donate_argnums=1)
    cache = hybrid.create_cache(config, 2, 46)
    first, rest = tokens[:, :41], tokens[:, 41:]
    plans = {1: step.plan(params, cache, rest[:, :1]), 41: step.plan(params, cache, first)}
    for plan in plans.values():
        plan.verify()
    (logits, cache), _ = step(plans[41].allocate(255), params, cache, first)
    arena, out = plans[1].allocate(255), [logits]
    for n in range(rest.shape[1]):
        (logits, cache), arena = step(arena, params, cache, rest[:, n : n + 1])
        out.append(logits)
    chex.assert_trees_all_equal(cache.lengths, jnp.full(2, 46, jnp.int32))
    full = jax.jit(functools.partial(hybrid.logits, config=config))(params, tokens)
    chex.assert_trees_all_close(jnp.stack(out, axis=1), full[:, 40:], rtol=0, atol=2e-5 * float(jnp.abs(full).max()))


@pytest.mark.slow
def test_train_and_decode_share_an_arena_and_the_parameters() -> None:
    config = hybrid.HybridConfig(layers=4, dtype="bfloat16", **SMALL)
    params, _, tokens = state_of(config)

    def train(params: Any, tokens: jax.Array) -> Any:
        gradients = jax.grad(lambda p: hybrid.loss(p, tokens[:, :-1], tokens[:, 1:], config)[0])(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    def decode(params: Any, cache: hybrid.Cache, token: jax.Array, key: jax.Array) -> Any:
        logits, cache = hybrid.extend(params, cache, token, config)
        return ja.ops.sample(logits, key, temperature=0.8, top_k=20)[:, None], cache

    program = ja.Program(train=ja.jit(train, donate_argnums=0), decode=ja.jit(decode, donate_argnums=1))
    cache, key = hybrid.create_cache(config, 2, 8), jax.random.key(0)
    plan = program.plan(train=(params, tokens), decode=(params, cache, tokens[:, :1], key))
    arena = plan.allocate(255)
    params, arena = program.train(arena, jax.tree.map(jnp.copy, params), tokens)
    fresh, token = jax.tree.map(jnp.copy, cache), tokens[:, :1]
    drawn = []
    for n in range(3):
        (token, cache), arena = program.decode(arena, params, cache, token, jax.random.fold_in(key, n))
        drawn.append(token)
    # The same draws from a decode of its own.
    token, plain = tokens[:, :1], jax.jit(decode)
    for n in range(3):
        token, fresh = plain(params, fresh, token, jax.random.fold_in(key, n))
        chex.assert_trees_all_equal(token, drawn[n])


def test_what_does_not_fit() -> None:
    config = hybrid.HybridConfig(**SMALL)
    params, _, tokens = state_of(config)
    cache = hybrid.create_cache(config, 2, 4)
    for wrong in (tokens[:1], tokens[:, :0], tokens[0]):
        with pytest.raises(ValueError, match=r"extend: tokens must have shape \(2, time\)"):
            hybrid.extend(params, cache, wrong, config)
