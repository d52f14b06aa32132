"""quantize and Quantized: words and scales against numpy, what decodes exactly, and where the gradient goes."""

from __future__ import annotations

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxarena.ops import Quantized, quantize
from jaxarena.testing import check_step, gradient_launches, live_launches, normal
from tests.ops.common import DTYPES, raises

FORMS = [(storage, block) for storage in ("int8", "int8x2") for block in ("row", "tile")]
LEVELS = {"int8": 127, "int8x2": 32639}


def blocks_of(x, block):
    """``x`` as numpy float64 ``[blocks, values in a block]``, short blocks padded with zeros, in the order of the scales."""
    x = np.asarray(x).astype(np.float64)
    pads = [(0, -x.shape[-1] % 128)]
    if block == "row":
        x = np.pad(x.reshape(-1, x.shape[-1]), [(0, 0), *pads])
        return x.reshape(len(x), -1, 128).swapaxes(0, 1).reshape(-1, 128)
    x = np.pad(x, [(0, -x.shape[0] % 128), *pads])
    k, n = x.shape
    return x.reshape(k // 128, 128, n // 128, 128).transpose(2, 0, 1, 3).reshape(-1, 128 * 128)


def integers_of(q):
    """The integers that words and low words stand for, in the shape of the array."""
    v = np.asarray(q.words, np.int32) * (1 if q.low is None else 256) + (0 if q.low is None else np.asarray(q.low, np.int32))
    return v if q.block == "row" else v.T


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage,block", FORMS)
@hypothesis.settings(max_examples=4)
@hypothesis.given(k=st.sampled_from([1, 127, 130, 389]), n=st.sampled_from([3, 150, 257]), seed=st.integers(0, 99))
def test_words_and_scales_are_those_of_numpy(storage, block, dtype, k, n, seed):
    x = normal(seed, (k, n), dtype) * jnp.exp(3 * normal(seed + 1, (1, n))).astype(dtype)
    q = quantize(x, storage, block)
    chex.assert_shape(q.scales, (-(-n // 128), k) if block == "row" else (-(-n // 128), -(-k // 128)))
    assert (q.shape, q.ndim, q.dtype, q.storage) == (x.shape, 2, x.dtype, storage)
    assert q.nbytes == x.size * len(q.parts[:-1]) + 4 * q.scales.size
    blocks = blocks_of(x, block)
    scales = np.max(np.abs(blocks), axis=1) / LEVELS[storage]
    np.testing.assert_allclose(np.asarray(q.scales).reshape(-1), scales, rtol=2**-23)
    # A quotient close to a half may round either way in float32.
    assert np.max(np.abs(blocks_of(integers_of(q), block) - blocks / np.where(scales, scales, 1)[:, None])) < 0.5 + 2**-8
    decoded = blocks_of(q.dequantize(jnp.float32), block)
    assert np.all(np.abs(decoded - blocks) <= (0.5 + 2**-8) * scales[:, None])


@pytest.mark.parametrize("storage,block", FORMS)
def test_Q1_zero_blocks_decode_to_zeros_and_change_no_other(storage, block):
    x = normal(0, (300, 391))
    zeroed = x.at[:, 128:256].set(0) if block == "row" else x.at[128:256, :128].set(0)
    q, q_zeroed = quantize(x, storage, block), quantize(zeroed, storage, block)
    zero = np.asarray(zeroed == 0)
    assert not integers_of(q_zeroed)[zero].any() and not np.asarray(q_zeroed.dequantize())[zero].any()
    chex.assert_trees_all_equal(integers_of(q_zeroed)[~zero], integers_of(q)[~zero])
    where = (1,) if block == "row" else (0, 1)
    chex.assert_trees_all_equal(q_zeroed.scales, q.scales.at[where].set(0))


@pytest.mark.parametrize("storage,block", FORMS)
def test_Q6_grid_points_come_back_exactly(storage, block):
    integers = np.random.default_rng(1).integers(-LEVELS[storage], LEVELS[storage] + 1, (261, 131))
    # One extreme value in every block: all scales are the power of two.
    integers[::128, ::128] = -LEVELS[storage]
    if block == "row":
        integers[:, [0, 130]] = LEVELS[storage]
    x = jnp.asarray(integers, jnp.float32) * 2.0**-9
    q = quantize(x, storage, block)
    chex.assert_trees_all_equal(integers_of(q), integers)
    chex.assert_trees_all_equal(q.dequantize(), x)


def test_Q7_two_words_hold_blocks_of_any_scale():
    x = normal(0, (5, 300)) * jnp.repeat(2.0 ** jnp.array([-20, 0, 20]), 100)[None]
    q = quantize(x, "int8x2")
    amax = np.max(np.abs(blocks_of(x, "row")), axis=1, keepdims=True)
    assert np.all(np.abs(blocks_of(q.dequantize(), "row") - blocks_of(x, "row")) <= amax * 2**-15)
    assert (np.asarray(q.low) < 0).any() and (np.asarray(q.low) > 0).any()


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("storage,block", FORMS)
def test_Q9_nan_and_inf_stay_in_their_block(storage, block, bad):
    x = normal(0, (140, 260))
    y, y_bad = (np.asarray(quantize(a, storage, block).dequantize()) for a in (x, x.at[3, 200].set(bad)))
    hit = np.zeros(x.shape, bool)
    hit[3 if block == "row" else slice(0, 128), 128:256] = True
    assert np.isnan(y_bad[hit]).all()
    chex.assert_trees_all_equal(y_bad[~hit], y[~hit])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage,block", FORMS)
def test_the_gradient_is_straight_through(storage, block, dtype):
    # A gradient that bfloat16 holds: it passes through the dtype that is decoded to.
    x, dy = normal(0, (7, 131), dtype), normal(1, (7, 131), jnp.bfloat16).astype(dtype)
    for as_dtype in DTYPES:
        gradient = jax.grad(lambda x, d=as_dtype: jnp.sum((quantize(x, storage, block).dequantize(d) * dy.astype(d)).astype(jnp.float32)))
        chex.assert_trees_all_equal(gradient(x), dy)
    assert gradient_launches(lambda x: quantize(x, storage, block).dequantize(), [x], (0,)) == []
    detached = jax.grad(lambda x: jnp.sum(quantize(x, storage, block).detach().dequantize(jnp.float32)))
    chex.assert_trees_all_equal(detached(x), jnp.zeros_like(x))


def test_gradients_of_a_loop_and_of_several_readers_add_up():
    x = normal(0, (3, 40))
    weights = jnp.arange(1.0, 5.0)

    def loss(x):
        q = quantize(x)
        return jax.lax.scan(lambda total, w: (total + w * jnp.sum(q.dequantize()), None), jnp.float32(0), weights)[0]

    chex.assert_trees_all_equal(jax.grad(loss)(x), jnp.full_like(x, 10))


def test_a_gradient_with_respect_to_a_quantized_lies_in_its_carrier():
    q = quantize(normal(0, (5, 9)), block="tile")
    gradient = jax.grad(lambda q: jnp.sum(2 * q.dequantize()), allow_int=True)(q)
    chex.assert_trees_all_equal(gradient.carrier, jnp.full((5, 9), 2.0))


def test_a_quantized_passes_through_transformations():
    x = normal(0, (4, 6, 200))
    stacked = jax.vmap(quantize)(x)
    chex.assert_shape((stacked.words, stacked.scales), [(4, 6, 200), (4, 2, 6)])
    looped = jnp.stack([quantize(a).dequantize() for a in x])
    chex.assert_trees_all_equal(jax.vmap(Quantized.dequantize)(stacked), looped)
    chex.assert_trees_all_equal(jax.lax.scan(lambda _, q: (None, q.dequantize()), None, stacked.detach())[1], looped)
    shapes = jax.eval_shape(quantize, x)
    assert (shapes.shape, shapes.nbytes, shapes.extent) == ((4, 6, 200), 4 * 6 * (200 + 2 * 4), (200,))
    with raises(ValueError, "dequantize: array.scales must have shape (2, 4, 6)", "got shape (4, 2, 6)"):
        stacked.dequantize()


def test_J3_shard_map():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(x, weight):
        return jnp.sum(quantize(x).dequantize() ** 2) + jnp.sum(quantize(weight, block="tile").dequantize() ** 2)

    gradients = jax.grad(loss, argnums=(0, 1))
    args = normal(0, (4, 9)), normal(1, (9, 6))
    specs = PartitionSpec("data"), PartitionSpec()
    mapped = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=specs))
    chex.assert_trees_all_close(mapped(*args), gradients(*args))


def test_J5_modes():
    x = normal(0, (33, 150), jnp.bfloat16)
    for storage, block in FORMS:
        plain = jax.jit(lambda x, s=storage, b=block: quantize(x, s, b).detach())(x)
        with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
            wide = jax.jit(lambda x, s=storage, b=block: quantize(x, s, b).detach())(x)
        chex.assert_trees_all_equal(plain, wide, strict=True)


@pytest.mark.parametrize("storage,block", FORMS)
def test_J7_nothing_to_quantize(storage, block):
    for shape in ((0, 130), (130, 0), (0, 0)):
        q = quantize(jnp.zeros(shape), storage, block)
        chex.assert_shape((q.words, q.dequantize()), [shape if block == "row" else shape[::-1], shape])


def test_in_a_planned_step():
    x, weight = normal(0, (3, 5, 200)), normal(1, (200, 130))

    def step(x, weight):
        q, w = quantize(x), quantize(weight, "int8x2", "tile")
        return q.detach(), w.dequantize(), q.dequantize(jnp.bfloat16)

    plan = check_step(step, x, weight)
    assert live_launches(step, x, weight) == ["quantize_rows", "quantize_tiles_x2", "dequantize_tiles", "dequantize_rows"]
    # Nothing is stored for carriers.
    assert plan.xla_bytes == 0


def test_errors_name_the_argument():
    x = jnp.ones((3, 200))
    with raises(TypeError, "quantize: x must be bfloat16 or float32, got float16"):
        quantize(x.astype(jnp.float16))
    with raises(TypeError, "quantize: x must be an array, got a Quantized"):
        quantize(quantize(x))
    with raises(ValueError, "quantize: storage must be one of 'int8', 'int8x2', got 'int4'"):
        quantize(x, "int4")
    with raises(ValueError, "quantize: block must be one of 'row', 'tile', got 'column'"):
        quantize(x, block="column")
    with raises(ValueError, "quantize: x must have shape (k, n), got shape (2, 3, 200)"):
        quantize(jnp.ones((2, 3, 200)), block="tile")
    with raises(TypeError, "dequantize: dtype must be floating point, got int8"):
        quantize(x).dequantize(jnp.int8)
    q = quantize(x, "int8x2")
    build = functools.partial(Quantized, dtype=jnp.float32)
    with raises(TypeError, "dequantize: array.words must be an array of int8, got int32"):
        build(q.words.astype(jnp.int32), None, q.scales).dequantize()
    with raises(TypeError, "dequantize: array.scales must be an array of float32, got bfloat16"):
        build(q.words, None, q.scales.astype(jnp.bfloat16)).dequantize()
    with raises(ValueError, "dequantize: array.low must have shape (3, 200) (the shape of array.words), got shape (3, 199)"):
        build(q.words, q.low[:, :199], q.scales).dequantize()
    with raises(ValueError, "dequantize: array.scales must have shape (2, 3) (one scale a block of array.words", "got shape (3, 2)"):
        build(q.words, None, q.scales.T).dequantize()
    with raises(ValueError, "dequantize: array.words must have shape (n, k), got shape (3, 200, 2)"):
        build(jnp.ones((3, 200, 2), jnp.int8), None, q.scales, block="tile").dequantize()
