"""Key-value caches: prefill, decode and continuations against one pass, ragged batches, quantized storage, overflow, in-place writes."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxarena as ja
from jaxarena.ops.attention import attention
from jaxarena.ops.kv_cache import KVCache, append, attend
from jaxarena.storage import dequantize
from jaxarena.testing import assert_step_repeatable, gradient_launches, integers, normal, poison, tolerance
from tests.ops.common import DTYPES, raises

STORAGES = (None, "int8", "int8x2")
# How far a value may be off, of the largest magnitude in its block of 128.
OFF = {None: 0.0, "int8": 1 / 254, "int8x2": 1 / 65278}


def tokens(seed, batch, time, heads=4, key_heads=2, d=6, dv=5, dtype=jnp.float32):
    """q, k, v."""
    sizes = ((heads, d), (key_heads, d), (key_heads, dv))
    return [normal(3 * seed + i, (batch, time, h, size), dtype) for i, (h, size) in enumerate(sizes)]


def empty(batch, capacity, q, k, v, storage=None, fill=None):
    cache = KVCache.create(batch, capacity, k.shape[2], k.shape[3], v.shape[3], k.dtype, storage)
    if fill is None:
        return cache
    # A cache whose unused rows hold what some other program left.
    kept = jax.tree.map(lambda a: poison(a.shape, a.dtype), (cache.k, cache.v))
    return KVCache(*kept, cache.lengths)


@functools.partial(jax.jit, donate_argnums=0)
def step(cache, q, k, v):
    cache = append(cache, k, v)
    return cache, attend(q, cache)


def values(cache):
    """k and v of a cache as arrays."""
    return [a if cache.storage is None else dequantize(*a) for a in (cache.k, cache.v)]


@pytest.mark.parametrize("storage", STORAGES)
def test_A1_A5_prefill_continuation_and_decode_are_one_pass(storage):
    batch, time = 2, 134
    q, k, v = tokens(0, batch, time)
    cache, out = empty(batch, 137, q, k, v, storage, fill="poison"), []
    for start, stop in ((0, 131), (131, 133), (133, 134)):
        cache, o = step(cache, *(a[:, start:stop] for a in (q, k, v)))
        out.append(o)
    chex.assert_trees_all_equal(cache.lengths, jnp.full(batch, time, jnp.int32))
    # Values off by so much move the result as much; keys move scores, which are of order one.
    limit = tolerance(jnp.float32, 6 * time, stages=2) + 8 * OFF[storage]
    chex.assert_trees_all_close(jnp.concatenate(out, axis=1), attention(q, k, v), atol=limit)
    # And exactly what plain attention makes of the values that the cache holds.
    k, v = (a[:, :time] for a in values(cache))
    chex.assert_trees_all_close(jnp.concatenate(out, axis=1), attention(q, k, v), rtol=1e-5, atol=1e-5)


_attend = jax.jit(attend, static_argnames="window")
_attention = jax.jit(attention, static_argnames="window")


@settings(max_examples=3, deadline=None)
@given(
    st.sampled_from(STORAGES),
    st.lists(st.integers(0, 40), min_size=3, max_size=3),
    st.lists(st.integers(0, 9), min_size=3, max_size=3),
    st.sampled_from([None, 5]),
)
def test_ragged_batches_are_their_sequences(storage, first, second, window):
    q, k, v = tokens(1, 3, 49)
    cache = empty(3, 53, q, k, v, storage)
    for start, counts, rows in ((np.zeros(3, int), first, 40), (first, second, 9)):
        index = jnp.asarray(np.minimum(np.asarray(start)[:, None] + np.arange(rows), 48))[:, :, None, None]
        mine = [jnp.take_along_axis(a, index, axis=1) for a in (q, k, v)]
        counts = jnp.asarray(counts, jnp.int32)
        cache = append(cache, *mine[1:], lengths=counts)
        o = _attend(mine[0], cache, lengths=counts, window=window)
        kept = values(cache)
        for i, n in enumerate(counts):
            end = int(start[i]) + int(n)
            assert int(cache.lengths[i]) == end
            # Padded to one length, so that it compiles once: a causal row does not see what follows.
            alone = _attention(q[i : i + 1], *(a[i : i + 1, :49] for a in kept), window=window)[:, int(start[i]) : end]
            chex.assert_trees_all_close(o[i : i + 1, : int(n)], alone, rtol=1e-5, atol=1e-5)
            chex.assert_trees_all_equal(o[i, int(n) :], jnp.zeros_like(o[i, int(n) :]))


@pytest.mark.parametrize(("storage", "dtype"), [(None, jnp.float32), (None, jnp.bfloat16), ("int8", jnp.bfloat16), ("int8x2", jnp.float32)])
def test_D12_N2_every_sequence_has_the_bits_it_has_alone(storage, dtype):
    batch, turns = 3, 20
    q, k, v = tokens(2, batch, turns, 3, 1, 32, 16, dtype)
    start = tokens(3, batch, 250, 3, 1, 32, 16, dtype)
    cache = append(empty(batch, 275, q, k, v, storage), *start[1:], lengths=jnp.asarray([250, 3, 120], jnp.int32))
    alone = [jax.tree.map(lambda a, i=i: a[i : i + 1] + 0, cache) for i in range(batch)]
    for t in range(turns):
        now = [a[:, t : t + 1] for a in (q, k, v)]
        cache, o = step(cache, *now)
        for i in range(batch):
            alone[i], mine = step(alone[i], *(a[i : i + 1] for a in now))
            chex.assert_trees_all_equal(mine, o[i : i + 1])
    for i in range(batch):
        chex.assert_trees_all_equal(alone[i], jax.tree.map(lambda a, i=i: a[i : i + 1], cache))


@pytest.mark.parametrize("storage", STORAGES)
def test_tokens_without_room_are_dropped(storage):
    q, k, v = tokens(4, 3, 5)
    before = append(empty(3, 7, q, k, v, storage), k, v, lengths=jnp.asarray([5, 4, 0], jnp.int32))
    after = append(before, *tokens(5, 3, 5)[1:], lengths=jnp.asarray([5, 2, -3], jnp.int32))
    chex.assert_trees_all_equal(after.lengths, jnp.asarray([7, 6, 0], jnp.int32))
    wide = append(empty(3, 12, q, k, v, storage), k, v, lengths=before.lengths)
    wide = append(wide, *tokens(5, 3, 5)[1:], lengths=jnp.asarray([5, 2, 0], jnp.int32))
    chex.assert_trees_all_equal((after.k, after.v), jax.tree.map(lambda a: a[:, :7], (wide.k, wide.v)))
    full = append(after, k, v, lengths=jnp.asarray([5, 0, 0], jnp.int32))
    chex.assert_trees_all_equal(full, after)


def test_setting_lengths_back_drops_the_last_tokens():
    q, k, v = tokens(6, 2, 9)
    cache = append(empty(2, 11, q, k, v), k, v)
    cache = dataclasses.replace(cache, lengths=jnp.asarray([4, 6], jnp.int32))
    cache, o = step(cache, q[:, :2], k[:, 7:], v[:, 7:])
    for i, n in enumerate((4, 6)):
        own = [jnp.concatenate([a[i : i + 1, :n], a[i : i + 1, 7:]], axis=1) for a in (k, v)]
        chex.assert_trees_all_close(o[i : i + 1], attention(q[i : i + 1, :2], *own), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("storage", ["int8", "int8x2"])
def test_quantized_storage_is_as_close_as_it_says(storage):
    # Heads of two blocks, the second 2^20 times the first, and a block of zeros.
    k = normal(7, (2, 5, 3, 160)) * jnp.where(jnp.arange(160) < 128, 1.0, 2.0**20)
    k = k.at[1, 2, 0, :128].set(0.0)
    v = normal(8, (2, 5, 3, 7))
    cache = append(KVCache.create(2, 6, 3, 160, 7, storage=storage), k, v)
    assert cache.k.scales.shape == (2, 6, 3, 2) and cache.v.scales.shape == (2, 6, 3, 1)
    for kept, exact in zip(values(cache), (k, v), strict=True):
        for first in range(0, exact.shape[-1], 128):
            x, y = kept[:, :5, :, first : first + 128], exact[..., first : first + 128]
            error, largest = jnp.max(jnp.abs(x - y), axis=-1), jnp.max(jnp.abs(y), axis=-1)
            assert bool(jnp.all(error <= largest * OFF[storage] * 1.01))


def test_a_constant_value_comes_back_from_words():
    q, k, _ = tokens(9, 2, 130, d=16)
    v = jnp.full((2, 130, 2, 5), 3.0)
    for storage in ("int8", "int8x2"):
        _, o = step(empty(2, 131, q, k, v, storage), q, k, v)
        chex.assert_trees_all_close(o, jnp.full_like(o, 3.0), rtol=1e-5)


@pytest.mark.parametrize("storage", STORAGES)
def test_P7_tokens_are_written_in_place(storage):
    q, k, v = tokens(10, 2, 3, d=32, dv=32, dtype=jnp.bfloat16)
    cache = empty(2, 4099, q, k, v, storage)
    size = sum(a.nbytes for a in jax.tree.leaves(cache))
    one = sum(a.nbytes for a in jax.tree.leaves(cache.k))
    planned = ja.jit(lambda cache, q, k, v: step.__wrapped__(cache, q, k, v), donate_argnums=0)
    arena = planned.plan(cache, q, k, v).allocate()
    for lowered in (step.lower(cache, q, k, v), planned.lower(arena, cache, q, k, v)):
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= size
        assert memory.temp_size_in_bytes < one / 4


def test_J6_a_step_compiles_once():
    q, k, v = tokens(11, 2, 8)
    traced = jax.jit(chex.assert_max_traces(lambda c, q, k, v: step.__wrapped__(c, q, k, v), n=1))
    cache = empty(2, 8, q, k, v)
    for t in range(5):
        cache, _ = traced(cache, *(a[:, t : t + 1] for a in (q, k, v)))
    assert traced._cache_size() == 1


@pytest.mark.parametrize("storage", [None, "int8x2"])
def test_in_a_planned_step(storage):
    q, k, v = tokens(12, 2, 9, d=32, dv=32)
    cache = append(empty(2, 139, q, k, v, storage), *tokens(13, 2, 130, d=32, dv=32)[1:], lengths=jnp.asarray([130, 17], jnp.int32))

    def decode(cache, q, k, v, counts):
        cache = append(cache, k * 2, v * 2, lengths=counts)
        return cache.lengths, attend(q * 2, cache, lengths=counts, window=40)

    args = (cache, q, k, v, jnp.asarray([9, 5], jnp.int32))
    assert_step_repeatable(decode, *args)
    planned = ja.jit(decode)
    out, _ = planned(planned.plan(*args).allocate(255), *args)
    chex.assert_trees_all_close(out, jax.jit(decode)(*args), rtol=1e-5, atol=1e-6)


def test_gradients_go_to_queries_and_a_float_cache():
    q, k, v = tokens(14, 2, 3)
    cache = append(empty(2, 9, q, k, v), k, v)
    got = jax.grad(lambda q, k, v: jnp.sum(attend(q, KVCache(k, v, cache.lengths)) ** 2), argnums=(0, 1, 2))(q, cache.k, cache.v)
    wanted = jax.grad(lambda *args: jnp.sum(attention(*args) ** 2), argnums=(0, 1, 2))(q, k, v)
    chex.assert_trees_all_close([got[0], got[1][:, :3], got[2][:, :3]], list(wanted), rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_equal(got[1][:, 3:], jnp.zeros_like(got[1][:, 3:]))
    assert gradient_launches(lambda q: attend(q, cache), [q], (0,))[-1] == "attention_query_pass"


def test_what_has_no_gradient_says_so():
    q, k, v = tokens(15, 1, 2)
    cache = append(empty(1, 3, q, k, v, "int8"), k, v)
    with raises(TypeError, "attend: a quantized cache, or one of layers, has no gradient: to train, use a float cache"):
        jax.grad(lambda q: jnp.sum(attend(q, cache)))(q)
    with raises(TypeError, "append: writing to a cache has no gradient"):
        jax.grad(lambda k: jnp.sum(append(empty(1, 3, q, k, v), k, v).k))(k)


@pytest.mark.parametrize("storage", STORAGES)
def test_vmap_is_a_loop(storage):
    q, k, v = (jnp.stack([a, a + 1.0]) for a in tokens(16, 2, 3))
    caches = jax.vmap(lambda *args: empty(2, 5, *args, storage))(q, k, v)
    caches = dataclasses.replace(caches, lengths=integers(16, (2, 2), 0, 4))
    mapped = jax.jit(jax.vmap(step.__wrapped__))(caches, q, k, v)
    looped = [step(jax.tree.map(lambda a, i=i: a[i] + 0, caches), q[i], k[i], v[i]) for i in range(2)]
    chex.assert_trees_all_close(mapped, jax.tree.map(lambda *parts: jnp.stack(parts), *looped), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("storage", STORAGES)
def test_J3_shard_map(storage):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    q, k, v = tokens(17, 2, 3)
    cache = empty(2, 5, q, k, v, storage)
    mapped = jax.jit(jax.shard_map(step.__wrapped__, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec, spec)))
    chex.assert_trees_all_close(mapped(cache, q, k, v), jax.jit(step.__wrapped__)(cache, q, k, v), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("storage", "dtype"), [(None, jnp.bfloat16), ("int8", jnp.float32), ("int8x2", jnp.bfloat16)])
def test_J5_J8_modes(storage, dtype):
    q, k, v = tokens(18, 2, 3, dtype=dtype)
    counts = jnp.asarray([2, 3], jnp.int32)

    @jax.jit
    def run(cache):
        cache = append(cache, k, v, lengths=counts)
        return cache, attend(q, cache, lengths=counts, softcap=2.0, return_lse=True)

    cache = empty(2, 5, q, k, v, storage)
    plain = run(cache)
    with jax.numpy_dtype_promotion("strict"):
        strict = run(KVCache.create(2, 5, 2, 6, 5, dtype, storage))
    with jax.enable_x64(True):
        wide = run(KVCache.create(2, 5, 2, 6, 5, dtype, storage))
    for other in (strict, wide):
        chex.assert_trees_all_equal(plain, other, strict=True)


@pytest.mark.parametrize("storage", STORAGES)
def test_J7_empty(storage):
    q, k, v = tokens(19, 0, 3)
    cache, o = step(empty(0, 5, q, k, v, storage), q, k, v)
    chex.assert_shape((o, cache.lengths), [(0, 3, 4, 5), (0,)])
    q, k, v = tokens(19, 2, 0)
    cache, o = step(empty(2, 5, q, k, v, storage), q, k, v)
    chex.assert_shape(o, (2, 0, 4, 5))
    chex.assert_trees_all_equal(cache.lengths, jnp.zeros(2, jnp.int32))


@pytest.mark.slow
@pytest.mark.parametrize(("storage", "dtype"), [("int8", jnp.float32), *((None, dtype) for dtype in DTYPES)])
@pytest.mark.parametrize("time", [65536, 65537])
def test_N5_decode_against_a_long_cache(time, storage, dtype):
    q, k, v = tokens(20, 1, time, 2, 1, 8, 8, dtype)
    cache = append(empty(1, time, q, k, v, storage), k[:, :-1], v[:, :-1])
    cache, o = step(cache, *(a[:, -1:] for a in (q, k, v)))
    wide = [np.asarray(a, np.float64)[0] for a in (q[:, -1:], *values(cache))]
    s = np.einsum("hd,kd->hk", wide[0][0], wide[1][:, 0]) * 8**-0.5
    p = np.exp(s - s.max(axis=1, keepdims=True))
    expected = p @ wide[2][:, 0] / p.sum(axis=1, keepdims=True)
    # The average of so many values is near 0: the tolerance is that of its terms.
    limit = tolerance(dtype, time) * (0.1 + float(np.abs(expected).max()))
    chex.assert_trees_all_close(np.asarray(o[0, 0], np.float64), expected, atol=limit)


def test_errors_name_the_argument():
    q, k, v = tokens(21, 2, 3)
    cache = empty(2, 5, q, k, v)
    with raises(TypeError, "KVCache.create: capacity must be a Python int, got float 5.0"):
        KVCache.create(2, 5.0, 1, 4)
    with raises(ValueError, "KVCache.create: batch must be at least 1, got -1"):
        KVCache.create(-1, 5, 1, 4)
    with raises(ValueError, "KVCache.create: storage must be one of None, 'int8', 'int8x2', got 'int4'"):
        KVCache.create(2, 5, 1, 4, storage="int4")
    with raises(TypeError, "KVCache.create: dtype must be bfloat16 or float32, got float16"):
        KVCache.create(2, 5, 1, 4, dtype=jnp.float16)
    with raises(ValueError, "append: k must have at most as many tokens as the cache's capacity 5, got 6"):
        append(cache, *tokens(21, 2, 6)[1:])
    with raises(TypeError, "append: v must have the dtype of cache.v, float32, got bfloat16"):
        append(cache, k, v.astype(jnp.bfloat16))
    with raises(ValueError, "append: v must have shape (2, 3, 2, 5) (batch, heads and size of the cache), got shape (2, 2, 2, 5)"):
        append(cache, k, v[:, :2])
    with raises(ValueError, "append: lengths must have shape (2,) (the batch of the cache), got shape (3,)"):
        append(cache, k, v, lengths=jnp.ones(3, jnp.int32))
    with raises(TypeError, "attend: q must be bfloat16 or float32, got int32"):
        attend(q.astype(jnp.int32), cache)
    with raises(TypeError, "attend: k must have the dtype of q, bfloat16, got float32"):
        attend(q.astype(jnp.bfloat16), cache)
    with raises(ValueError, "attend: q must have a multiple of k's heads, got 3 query heads and 2 key heads"):
        attend(q[:, :, :3], cache)
    with raises(ValueError, "attend: lengths must have shape (2,) (the batch of the cache), got shape (3,)"):
        attend(q, cache, lengths=jnp.ones(3, jnp.int32))


@pytest.mark.parametrize("storage", [None, "int8"])
def test_a_cache_of_layers_is_its_layers(storage):
    """Also where the layer is only known when it runs; layers that are not written stay, and out of range is the nearest."""
    q, k, v = tokens(0, 2, 7)
    stacked = KVCache.create(2, 9, 2, 6, 5, jnp.float32, storage, layers=3)
    stacked = jax.tree.map(lambda a: a if a.dtype == jnp.int32 else poison(a.shape, a.dtype), stacked)
    assert (stacked.layers, stacked.capacity, stacked.storage) == (3, 9, storage)

    def use(cache, layer, start, stop):
        cache = append(cache, k[:, start:stop], v[:, start:stop], layer=layer)
        return cache, attend(q[:, start:stop], cache, layer=layer)

    alone = append(KVCache.create(2, 9, 2, 6, 5, jnp.float32, storage), k[:, :4], v[:, :4])
    first = attend(q[:, :4], alone)
    alone = append(alone, k[:, 4:], v[:, 4:])
    second = attend(q[:, 4:], alone)
    for layer, static in ((1, (1, 2, 3)), (jnp.int32(1), (2, 3))):
        once, o = jax.jit(use, static_argnums=static)(stacked, layer, 0, 4)
        chex.assert_trees_all_close(o, first, rtol=1e-6, atol=1e-6)
        twice, o = use(once, layer, 4, 7)
        chex.assert_trees_all_close(o, second, rtol=1e-6, atol=1e-6)
        chex.assert_trees_all_equal(twice.lengths, jnp.asarray([[0, 0], [7, 7], [0, 0]], jnp.int32))
        for whole, before, one in zip(*map(jax.tree.leaves, (twice, stacked, alone)), strict=True):
            chex.assert_trees_all_equal(jax.tree.map(lambda a: a[jnp.asarray([0, 2])], (whole,)), (before[jnp.asarray([0, 2])],))
            used = one.ndim > 1
            chex.assert_trees_all_equal(whole[1, :, :7] if used else whole[1], one[:, :7] if used else one)
    chex.assert_trees_all_equal(use(stacked, jnp.int32(5), 0, 4)[0].lengths[2], jnp.asarray([4, 4], jnp.int32))


def test_layers_that_do_not_fit():
    q, k, v = tokens(0, 2, 3)
    one, three = KVCache.create(2, 9, 2, 6, 5, jnp.float32), KVCache.create(2, 9, 2, 6, 5, jnp.float32, layers=3)
    for call in (lambda cache, layer: append(cache, k, v, layer=layer), lambda cache, layer: attend(q, cache, layer=layer)):
        with pytest.raises(ValueError, match="layer must be None unless the cache was made with layers, got 1"):
            call(one, 1)
        with pytest.raises(ValueError, match="layer must be given for a cache of 3 layers, got None"):
            call(three, None)
        with pytest.raises(TypeError, match="layer"):
            call(three, jnp.float32(1))
    with pytest.raises(TypeError, match="a quantized cache, or one of layers, has no gradient"):
        jax.grad(lambda q: jnp.sum(attend(q, three, layer=0)))(q)
