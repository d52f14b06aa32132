"""project on words: exact within a panel, within its stated error of float64, straight-through gradients, and what it keeps."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena.ops import Quantized, project, quantize
from jaxarena.testing import (
    assert_close_to_oracle,
    assert_step_repeatable,
    check_modes,
    check_shard_map,
    check_vmap,
    gradient_launches,
    live_launches,
    normal,
    oracle,
    tolerance,
    value_and_gradients,
)
from tests.ops.common import DTYPES, raises

STORAGES = ("int8", "int8x2")
SHAPES = (((1,), 1, 1), ((2, 5), 129, 66), ((37,), 300, 262), ((), 128, 5))
RMS_ERROR = {"int8": 1.5e-2, "int8x2": 5e-5}

swiglu = functools.partial(project, activation="swiglu")


def decode(a, storage, block):
    return quantize(a, storage, block).dequantize(jnp.float32)


def arguments(rows, k, n, dtype=jnp.float32):
    return normal(0, (*rows, k), dtype), normal(1, (k, n), jnp.float32, scale=k**-0.5), normal(2, (*rows, n), dtype)


def naive(x, weight, residual=None, activation=None):
    z = x @ weight
    if activation:
        a, u = jnp.split(z, 2, axis=-1)
        z = jax.nn.silu(a) * u
    return z if residual is None else z + residual


def check_against_decoded(storage, x, weight, residual=None, activation=None, *, op=None):
    """Value and gradients are those, in float64, of the product of the decoded operands."""
    args = [x, weight] + ([] if residual is None else [residual])
    numbers = tuple(range(len(args)))

    def project_words(x, weight, residual=None):
        return project(x, weight, residual=residual, activation=activation, storage=storage)

    def of(op):
        return lambda *a: value_and_gradients(op, a, numbers)

    value, gradients = jax.jit(of(op or project_words))(*args)
    decoded = [decode(x, storage, "row"), decode(weight, storage, "tile"), *args[2:]]
    expected = oracle(of(functools.partial(naive, activation=activation)), *decoded)
    # Operands decode to the dtype of dy for the gradients, and swiglu's rows and their gradients are rounded to it on the way.
    stages, terms = (5 if activation else 2), max(*weight.shape, x.size // x.shape[-1])
    assert_close_to_oracle(value, expected[0], dtype=x.dtype, terms=terms, names="value")
    assert_close_to_oracle(gradients, expected[1], dtype=x.dtype, terms=terms, stages=stages, names="gradient")
    for gradient, argument in zip(gradients, args, strict=True):
        chex.assert_equal(gradient.dtype, argument.dtype)


@pytest.mark.parametrize("storage,dtype", [("int8", jnp.float32), ("int8", jnp.bfloat16), ("int8x2", jnp.float32)])
@pytest.mark.parametrize("rows,k,n", SHAPES)
def test_matches_the_oracle(rows, k, n, storage, dtype):
    x, weight, residual = arguments(rows, k, n, dtype)
    check_against_decoded(storage, x, weight, residual)


@pytest.mark.parametrize("storage,dtype", [("int8", jnp.float32), ("int8x2", jnp.bfloat16)])
def test_swiglu_matches_the_oracle(storage, dtype):
    x, weight, _ = arguments((2, 5), 140, 134, dtype)
    check_against_decoded(storage, x, weight, activation="swiglu")


@pytest.mark.parametrize("storage", STORAGES)
def test_operands_quantized_before_are_the_same_product(storage):
    args = arguments((2, 5), 140, 133)

    def before(x, weight, residual):
        return project(quantize(x, storage), quantize(weight, storage, "tile"), residual=residual, storage=storage)

    def inside(x, weight, residual):
        return project(x, weight, residual=residual, storage=storage)

    run = [jax.jit(lambda *a, f=f: value_and_gradients(f, a, (0, 1, 2)))(*args) for f in (before, inside)]
    chex.assert_trees_all_equal(*run)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantized", ["x", "weight", "both"])
def test_without_a_storage_decoded_operands_are_multiplied(quantized, dtype):
    x, weight, _ = arguments((2, 5), 140, 133, dtype)
    weight = weight.astype(dtype)

    def op(x, weight):
        x = quantize(x, "int8x2") if quantized != "weight" else x
        return project(x, quantize(weight, block="tile") if quantized != "x" else weight)

    def decoded(x, weight):
        x = quantize(x, "int8x2").dequantize() if quantized != "weight" else x
        return project(x, quantize(weight, block="tile").dequantize() if quantized != "x" else weight)

    ours, theirs = (jax.jit(lambda *a, f=f: value_and_gradients(f, a, (0, 1)))(x, weight) for f in (op, decoded))
    chex.assert_trees_all_close(ours, theirs, rtol=4 * tolerance(dtype, 140), atol=4 * tolerance(dtype, 140))


@pytest.mark.parametrize("storage", STORAGES)
def test_error_against_float64(storage):
    x, weight, _ = arguments((61,), 1037, 270)
    y = np.asarray(project(x, weight, storage=storage), np.float64)
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    exact = x @ weight
    assert np.sqrt(np.mean((y - exact) ** 2) / np.mean(exact**2)) <= RMS_ERROR[storage]
    # The bound of the module's docstring, value by value.
    levels = {"int8": 127, "int8x2": 32639}[storage]
    x_blocks = np.pad(np.abs(x), ((0, 0), (0, -1037 % 128))).reshape(61, -1, 128)
    dx = np.repeat(x_blocks.max(axis=2), 128, axis=1)[:, :1037] / levels / 2
    weight_blocks = np.pad(np.abs(weight), ((0, -1037 % 128), (0, -270 % 128))).reshape(-1, 128, 3, 128)
    dw = np.repeat(np.repeat(weight_blocks.max(axis=(1, 3)), 128, axis=0), 128, axis=1)[:1037, :270] / levels / 2
    rounding = tolerance(jnp.float32, 9, stages=4) * (np.abs(x) @ np.abs(weight))
    assert np.all(np.abs(y - exact) <= dx @ np.abs(weight) + np.abs(x) @ dw + dx @ dw + rounding)


@pytest.mark.parametrize("storage,activation", [("int8", None), ("int8x2", "swiglu")])
def test_a_quantized_result_is_the_float32_result_quantized(storage, activation):
    x, weight, _ = arguments((2, 5), 140, 282)
    for inputs in ({"storage": storage}, {}):
        run = functools.partial(project, activation=activation, **inputs)

        def op(x, weight, run=run):
            q = run(x, weight, out_storage=storage)
            assert (q.block, q.dtype, q.storage) == ("row", jnp.float32, storage)
            return q.dequantize()

        def in_two_steps(x, weight, run=run):
            return quantize(run(x, weight), storage).dequantize()

        (y, gradients), (y_two, gradients_two) = (
            jax.jit(lambda *a, f=f: value_and_gradients(f, a, (0, 1)))(x, weight) for f in (op, in_two_steps)
        )
        # Where float32 sums differ in the last bit, a word may round the other way.
        one_word = np.max(np.abs(y_two)) / {"int8": 127, "int8x2": 32639}[storage]
        assert np.max(np.abs(y - y_two)) <= 1.01 * one_word
        chex.assert_trees_all_close(gradients, gradients_two, rtol=1e-5, atol=1e-5)


def test_a_bfloat16_result_is_quantized_before_it_is_rounded():
    # 0.5 + 2**-10 is no bfloat16; as the largest of its row it decodes to itself in float32.
    x, weight = jnp.asarray([[1.0, 2.0**-10]], jnp.bfloat16), jnp.asarray([[0.5], [1.0]], jnp.bfloat16)
    q = project(x, weight, out_storage="int8")
    np.testing.assert_allclose(q.dequantize(jnp.float32), [[0.5 + 2**-10]], rtol=2**-22)


@pytest.mark.parametrize("storage", STORAGES)
def test_x_is_kept_in_words_alone_and_shared(storage):
    x, weight, residual = arguments((2, 70), 256, 130)

    def both(x, first, second):
        q = quantize(x, storage)
        return project(q, first, storage=storage) + project(q, second, storage=storage)

    def kept(op, *args):
        """Shape and dtype of each array that is kept, once however many rules keep it."""
        arrays = {id(a): a for a in jax.tree.leaves(jax.vjp(op, *args)[1])}
        return sorted((a.shape, str(a.dtype)) for a in arrays.values())

    words = 1 + (storage == "int8x2")
    x_kept = [((2, 2, 70), "float32")] + [((2, 70, 256), "int8")] * words
    weight_kept = [((2, 2), "float32")] + [((130, 256), "int8")] * words
    assert kept(lambda *a: project(*a, storage=storage), x, weight) == sorted(x_kept + weight_kept)
    assert kept(lambda *a: project(*a[:2], residual=a[2], storage=storage), x, weight, residual) == sorted(x_kept + weight_kept)
    assert kept(both, x, weight, -weight) == sorted(x_kept + 2 * weight_kept)


def test_a_frozen_argument_costs_no_launch():
    args = arguments((5,), 140, 134)
    one = functools.partial(project, storage="int8")
    forward = ["quantize_rows", "quantize_tiles", "project_quantized"]

    def with_residual(*a):
        return project(*a[:2], residual=a[2], storage="int8")

    assert live_launches(one, *args[:2]) == forward
    # A gradient needs the other operand's words, and with swiglu the rows.
    assert gradient_launches(one, args[:2], (0,)) == ["quantize_tiles", "project_quantized_dx"]
    assert gradient_launches(one, args[:2], (1,)) == ["quantize_rows", "project_quantized_dweight"]
    assert gradient_launches(with_residual, args, (2,)) == []
    kept = [*forward[:2], "project_quantized_kept", "swiglu_dz"]
    assert gradient_launches(functools.partial(swiglu, storage="int8"), args[:2], (0,)) == [*kept, "project_quantized_dx"]
    assert gradient_launches(lambda *a: one(*a, out_storage="int8x2").dequantize(), args[:2], (0,)) == [
        "quantize_tiles",
        "project_quantized_dx",
    ]
    # Without a carrier an operand takes no gradient, and the other is not kept for one.
    detached = quantize(args[1], block="tile").detach()
    assert gradient_launches(lambda x: one(x, detached), args[:1], (0,)) == ["project_quantized_dx"]
    assert gradient_launches(lambda x: project(x, detached), args[:1], (0,)) == ["project_quantized_dx"]
    x = quantize(args[0]).detach()
    assert gradient_launches(lambda w: project(x, w), args[1:2], (0,)) == ["project_quantized_dweight"]
    x = quantize(args[0])
    assert gradient_launches(lambda x, w: project(quantize(x), w), args[:2], (0,)) == ["project_dx"]


@pytest.mark.parametrize("storage", STORAGES)
def test_Q1_zero_blocks(storage):
    x, weight, _ = arguments((6,), 300, 262)
    x_zero, weight_zero = x.at[2].set(0).at[4, 128:256].set(0), jnp.zeros_like(weight)
    y, y_zero = (project(a, weight, storage=storage) for a in (x, x_zero))
    chex.assert_trees_all_equal(y_zero[2], jnp.zeros(262))
    others = np.array([0, 1, 3, 5])
    chex.assert_trees_all_equal(y_zero[others], y[others])
    chex.assert_trees_all_equal(project(x, weight_zero, storage=storage), jnp.zeros((6, 262)))
    gradients = jax.grad(lambda *a: jnp.sum(project(*a, storage=storage)), argnums=(0, 1))(x_zero, weight_zero)
    chex.assert_tree_all_finite(gradients)
    chex.assert_trees_all_equal(gradients[0], jnp.zeros_like(x))


@pytest.mark.parametrize("storage,k", [("int8", 1152), ("int8x2", 1040)])
def test_Q4_a_row_is_the_same_among_any_number_of_rows(storage, k):
    x, weight, _ = arguments((129,), k, 140)
    op = jax.jit(functools.partial(project, storage=storage))
    first = op(x[:1], weight)[0]
    for m in (8, 50, 129):
        for row in (0, m - 1):
            y = op(np.roll(np.asarray(x[:m]), row, axis=0), weight)[row]
            # Sums of panels may be fused otherwise for another number of rows: one ulp of the largest.
            np.testing.assert_allclose(y, first, rtol=0, atol=float(2**-23 * jnp.max(jnp.abs(first))))


def by_hand(words, block):
    """A Quantized of these words with all scales 1."""
    words = jnp.asarray(words, jnp.int8)
    scales = jnp.ones([-(-n // 128) for n in words.shape]) if block == "tile" else jnp.ones((-(-words.shape[1] // 128), words.shape[0]))
    return Quantized(words, None, scales, block=block, dtype=jnp.float32)


def test_Q5_accumulators_are_wide_enough():
    x = by_hand([[127] * 4096 + [1]], "row")
    weight = by_hand([[127] * 2048 + [-127] * 2048 + [1]], "tile")
    chex.assert_trees_all_equal(project(x, weight, storage="int8"), jnp.asarray([[1.0]]))
    k = 133145
    y = project(by_hand([[127] * k], "row"), by_hand([[127] * k], "tile"), storage="int8")
    np.testing.assert_allclose(y, [[k * 127.0**2]], rtol=1e-5)
    # The largest integers of two words: -32639 = 256 * -127 - 127, and 256 * -127 - 128 by hand.
    low = jnp.full((1, 128), -128, jnp.int8)
    x = Quantized(jnp.full((1, 128), -127, jnp.int8), low, jnp.ones((1, 1)), dtype=jnp.float32)
    weight = Quantized(jnp.full((1, 128), -127, jnp.int8), low, jnp.ones((1, 1)), block="tile", dtype=jnp.float32)
    np.testing.assert_allclose(project(x, weight, storage="int8x2"), [[128 * (256 * 127.0 + 128) ** 2]], rtol=2**-23)


def test_Q7_two_words_are_a_hundred_times_as_exact():
    scales = jnp.repeat(2.0 ** jnp.array([-20, 20, 0]), 128)
    x, weight, _ = arguments((9,), 384, 131)
    x, weight = x * scales, weight / scales[:, None]
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    one, two = (np.sqrt(np.mean((np.asarray(project(x, weight, storage=s)) - exact) ** 2)) for s in STORAGES)
    assert two <= one / 100
    # Low words alone, of either sign: a value of half a high word, beside its block's largest.
    x = jnp.zeros((2, 128)).at[:, 0].set(1.0).at[:, 1].set(jnp.array([1, -1]) / 254)
    y = project(x, jnp.zeros((128, 1)).at[1].set(1.0), storage="int8x2")
    np.testing.assert_allclose(y[:, 0], np.array([1, -1]) / 254, atol=1 / 32639)


@pytest.mark.parametrize("storage,bad", [("int8", jnp.nan), ("int8x2", jnp.inf)])
def test_Q9_nan_and_inf_stay_in_their_row(storage, bad):
    x, weight, _ = arguments((16,), 300, 134)
    others = np.delete(np.arange(16), 3)
    for op in (project, swiglu):
        run = functools.partial(op, storage=storage)
        y, y_bad = run(x, weight), run(x.at[3, 200].set(bad), weight)
        chex.assert_trees_all_equal(y_bad[others], y[others])
        assert np.isnan(y_bad[3]).all()
        q = run(x.at[3, 200].set(bad), weight, out_storage=storage).dequantize()
        chex.assert_trees_all_equal(q[others], run(x, weight, out_storage=storage).dequantize()[others])


TWO_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxarena.ops import Quantized, project, quantize
mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
r = np.random.default_rng(0)
x = jnp.asarray(r.standard_normal((6, 512)), jnp.float32)

def placed(q, words, scales):
    return jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), (q.words, q.scales), (words, scales))

for n in (200, 260):
    weight = jnp.asarray(r.standard_normal((512, n)), jnp.float32)
    q = quantize(weight, block="tile").detach()
    expected = project(x, q, storage="int8")
    for words, scales in ((P("d"), P()), (P(None, "d"), P()), (P(None, "d"), P(None, "d")), (P("d"), P("d") if n == 200 else P())):
        w, s = placed(q, words, scales)
        rebuilt = Quantized(w, None, s, block="tile", dtype=q.dtype, extent=q.extent)
        y = jax.jit(lambda x, q: project(x, q, storage="int8"))(x, rebuilt)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    dw = jax.jit(jax.grad(lambda w: jnp.sum(project(x, w, storage="int8") ** 2)))
    sharded = jax.device_put(weight, NamedSharding(mesh, P(None, "d")))
    np.testing.assert_allclose(dw(sharded), dw(weight), rtol=1e-4, atol=1e-3)
print("equal")
"""


