"""Kept arrays in another storage: the backward pass reads what the storage makes of them, the forward pass the arrays themselves."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxarena as ja
from jaxarena import storage
from jaxarena.testing import assert_step_repeatable
from tests.programs import times_forward


def stored(x, name):
    """What a storage makes of rows."""
    if name is None:
        return x
    if name == "bf16":
        return x.astype(jnp.bfloat16).astype(x.dtype)
    return storage.dequantize(*storage.quantize(x, 1 if name == "int8" else 2), x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(x, y, name):
    """x * y whose gradient sees x and y as the storage ``name`` keeps them: the oracle, run by plain jit."""
    return times_forward(x, y)


product.defvjp(
    lambda x, y, name: (times_forward(x, y), (x, y)),
    lambda name, kept, dz: (times_forward(stored(kept[1], name), dz), times_forward(stored(kept[0], name), dz)),
)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def looped(name):
    """A loss over a scan whose residual stream and products are made by launches."""

    def step(w, x):
        def loss(w, x):
            def body(h, w):
                a = product(h, w, None)  # w is an input and stays as it is
                return product(a, w, name), None

            return jnp.sum(jax.lax.scan(body, x, w)[0] ** 2)

        return jax.value_and_grad(loss)(w, x)

    return step


def chained(name, named="a"):
    """The same without a loop; ``a`` is read by the backward pass in two shapes."""

    def step(w, x):
        def loss(w, x):
            a = checkpoint_name(times_forward(x, x), named)
            b = product(a, w, name)
            c = product(b.reshape(-1, 2, 64), a.reshape(-1, 2, 64), name)
            return jnp.sum(c.reshape(w.shape) * w)

        return jax.value_and_grad(loss)(w, x)

    return step


def run(step, plan, *args):
    return step(plan.allocate(255), *args)[0]


@pytest.mark.parametrize(("name", "dtype"), [("bf16", jnp.float32), ("int8", jnp.float32), ("int8x2", jnp.float32), ("int8", jnp.bfloat16)])
def test_named_rows_without_a_loop(name, dtype):
    w, x = normal(0, 40, 128, dtype=dtype), normal(1, 40, 128, dtype=dtype)

    def step(w, x):
        def loss(w):
            a = checkpoint_name(product(w, x, None), "a")
            return jnp.sum(product(a, w * 2, None).astype(jnp.float32))

        return jax.value_and_grad(loss)(w)

    def expected(w, x):
        a = times_forward(w, x)
        ones = jnp.ones_like(w)
        return jnp.sum(times_forward(a, w * 2).astype(jnp.float32)), times_forward(times_forward(w * 2, ones), x) + 2 * times_forward(
            stored(a, name), ones
        )

    plan = assert_step_repeatable(step, w, x, storage={"a": name})
    value, gradient = run(ja.jit(step, storage={"a": name}), plan, w, x)
    chex.assert_trees_all_equal(value, run(ja.jit(step), ja.jit(step).plan(w, x), w, x)[0])
    chex.assert_trees_all_close((value, gradient), jax.jit(expected)(w, x), rtol=1e-6 if dtype == jnp.float32 else 2**-7)
    assert plan.kept_bytes.keys() == {name}
    assert plan.saved_bytes > 0
    assert np.any(np.asarray(stored(w, name)) != np.asarray(w))  # so the comparison can fail


@pytest.mark.parametrize("name", ["bf16", "int8", "int8x2"])
def test_rows_kept_by_a_loop(name):
    w, x = 1 + normal(2, 5, 24, 256) / 8, normal(3, 24, 256)
    plan = assert_step_repeatable(looped(None), w, x, storage=name)
    raw = ja.jit(looped(None)).plan(w, x)
    value, gradient = run(ja.jit(looped(None), storage=name), plan, w, x)
    chex.assert_trees_all_equal(value, run(ja.jit(looped(None)), raw, w, x)[0])
    exact = jax.jit(looped(None))(w, x)[1]
    scale = float(jnp.max(jnp.abs(exact)))
    error = float(jnp.max(jnp.abs(gradient - exact))) / scale
    # The gradient of a turn's w sums two products with a kept array that is off by at most this much of its block's largest value.
    level = {"bf16": 2**-9, "int8": 1 / 254, "int8x2": 1 / 65278}[name]
    assert 0 < error <= 4 * level
    assert plan.bytes < raw.bytes
    # Two arrays of 5 slots of 24 rows of 256 values.
    assert plan.kept_bytes[name] + plan.saved_bytes == 2 * 5 * 24 * 256 * 4


def test_the_first_pattern_that_matches_counts_and_none_leaves_an_array_alone():
    w, x = normal(4, 16, 128), normal(5, 16, 128)
    plain = ja.jit(chained(None)).plan(w, x)
    assert ja.jit(chained(None), storage={"a": None, "*": None}).plan(w, x).bytes == plain.bytes
    kept = ja.jit(chained(None), storage={"a": "int8", "*": None}).plan(w, x)
    assert set(kept.kept_bytes) == {"int8"}
    both = ja.jit(chained(None), storage={"a": "int8x2", "times": "bf16"}).plan(w, x)
    assert set(both.kept_bytes) == {"int8x2", "bf16"}


def test_one_copy_serves_the_shapes_an_array_is_read_in():
    w, x = normal(6, 16, 128), normal(7, 16, 128)
    plan = assert_step_repeatable(chained(None), w, x, storage={"a": "int8"})
    assert [t.name for t in plan.form.tensors if t.saved] == ["kept times"]
    gradient = run(ja.jit(chained(None), storage={"a": "int8"}), plan, w, x)[1]
    exact = jax.jit(chained(None))(w, x)[1]
    chex.assert_trees_all_close(gradient, exact, atol=float(jnp.max(jnp.abs(exact))) / 60)


def test_where_a_storage_saves_nothing_arrays_stay_as_they_are():
    w, x = normal(8, 2, 24, 256, dtype=jnp.bfloat16), normal(9, 24, 256, dtype=jnp.bfloat16)
    assert ja.jit(looped(None), storage="int8x2").plan(w, x).kept_bytes == {}


def test_a_carry_that_only_changes_its_shape_is_no_launchs():
    """It is kept for the gradient of ``w`` and goes from turn to turn by reshapes: its maker is looked for once round the loop."""
    w, x = normal(14, 3, 16, 128), normal(15, 16, 128)

    def step(w, x):
        def body(h, w):
            return h.reshape(8, 256).reshape(16, 128), product(h, w, None)

        return jax.value_and_grad(lambda w: jnp.sum(jax.lax.scan(body, x, w)[1] ** 2))(w)

    with pytest.raises(ValueError, match="matches no array that the backward pass reads; there are none"):
        ja.jit(step, storage="int8").plan(w, x)


def test_a_plan_tells_the_storage_and_what_it_saves():
    w, x = normal(10, 5, 24, 256), normal(11, 24, 256)
    plan = ja.jit(looped(None), storage="int8").plan(w, x)
    assert "kept for the backward pass" in str(plan)
    assert ja.Plan.from_json(plan.to_json()) == plan
    assert any(launch.name.startswith("keep") for launch in plan.launches)


def test_errors_name_what_there_is():
    w, x = normal(12, 16, 128), normal(13, 16, 128)
    with pytest.raises(ValueError, match=r"storage 'int4' for '\*' must be one of 'bf16', 'int8', 'int8x2' or None"):
        ja.jit(chained(None), storage="int4")
    with pytest.raises(TypeError, match="storage must be None, a string or a dict"):
        ja.jit(chained(None), storage=8)
    with pytest.raises(ValueError, match=r"pattern 'nowhere' matches no array that the backward pass reads; there are a, times"):
        ja.jit(chained(None), storage={"nowhere": "int8"}).plan(w, x)
