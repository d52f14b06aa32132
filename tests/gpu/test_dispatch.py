"""Steps whose launches run as kernels on the GPU: what their references give, the same bits every time, and no copy of the arena."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import own_op
import pytest

import jaxarena as ja

pytestmark = pytest.mark.gpu


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def layers(storage: str | None) -> Any:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> Any:
            return h + ja.ops.project(ja.ops.rms_norm(h, jnp.ones(h.shape[-1], h.dtype)), w, storage=storage), None

        return jnp.mean(jax.lax.scan(layer, x, w)[0].astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss)


# The last is the error of a gradient, root mean square over root mean square: of bfloat16's sums, one word's roundings, two words' sums.
@pytest.mark.parametrize(
    ("storage", "dtype", "limit"), [(None, jnp.bfloat16, 1e-2), ("int8", jnp.bfloat16, 2e-2), ("int8x2", jnp.float32, 1e-4)]
)
def test_a_step_is_that_of_its_references(storage: str | None, dtype: Any, limit: float) -> None:
    x, w = normal(0, (2, 1024, 512), dtype), normal(1, (4, 512, 512), dtype) / 22
    step, plain = ja.jit(layers(storage)), ja.jit(layers(storage), kernels=False)
    plan = step.plan(w, x)
    assert any(why is None for why in plan.kernels().values())
    (loss, gradient), arena = step(plan.allocate(255), w, x)
    again, _ = step(arena, w, x)
    chex.assert_trees_all_equal((loss, gradient), again)
    (plain_loss, plain_gradient), _ = plain(plan.allocate(), w, x)
    chex.assert_trees_all_close(loss, plain_loss, rtol=1e-3)
    off = (gradient - plain_gradient).astype(jnp.float32)
    assert float(jnp.linalg.norm(off.ravel()) / jnp.linalg.norm(plain_gradient.astype(jnp.float32).ravel())) < limit
    memory = step.lower(plan.allocate(), w, x).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= plan.bytes
    assert memory.temp_size_in_bytes < plan.bytes


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_op_of_ones_own(dtype: Any) -> None:
    x, weight = normal(0, (4, 64, 72), dtype), normal(1, (72,), dtype)

    def function(x: jax.Array, weight: jax.Array) -> jax.Array:
        return own_op.relu2(own_op.relu2(own_op.relu2(x, weight), weight), weight)

    step = ja.jit(function)
    plan = step.plan(x, weight)
    assert list(plan.kernels().values()).count(None) == 1
    got, _ = step(plan.allocate(255), x, weight)
    expected, _ = ja.jit(function, kernels=False)(plan.allocate(), x, weight)
    chex.assert_trees_all_close(got, expected, rtol=1e-6 if dtype == jnp.float32 else 2e-2)
