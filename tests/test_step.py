"""What users hold: jit, plan, allocate, call; and every way to call it wrong."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxarena as ja
from jaxarena import ops
from jaxarena.testing import assert_step_repeatable, check_step
from tests.programs import integers, times, twice, twice_forward


def double_sum(x: Any, y: Any) -> Any:
    return twice_forward(x) + twice_forward(y)


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def model(params: Any, x: Any) -> Any:
    """Three layers and a loss, with kept activations."""

    def layer(h: Any, w: Any) -> Any:
        return ops.project(ops.rms_norm(h, w["norm"]), w["matrix"], residual=h), None

    h, _ = lax.scan(layer, x, params)
    return jnp.mean(h.astype(jnp.float32) ** 2)


def layers(dtype: Any = jnp.float32) -> tuple[Any, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"norm": jnp.ones((3, 96), dtype), "matrix": (jax.random.normal(keys[0], (3, 96, 96)) / 10).astype(dtype)}
    return params, jax.random.normal(keys[1], (2, 37, 96)).astype(dtype)


def test_plan_needs_shapes_only_and_is_the_plan_of_the_arrays() -> None:
    step = ja.jit(double_sum)
    from_shapes = step.plan(shape(5, 32), shape(5, 32))
    assert from_shapes == step.plan(jnp.ones((5, 32)), jnp.ones((5, 32)))
    assert from_shapes.fingerprint == ja.jit(double_sum).plan(shape(5, 32), shape(5, 32)).fingerprint
    assert from_shapes.bytes == 2 * ja.ALIGN


def test_plan_answers_questions() -> None:
    params, x = layers()
    plan = ja.jit(jax.grad(model)).plan(params, x)
    assert plan.bytes >= plan.bound > 0
    assert plan.ratio == plan.bytes / plan.bound
    assert plan.arena.live_bytes(plan.peak_launch) == plan.bound
    assert sum(p.bytes for p in plan.live_at(plan.peak_launch)) <= plan.bound
    assert plan.fits(plan.bytes + plan.xla_bytes)
    assert not plan.fits(plan.bytes + plan.xla_bytes - 1)
    with pytest.raises(IndexError, match=f"launch must be 0 to {len(plan.launches) - 1}, got -1"):
        plan.live_at(-1)
    with pytest.raises(ValueError, match="fill must be a byte, 0 to 255, got 256"):
        plan.allocate(256)


def test_arena_is_threaded_and_function_is_traced_once() -> None:
    traced = chex.assert_max_traces(double_sum, n=1)
    step = ja.jit(traced)
    arena = step.plan(shape(5, 32), shape(5, 32)).allocate(255)
    x, y = integers(0, 5, 32), integers(1, 5, 32)
    for _ in range(50):
        result, arena = step(arena, x, y)
    chex.assert_trees_all_equal(result, 2 * x + 2 * y)


def test_J6_state_keeps_its_types_and_nothing_is_compiled_twice() -> None:
    params, x = layers()
    optimizer = optax.adam(1e-3)

    def train(params: Any, opt_state: Any, count: Any, x: Any) -> Any:
        gradients = jax.grad(model)(params, x)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return optax.apply_updates(params, updates), opt_state, count + 1

    step = ja.jit(chex.assert_max_traces(train, n=1), donate_argnums=(0, 1, 2))
    state = (params, optimizer.init(params), jnp.int32(0))
    types = jax.tree.map(jax.typeof, state)
    arena = step.plan(*state, x).allocate()
    for _ in range(5):
        state, arena = step(arena, *state, x)
    assert jax.tree.map(jax.typeof, state) == types
    assert int(state[2]) == 5


def test_static_arguments_and_keywords() -> None:
    def power(x: Any, n: int, *, scale: Any, bias: bool = False) -> Any:
        for _ in range(n):
            x = twice_forward(x)
        return x * scale + (1 if bias else 0)

    x = integers(2, 3, 32)
    step = ja.jit(power, static_argnums=1, static_argnames="bias")
    arena = step.plan(x, 2, scale=jnp.float32(3), bias=True).allocate()
    result, arena = step(arena, x, 2, scale=jnp.float32(3), bias=True)
    chex.assert_trees_all_equal(result, x * 12 + 1)
    result, _ = step(arena, x, n=2, scale=jnp.float32(3), bias=True)
    chex.assert_trees_all_equal(result, x * 12 + 1)


def test_inside_an_outer_jit_with_donation() -> None:
    params, x = layers()
    step = ja.jit(jax.grad(model))
    plan = step.plan(params, x)

    def outer(arena: Any, params: Any, x: Any) -> Any:
        gradients, arena = step(arena, params, x)
        gradients, arena = step(arena, gradients, x)
        return arena, gradients

    compiled = jax.jit(outer, donate_argnums=0).lower(plan.allocate(), params, x).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == plan.bytes
    _, result = compiled(plan.allocate(255), params, x)
    first, arena = step(plan.allocate(), params, x)
    chex.assert_trees_all_close(result, step(arena, first, x)[0], rtol=1e-6)


def test_closed_over_arrays_and_tracers() -> None:
    weight = integers(3, 5, 32)

    def outer(x: Any, scale: Any) -> Any:
        step = ja.jit(lambda x: twice_forward(x * scale) + weight)
        return step(step.plan(x).allocate(), x)[0]

    x = integers(4, 5, 32)
    chex.assert_trees_all_equal(jax.jit(outer)(x, 3.0), 6 * x + weight)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_P7_arena_is_donated_and_never_copied_in_a_chain(dtype: Any) -> None:
    def chain(x: Any) -> Any:
        made = [twice_forward(x)]
        for _ in range(8):
            made.append(times(twice(made[-1]), made[0]))
        # All of them live until the end, so that the arena is many times what one launch takes.
        return sum(times(a, b).astype(jnp.float32).sum() for a, b in zip(made, reversed(made), strict=True))

    step = ja.jit(chain)
    x = jnp.ones((1024, 256), dtype)
    plan = step.plan(x)
    assert plan.bytes > 9 * x.nbytes
    memory = step.lower(plan.allocate(), x).compile().memory_analysis()
    assert memory.alias_size_in_bytes == plan.bytes
    assert memory.temp_size_in_bytes < plan.bytes / 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_P7_arena_is_donated_and_never_copied_inside_scan(dtype: Any) -> None:
    def loop(x: Any) -> Any:
        return jax.grad(lambda x: lax.scan(lambda h, _: (times(h, h), None), x, None, length=12)[0].astype(jnp.float32).sum())(x)

    step = ja.jit(loop)
    x = jnp.ones((512, 256), dtype)
    plan = step.plan(x)
    assert plan.bytes > 12 * x.nbytes
    memory = step.lower(plan.allocate(), x).compile().memory_analysis()
    assert memory.alias_size_in_bytes == plan.bytes
    assert memory.temp_size_in_bytes < plan.bytes / 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_P4_same_bits_whatever_the_arena_held(dtype: Any) -> None:
    params, x = layers(dtype)
    assert_step_repeatable(jax.value_and_grad(model), params, x)


def test_J8_strict_promotion() -> None:
    params, x = layers()
    with jax.numpy_dtype_promotion("strict"):
        assert_step_repeatable(jax.value_and_grad(model), params, x)


def test_J5_x64_changes_nothing() -> None:
    params, x = layers()
    step = ja.jit(jax.value_and_grad(model))
    without, _ = step(step.plan(params, x).allocate(), params, x)
    with jax.enable_x64(True):
        step = ja.jit(jax.value_and_grad(model))
        with_x64, _ = step(step.plan(params, x).allocate(), params, x)
    chex.assert_trees_all_equal(without, with_x64, strict=True)


def test_J7_arrays_without_values() -> None:
    check_step(lambda x: (twice_forward(x) + 1, twice_forward(x).sum()), jnp.zeros((3, 0, 32)))


def test_P9_one_array_donated_twice_is_named() -> None:
    x = jnp.ones((5, 32))
    step = ja.jit(lambda state: twice_forward(state["a"]) + state["b"], donate_argnums=0)
    arena = step.plan({"a": x, "b": x}).allocate()
    with pytest.raises(ValueError, match=r"argument 0\['a'\] and argument 0\['b'\] are one array"):
        step(arena, {"a": x, "b": x})


def test_P9_one_array_donated_and_kept_is_named() -> None:
    x = jnp.ones((5, 32))
    step = ja.jit(double_sum, donate_argnums=-2)
    arena = step.plan(x, x).allocate()
    with pytest.raises(ValueError, match="argument 0 is donated and argument 1 is the same array"):
        step(arena, x, x)


def test_P9_use_after_donation_is_an_error() -> None:
    step = ja.jit(double_sum, donate_argnums=0)
    x = jnp.ones((5, 32))
    arena = step.plan(x, x).allocate()
    step(arena, x + 0, x)
    with pytest.raises(ValueError, match="arena was donated to an earlier call"):
        step(arena, x, x)
    state = x + 0
    _, arena = step(step.plan(x, x).allocate(), state, x)
    with pytest.raises(ValueError, match="argument 0 was donated to an earlier call"):
        step(arena, state, x)


def test_wrong_arenas_are_named() -> None:
    step, other = ja.jit(double_sum), ja.jit(lambda x, y: twice_forward(x - y))
    x = jnp.ones((5, 32))
    right = step.plan(x, x)
    with pytest.raises(TypeError, match=r"the first argument must be an arena.*got ArrayImpl"):
        step(jnp.zeros((16, 128), jnp.int8), x, x)
    wrong = other.plan(x, x)
    with pytest.raises(ValueError, match=f"double_sum: arena was allocated for plan {wrong.fingerprint}.*need plan {right.fingerprint}"):
        step(wrong.allocate(), x, x)
    with pytest.raises(ValueError, match="with 2048 bytes: allocate one"):
        step(step.plan(jnp.ones((9, 64)), jnp.ones((9, 64))).allocate(), x, x)
    with pytest.raises(ValueError, match=r"with 384 bytes, but these arguments need plan"):
        step(ja.ArenaBuffer(jnp.zeros((3, 128), jnp.int8), (right.fingerprint,)), x, x)


def test_gradients_and_batches_around_a_step_are_refused() -> None:
    step = ja.jit(lambda x: twice(x).sum())
    x = jnp.ones((5, 32))
    plan = step.plan(x)
    with pytest.raises(TypeError, match="cannot be differentiated from outside"):
        jax.grad(lambda x: step(plan.allocate(), x)[0])(x)
    with pytest.raises(TypeError, match=r"cannot be batched by jax\.vmap"):
        jax.vmap(lambda x: step(plan.allocate(), x)[0])(jnp.ones((3, 5, 32)))


def test_not_a_function() -> None:
    with pytest.raises(TypeError, match="function must be callable, got 3"):
        ja.jit(3)  # type: ignore[arg-type]


def test_P1_plan_past_two_gibibytes_keeps_its_offsets() -> None:
    def big(x: Any) -> Any:
        a = twice_forward(jnp.broadcast_to(x, (3 * 2**20, 256)))
        b = twice_forward(x)
        return a.sum() + b.sum() + a[0, 0]

    plan = ja.jit(big).plan(shape(256))
    assert plan.bytes > 3 * ja.GiB
    assert max(p.end for p in plan.arena.placed) == plan.bytes
    plan.verify()


def test_frozen_weights_cost_no_launch() -> None:
    params, x = layers()
    names = [launch.name for launch in ja.jit(jax.grad(model, argnums=1)).plan(params, x).launches]
    assert not any("dweight" in name for name in names)
    assert any("dx" in name for name in names)


def test_results_are_numpy_equal_over_two_calls_with_one_arena() -> None:
    params, x = layers()
    step = ja.jit(jax.value_and_grad(model))
    first, arena = step(step.plan(params, x).allocate(), params, x)
    second, _ = step(arena, params, x)
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, first), jax.tree.map(np.asarray, second))
