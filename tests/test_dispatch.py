"""Launches as kernels: what the plan says, and that a step's kernels, interpreted, give what its references give."""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxarena as ja
from jaxarena.kernels import Site
from jaxarena.ops import launch


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def both(function: Any, *args: Any) -> tuple[Any, Any, ja.Plan]:
    """What a step gives with its kernels interpreted, on a poisoned arena, and with its references; and its plan."""
    step = ja.jit(function, kernels="interpret")
    plan = step.plan(*args)
    kernels, arena = step(plan.allocate(255), *args)
    again, _ = step(arena, *args)
    chex.assert_trees_all_equal(kernels, again)
    references, _ = ja.jit(function, kernels=False)(plan.allocate(255), *args)
    return kernels, references, plan


def kernels_of(plan: ja.Plan) -> list[str]:
    return [name.partition(".")[0] for name, why in plan.kernels().items() if why is None]


def train_step(x: jax.Array, w: dict[str, jax.Array]) -> Any:
    def loss(w: dict[str, jax.Array]) -> jax.Array:
        h = ja.ops.rms_norm(x, jnp.ones(x.shape[-1], x.dtype))
        h = ja.ops.project(ja.ops.project(h, w["up"]), w["down"])
        return jnp.mean(h.astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss)(w)


def test_bfloat16_products_and_their_gradients() -> None:
    x, w = normal(0, (2, 64, 128)), {"up": normal(1, (128, 192)) / 11, "down": normal(2, (192, 128)) / 14}
    got, expected, plan = both(train_step, x, w)
    assert kernels_of(plan) == ["project", "project", "project_dx", "project_dweight", "project_dweight"]
    chex.assert_trees_all_close(got, expected, rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize("storage", ["int8", pytest.param("int8x2", marks=pytest.mark.slow)])
def test_words_in_a_loop(storage: str) -> None:
    dtype = jnp.bfloat16 if storage == "int8" else jnp.float32
    x, w = normal(0, (64, 256), dtype), normal(1, (2, 256, 256), jnp.float32) / 16

    def forward(x: jax.Array, w: jax.Array) -> Any:
        def layer(h: jax.Array, w: jax.Array) -> Any:
            return ja.ops.project(h, w, storage=storage), None

        return jax.lax.scan(layer, x, w)[0].astype(jnp.float32) * 2

    got, expected, plan = both(forward, x, w)
    assert kernels_of(plan) == (["quantize_rows"] if storage == "int8" else []) + ["project_quantized"]
    chex.assert_trees_all_close(got, expected, rtol=0, atol={"int8": 0.03, "int8x2": 1e-5}[storage] * float(jnp.abs(expected).max()))


def test_the_plan_says_why_not() -> None:
    def f(x: jax.Array, w: jax.Array) -> Any:
        h = ja.ops.rms_norm(x, jnp.ones(x.shape[-1], x.dtype))
        return ja.ops.project(h, w) * 2

    for x, w, why in (
        (normal(0, (2, 8, 64), jnp.float32), normal(1, (64, 64), jnp.float32), "takes bfloat16, not x of float32 and weight of float32"),
        (normal(0, (2, 8, 64)), normal(1, (64, 72)), "must be a multiple of 128 bytes, got 72 columns of columns"),
    ):
        plan = ja.jit(f).plan(x, w)
        kernels = plan.kernels()
        assert why in (kernels["project.1"] or "")
        assert kernels["rms_norm.1"] == "it has no kernel"
        assert "compute capability 9.0, not 8.0" in (plan.kernels("8.0")["project.1"] or "")
        assert "0 launches run as kernels" in str(plan)
        assert why in str(plan)
        # What the plan refuses runs as the reference.
        step = ja.jit(f, kernels="interpret")
        chex.assert_trees_all_equal(step(plan.allocate(), x, w)[0], ja.jit(f, kernels=False)(plan.allocate(), x, w)[0])
    with pytest.raises(ValueError, match="kernels must be True, False or 'interpret', got 'never'"):
        ja.jit(f, kernels="never")


def test_where_a_kernel_finds_its_operands() -> None:
    """Results in an array of their own, operands taken as arrays though they lie in the arena, and two results."""
    seen: list[Any] = []

    @launch("split_sign")
    def split_sign(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.maximum(x, 0) + y, jnp.minimum(x, 0)

    @split_sign.kernel(lambda x, y, *, out: None if x.in_arena else "x is an array", arrays=(1,))
    def run(arena: Any, x: Any, y: Any, *, out: Any, device: Any) -> Any:
        seen.append((x, y, out, device))
        row, rows = x.row, x.site.layout.part_rows
        arena[jax.ds(out[0].row, rows)] = arena[jax.ds(row, rows)]
        return None, 3 * y

    @launch("double")
    def double(x: jax.Array) -> jax.Array:
        return 2 * x

    def f(x: jax.Array) -> Any:
        once, twice = double(x), double(double(x))
        up, down = split_sign(once, twice)
        return double(up), down, split_sign(x, x)[0]

    x = normal(0, (5, 40), jnp.float32)
    step = ja.jit(f, kernels="interpret")
    plan = step.plan(x)
    assert [why for name, why in plan.kernels().items() if "split" in name] == [None, "x is an array"]
    (up, down, alone), _ = step(plan.allocate(255), x)
    chex.assert_trees_all_equal((up, down, alone), (4 * x, 12 * x, jnp.maximum(x, 0) + x))
    (x_seen, y_seen, out, device), *rest = seen
    assert not rest and out[1] is None and device.interpret
    chex.assert_shape(y_seen, (5, 40))
    assert x_seen.site.matrix == (8, 40)


def test_inside_shard_map_the_reference_runs() -> None:
    @launch("square")
    def square(x: jax.Array) -> jax.Array:
        return x * x

    @square.kernel(lambda x, *, out: None)
    def run(arena: Any, x: Any, *, out: Any, device: Any) -> Any:
        raise AssertionError("Pallas refuses refs that vary over a mesh's axes")

    step = ja.jit(lambda x: square(square(x)) + 1, kernels="interpret")
    x = normal(0, (4, 40), jnp.float32)
    arena = step.plan(x).allocate(255)
    with pytest.raises(AssertionError, match="Pallas refuses"):
        step(arena, x)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(lambda data, x: step(dataclasses.replace(arena, data=data), x)[0], mesh=mesh, in_specs=spec, out_specs=spec)
    chex.assert_trees_all_close(jax.jit(mapped)(step.plan(x).allocate().data, x), x**4 + 1, rtol=1e-6)


def test_sites() -> None:
    assert Site((3, 5, 40), jnp.float32).matrix == (15, 40)
    assert Site((), jnp.float32).matrix is None