@pytest.mark.slow
def test_Q10_a_sharded_weight_on_two_devices():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", TWO_DEVICES], env=environment, capture_output=True, text=True, timeout=300)
    assert run.stdout.strip() == "equal", run.stderr


def shard(q, axis, device, *, scales=True):
    """What one of two devices holds of a weight's words ``[n, k]`` cut along an axis, and of its scales if these are cut too."""

    def half(a):
        return jnp.split(a, 2, axis=axis)[device]

    words = half(q.words)
    cut = half(q.scales) if scales else q.scales
    return Quantized(words, None, cut, block="tile", dtype=q.dtype, extent=q.extent)


def test_Q10_shards_of_a_weight():
    x = normal(0, (5, 512))
    whole = quantize(normal(1, (512, 512)), block="tile")
    y = project(x, whole, storage="int8")
    columns = [project(x, shard(whole, 0, i), storage="int8") for i in (0, 1)]
    chex.assert_trees_all_close(jnp.concatenate(columns, axis=1), y, rtol=1e-6, atol=1e-5)
    summed = sum(project(x[:, 256 * i : 256 * (i + 1)], shard(whole, 1, i), storage="int8") for i in (0, 1))
    chex.assert_trees_all_close(summed, y, rtol=1e-5, atol=1e-4)
    with raises(ValueError, "project: weight.scales must have shape (2, 4)", "shard or slice them together", "got shape (4, 4)"):
        project(x, shard(whole, 0, 0, scales=False), storage="int8")
    cut = quantize(normal(1, (512, 200)), block="tile")
    with raises(ValueError, "project: weight must be sharded by whole blocks of 128, got 100 of 200 along axis 1"):
        project(x, shard(cut, 0, 0), storage="int8")
    with raises(ValueError, "project: x must be sharded by whole blocks of 128, got 100 of 200 along axis 1"):
        q = quantize(normal(0, (5, 200)))
        project(Quantized(q.words[:, :100], None, q.scales[:1], dtype=q.dtype, extent=q.extent), jnp.ones((100, 3)))


def test_J3_shard_map():
    args = arguments((4,), 140, 6)
    check_shard_map(lambda *a: project(*a[:2], residual=a[2], storage="int8"), args, (0, 1, 2), (True, False, True))
    check_shard_map(
        lambda x, w: swiglu(quantize(x), quantize(w, block="tile"), out_storage="int8").dequantize(), args[:2], (0, 1), (True, False)
    )


def test_J5_J8_modes():
    args = arguments((5,), 140, 14, jnp.bfloat16)
    check_modes(lambda *a: project(*a[:2], residual=a[2], storage="int8x2"), args, (0, 1, 2))
    args = arguments((5,), 140, 14)
    check_modes(lambda *a: swiglu(*a, storage="int8", out_storage="int8x2").dequantize(), args[:2], (0, 1))


@pytest.mark.parametrize("storage", STORAGES)
def test_J7_no_rows_and_no_sum(storage):
    for rows, k in (((2, 0), 7), ((3,), 0)):
        x, weight = jnp.zeros((*rows, k)), jnp.ones((k, 4))
        y, (dx, dweight) = value_and_gradients(functools.partial(project, storage=storage), [x, weight], (0, 1))
        chex.assert_trees_all_equal(y, jnp.zeros((*rows, 4)))
        chex.assert_shape(dx, x.shape)
        chex.assert_trees_all_equal(dweight, jnp.zeros((k, 4)))


def test_vmap_is_a_loop():
    args = normal(0, (3, 4, 140)), normal(1, (140, 5)), normal(2, (3, 4, 5))
    check_vmap(lambda *a: project(*a[:2], residual=a[2], storage="int8x2", out_storage="int8").dequantize(), args, (0, 1, 2), (0, None, 0))


def test_in_a_planned_step():
    """Blocks of two projections in a loop, the first handing on a quantized result."""

    storage = "int8x2"

    def loss(weights, h):
        def layer(h, w):
            q = quantize(h, storage)
            y = project(q, w["up"], activation="swiglu", storage=storage, out_storage=storage)
            return project(y, w["down"], residual=h, storage=storage), None

        h, _ = jax.lax.scan(layer, h, weights)
        return jnp.mean(h**2)

    weights = {"up": normal(0, (3, 140, 2 * 66), scale=0.1), "down": normal(1, (3, 66, 140), scale=0.1)}
    h = normal(9, (2, 5, 140))

    def step(weights, h):
        return jax.value_and_grad(loss)(weights, h)

    assert_step_repeatable(step, weights, h)
    planned = jax.jit(step)(weights, h)
    whole = jax.jit(jax.value_and_grad(loss_in_float))(weights, h)
    for ours, theirs in zip(jax.tree.leaves(planned), jax.tree.leaves(whole), strict=True):
        assert float(jnp.sqrt(jnp.mean((ours - theirs) ** 2) / jnp.mean(theirs**2))) <= 3 * RMS_ERROR[storage] * 2


def loss_in_float(weights, h):
    for i in range(3):
        h = project(swiglu(h, weights["up"][i]), weights["down"][i], residual=h)
    return jnp.mean(h**2)


def test_errors_name_the_argument():
    x, weight = jnp.ones((2, 200)), jnp.ones((200, 5))
    xq, wq = quantize(x), quantize(weight, block="tile")
    with raises(ValueError, "project: storage must be one of None, 'int8', 'int8x2', got 'fp8'"):
        project(x, weight, storage="fp8")
    with raises(ValueError, "project: out_storage must be one of None, 'int8', 'int8x2', got 'bf16'"):
        project(x, weight, out_storage="bf16")
    with raises(ValueError, "project: x must be quantized with block='row', got block='tile'"):
        project(quantize(x, block="tile"), weight)
    with raises(ValueError, "project: weight must be quantized with block='tile', got block='row'"):
        project(x, quantize(weight))
    with raises(ValueError, "project: x must be stored as 'int8x2' with storage='int8x2', got a Quantized stored as 'int8'"):
        project(xq, weight, storage="int8x2")
    with raises(ValueError, "project: weight must have 201 elements along axis 0 (the last axis of x), got shape (200, 5)"):
        project(jnp.ones((2, 201)), wq, storage="int8")
    with raises(TypeError, "project: weight must have the dtype of x, float32, got bfloat16"):
        project(xq, weight.astype(jnp.bfloat16))
    with raises(TypeError, "project: residual must have the dtype of x, float32, got bfloat16"):
        project(xq, wq, residual=jnp.ones((2, 5), jnp.bfloat16), storage="int8")
    with raises(ValueError, "project: weight must have an even number of columns with activation 'swiglu'", "got 5"):
        swiglu(xq, wq)
