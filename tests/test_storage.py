from __future__ import annotations

import functools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jaxarena.arena import quant_parts
from jaxarena.panels import Layout, View, columns, full_view, row_spans, slice_groups, slice_rows
from jaxarena.storage import DTYPE_OF_STORAGE, STORAGE_OF_DTYPE, decode, dequantize, encode, load, quantize, write

RAW = list(DTYPE_OF_STORAGE)


def read(arena: jax.Array, *args: Any) -> tuple[jax.Array, jax.Array]:
    """What a launch does with an operand: loads it, and takes it through one barrier with the arena."""
    x, arena = lax.optimization_barrier((load(arena, *args), arena))
    return x, arena


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], storage: str) -> np.ndarray:
    """Any bit pattern of the storage: NaNs with payloads, infinities and subnormals among them."""
    dtype = DTYPE_OF_STORAGE[storage]
    if storage == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if not math.prod(shape):
        return np.zeros(shape, dtype)
    return np.frombuffer(rng.bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)


def bits(x) -> np.ndarray:
    """The bytes, so that NaNs compare."""
    return np.ascontiguousarray(np.asarray(x)).reshape(-1).view(np.uint8)


def array(rng: np.random.Generator, layout: Layout) -> np.ndarray:
    return rng.normal(size=layout.shape).astype(np.float32) if layout.quantized else random_bits(rng, layout.shape, layout.storage)


def row_of(view: View, panel: int, group: int, row: int) -> int:
    return view.row + panel * view.panel_stride + group * view.group_stride + row


@st.composite
def layouts(draw, storages=(*RAW, "int8", "int8x2")) -> Layout:
    leading = draw(st.lists(st.integers(1, 3), max_size=2))
    rows = draw(st.sampled_from([1, 5, 8, 13, 16]))
    columns_ = draw(st.sampled_from([1, 7, 32, 64, 128, 200, 256, 300]))
    storage = draw(st.sampled_from(storages))
    row_ndim = draw(st.sampled_from([1] if storage.startswith("int8") else [0, 1, 2]))
    shape = (*leading, rows, columns_) if row_ndim < 2 else (*leading, rows, columns_, 3)
    return Layout(tuple(shape), storage, row_ndim)


quantize_jit, dequantize_jit = jax.jit(quantize, static_argnums=1), jax.jit(dequantize, static_argnums=3)
encode_jit, decode_jit = jax.jit(encode, static_argnums=1), jax.jit(decode, static_argnums=(1, 2))
read_jit, write_jit = jax.jit(read, static_argnums=(2, 3, 4)), jax.jit(write, static_argnums=(2, 3, 5))


@settings(max_examples=25, deadline=None)
@given(layouts(RAW), st.integers(0, 99))
def test_raw_round_trip_keeps_every_bit(layout, seed):
    x = array(np.random.default_rng(seed), layout)
    rows = encode_jit(jnp.asarray(x), layout)
    chex.assert_shape(rows, (layout.bytes // 128, 128))
    y = decode_jit(rows, layout)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(bits(y), bits(x))


@pytest.mark.parametrize("shape", [(2, 13, 70), (13, 150), (3, 16, 32)])
def test_bytes_lie_as_the_layout_says(shape):
    layout = Layout(shape, "f32", 1)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    rows = np.asarray(encode(jnp.asarray(x), layout))
    expected = np.zeros_like(rows)
    view = full_view(layout)
    for group, matrix in enumerate(x.reshape(-1, *shape[-2:])):
        for r, values in enumerate(matrix):
            raw = np.frombuffer(values.tobytes(), np.int8)
            for panel in range(layout.panels):
                piece = raw[128 * panel : 128 * panel + 128]
                expected[row_of(view, panel, group, r), : len(piece)] = piece
    np.testing.assert_array_equal(rows, expected)


def test_flat_bytes_are_in_order():
    x = np.arange(300, dtype=np.float32).reshape(3, 100)
    rows = np.asarray(encode(jnp.asarray(x), Layout((3, 100), "f32", 0)))
    assert rows.tobytes() == x.tobytes() + bytes(2048 - 1200)


@pytest.mark.parametrize(("storage", "row_ndim"), [("f32", 1), ("bool", 0), ("int8x2", 1)])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (2, 0, 5)])
def test_zero_sizes(shape, storage, row_ndim):
    layout = Layout(shape, storage, row_ndim)
    x = jnp.zeros(shape, DTYPE_OF_STORAGE.get(storage, jnp.float32))
    arena = jnp.ones((8, 128), jnp.int8)
    y, arena = read(write(arena, 0, layout, full_view(layout), x), 0, layout, full_view(layout), 0)
    chex.assert_trees_all_equal(y, x)
    chex.assert_trees_all_equal(arena, jnp.ones((8, 128), jnp.int8))
    assert encode(x, layout).shape == (0, 128)


def test_dtypes_have_one_storage_each():
    assert all(STORAGE_OF_DTYPE[jnp.dtype(DTYPE_OF_STORAGE[s])] == s for s in RAW)
    assert np.dtype(np.float64) not in STORAGE_OF_DTYPE


# Views: what a write changes, and what it leaves.


@st.composite
def parts(draw) -> tuple[Layout, Layout, View]:
    """An array's layout, and a part of it."""
    home = draw(layouts().filter(lambda layout: layout.row_ndim == 1))
    layout, view = home, full_view(home)
    for cut in draw(st.permutations(["columns", "rows", "groups"])):
        found = None
        if cut == "columns":
            step = 128 // layout.itemsize
            start = draw(st.sampled_from(range(0, layout.columns, step)))
            found = columns(layout, view, start, draw(st.sampled_from([*range(start + step, layout.columns, step), layout.columns])))
        elif cut == "rows":
            start = draw(st.sampled_from(range(0, layout.rows_per_group, 8)))
            stops = [*range(start + 8, layout.rows_per_group, 8), layout.rows_per_group]
            found = slice_rows(layout, view, start, draw(st.sampled_from(stops))) if len(layout.shape) > 1 else None
        elif len(layout.shape) > 2:
            found = slice_groups(layout, view, draw(st.integers(0, layout.shape[0] - 1)), layout.shape[0])
        layout, view = found or (layout, view)
    return home, layout, view


def written_bytes(home: Layout, layout: Layout, view: View, arena_bytes: int, row: int) -> np.ndarray:
    """Which bytes of the arena a write of the part must set, pads included, by the formula, one row at a time."""
    mask = np.zeros(arena_bytes, bool)
    base = 128 * row
    words, low, scales = quant_parts(home, 0) if layout.quantized else (0, None, None)
    for panel in range(layout.panels):
        for group in range(layout.groups):
            for r in range(layout.padded_rows):
                at = row_of(view, panel, group, r)
                for part in (words, low):
                    if part is not None:
                        mask[base + part + 128 * at : base + part + 128 * at + 128] = True
                if scales is not None:
                    mask[base + scales + 4 * at : base + scales + 4 * at + 4] = True
    if scales is not None:
        mask[base + scales + 4 * home.part_rows : base + home.bytes] = True  # past the last scale
    return mask


@settings(max_examples=15, deadline=None)
@given(parts(), st.integers(0, 99))
def test_write_set_and_pads_on_a_random_arena(part, seed):
    home, layout, view = part
    rng = np.random.default_rng(seed)
    before, after = 8 * int(rng.integers(0, 3)), 8 * int(rng.integers(0, 3))
    home_rows = home.bytes // 128
    arena = rng.integers(-128, 128, (before + home_rows + after, 128)).astype(np.int8)
    x = array(rng, layout)
    result = write_jit(jnp.asarray(arena), before, layout, view, jnp.asarray(x), home_rows)
    inside = written_bytes(home, layout, view, arena.size, before)
    changed = np.asarray(result).reshape(-1)
    np.testing.assert_array_equal(changed[~inside], arena.reshape(-1)[~inside])
    # Written over another arena, the same bytes: the pads too, so they do not come from what was there.
    poisoned = write_jit(jnp.full_like(result, -1), before, layout, view, jnp.asarray(x), home_rows)
    np.testing.assert_array_equal(np.asarray(poisoned).reshape(-1)[inside], changed[inside])
    alone = np.asarray(encode_jit(jnp.asarray(x), layout))
    words_of_alone = alone[: layout.part_rows]
    at = [before + r for start, stop in row_spans(layout, view) for r in range(start, stop)]
    np.testing.assert_array_equal(np.asarray(poisoned)[at], words_of_alone)
    y, unchanged = read_jit(result, before, layout, view, home_rows)
    np.testing.assert_array_equal(np.asarray(unchanged), np.asarray(result))
    np.testing.assert_array_equal(bits(y), bits(decode_jit(jnp.asarray(alone), layout)))
    # The arena of 32-bit elements, as the CPU has it, holds and gives the same bytes.
    wide = write_jit(jnp.asarray(arena.view(np.uint32)), before, layout, view, jnp.asarray(x), home_rows)
    np.testing.assert_array_equal(np.asarray(wide).view(np.int8), np.asarray(result))
    np.testing.assert_array_equal(bits(read_jit(wide, before, layout, view, home_rows)[0]), bits(y))


@settings(max_examples=15, deadline=None)
@given(parts(), st.integers(0, 99))
def test_a_part_reads_what_the_whole_holds(part, seed):
    home, layout, view = part
    arena = encode_jit(jnp.asarray(array(np.random.default_rng(seed), home)), home)
    whole = np.asarray(decode_jit(arena, home))
    values, _ = read_jit(arena, 0, layout, view, arena.shape[0])
    # Which values those are, by arithmetic on rows: value [group, row, column] lies at a row and byte that the view's formula gives.
    at = {}
    for index in np.ndindex(home.groups, home.rows_per_group, home.columns):
        panel, byte = divmod(index[2] * home.itemsize, 128)
        at[row_of(full_view(home), panel, *index[:2]), byte] = whole.reshape(home.groups, home.rows_per_group, home.columns)[index]
    expected = []
    for group, row, column in np.ndindex(layout.groups, layout.rows_per_group, layout.columns):
        panel, byte = divmod(column * layout.itemsize, 128)
        expected.append(at[row_of(view, panel, group, row), byte])
    np.testing.assert_array_equal(bits(values), bits(np.array(expected)))


@pytest.mark.parametrize("storage", ["f32", "bf16"])
def test_joined_and_split_by_columns(storage):
    rng = np.random.default_rng(3)
    home = Layout((2, 13, 256), storage, 1)
    x = jnp.asarray(rng.normal(size=home.shape), DTYPE_OF_STORAGE[storage])
    arena = jnp.full((home.bytes // 128, 128), -1, jnp.int8)
    for start, stop in ((0, 64), (64, 128), (128, 256)):
        arena = write(arena, 0, *columns(home, full_view(home), start, stop), x[..., start:stop])
    chex.assert_trees_all_equal(arena, encode(x, home))
    heads, _ = read(arena, 0, *columns(home, full_view(home), 64, 128), arena.shape[0])
    chex.assert_trees_all_equal(heads, x[..., 64:128])


# Compiled: traced rows, in place.


@pytest.mark.parametrize("storage", ["f32", "bf16", "int8", "int8x2"])
def test_scan_over_slots_with_traced_rows(storage):
    layout = Layout((13, 200), storage, 1)
    dtype = DTYPE_OF_STORAGE.get(storage, jnp.float32)
    slots, slot_rows = 4, layout.bytes // 128
    x = jnp.asarray(np.random.default_rng(4).normal(size=(slots, *layout.shape)), dtype)

    def stacked(arena, x):
        def put(arena, turn):
            return write(arena, 8 + turn * slot_rows, layout, full_view(layout), x[turn]), None

        def get(arena, turn):
            y, arena = read(arena, 8 + turn * slot_rows, layout, full_view(layout), slot_rows)
            return arena, y

        turns = jnp.arange(slots)
        arena, _ = lax.scan(put, arena, turns)
        return lax.scan(get, arena, turns[::-1])

    arena = jnp.full((16 + slots * slot_rows, 128), -1, jnp.int8)
    arena, y = jax.jit(stacked)(arena, x)
    expected = jnp.stack([decode(encode(x[k], layout), layout) for k in range(slots)])
    chex.assert_trees_all_equal(y[::-1].astype(jnp.float32), expected.astype(jnp.float32))
    chex.assert_trees_all_equal(arena[:8], jnp.full((8, 128), -1, jnp.int8))
    chex.assert_trees_all_equal(arena[-8:], jnp.full((8, 128), -1, jnp.int8))


def chain(arena, x, *, layout, scan):
    """Writes x to the first of three homes, then passes it on, doubled, from home to home."""
    rows = layout.bytes // 128
    view = full_view(layout)

    def hop(arena, turn):
        y, arena = read(arena, turn % 3 * rows, layout, view, rows)
        return write(arena, (turn + 1) % 3 * rows, layout, view, y + y), None

    arena = write(arena, 0, layout, view, x)
    if scan:
        arena, _ = lax.scan(hop, arena, jnp.arange(6))
    else:
        for turn in range(6):
            arena, _ = hop(arena, turn)
    y, arena = read(arena, 0, layout, view, rows)
    return arena, y


@pytest.mark.parametrize("element", [jnp.int8, jnp.uint32])
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("storage", ["f32", "bf16"])
@pytest.mark.parametrize("shape", [(4, 64, 256), (3, 50, 70), (512, 32)])
def test_P7_the_arena_is_updated_in_place(shape, storage, scan, element):
    layout = Layout(shape, storage, 1)
    # The arena is 40 times an array: a copy of it cannot hide among the temporaries.
    arena_shape = (40 * layout.bytes // 128, 128 // jnp.dtype(element).itemsize)
    poison = jnp.asarray(-1, jnp.int32).astype(element)
    x = jnp.asarray(np.random.default_rng(5).integers(-8, 8, shape), DTYPE_OF_STORAGE[storage])
    step = jax.jit(functools.partial(chain, layout=layout, scan=scan), donate_argnums=0)
    memory = step.lower(jax.ShapeDtypeStruct(arena_shape, element), x).compile().memory_analysis()
    arena_bytes = 40 * layout.bytes
    assert memory.alias_size_in_bytes == arena_bytes
    assert memory.temp_size_in_bytes <= arena_bytes / 10
    _, y = step(jnp.full(arena_shape, poison), x)
    chex.assert_trees_all_equal(y, x * jnp.asarray(64, x.dtype))


@pytest.mark.parametrize("storage", ["f32", "bf16"])
def test_P6_overlapping_moves(storage):
    # A read of rows 0 to 48 written to rows 16 to 64, then a reshape and chained slices: as computed op by op.
    dtype = DTYPE_OF_STORAGE[storage]
    layout = Layout((16, 3 * 128 // dtype.itemsize), storage, 1)
    rows = layout.bytes // 128
    shift = 16

    def move(arena):
        x, arena = read(arena, 0, layout, full_view(layout), rows)
        arena = write(arena, shift, layout, full_view(layout), x)
        y, arena = read(arena, shift, layout, full_view(layout), rows)
        return arena, y, y.reshape(-1)[5:][:70][3:]

    start = jnp.asarray(np.random.default_rng(6).integers(-100, 100, (rows + 64, 128)), jnp.int8)
    with jax.disable_jit():
        expected = move(start)
    arena, y, cut = jax.jit(move, donate_argnums=0)(start + 0)
    np.testing.assert_array_equal(bits(arena), bits(expected[0]))
    np.testing.assert_array_equal(bits(y), bits(expected[1]))
    np.testing.assert_array_equal(bits(cut), bits(expected[2]))
    moved = np.asarray(start).copy()
    moved[shift : shift + rows] = np.asarray(start)[:rows]
    np.testing.assert_array_equal(np.asarray(arena), moved)


def test_x64_changes_nothing():
    layout = Layout((13, 200), "int8x2", 1)
    x = jnp.asarray(np.random.default_rng(7).normal(size=layout.shape), jnp.float32)
    expected = encode(x, layout)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        rows = encode(x, layout)
        y, _ = read(write(rows, 0, layout, full_view(layout), x), 0, layout, full_view(layout), rows.shape[0])
    chex.assert_trees_all_equal(rows, expected)
    chex.assert_trees_all_equal(y, decode(expected, layout))


# Quantized storage.


LEVELS = {1: 127, 2: 32639}


@pytest.mark.parametrize("words", [1, 2])
def test_error_is_half_a_step(words):
    x = np.random.default_rng(8).normal(size=(5, 3, 300)).astype(np.float32)
    x *= 2.0 ** np.random.default_rng(9).integers(-20, 20, (5, 3, 1))
    word, low, scales = quantize_jit(jnp.asarray(x), words)
    chex.assert_shape((word, scales), ((5, 3, 300), (5, 3, 3)))
    assert (low is None) == (words == 1)
    y = np.asarray(dequantize_jit(word, low, scales))
    amax = np.abs(np.pad(x, ((0, 0), (0, 0), (0, 84)))).reshape(5, 3, 3, 128).max(-1)
    np.testing.assert_allclose(scales, amax / LEVELS[words], rtol=1e-6)
    step = np.repeat(np.asarray(scales), 128, -1)[..., :300]
    # Half a step, and f32's rounding of x / scale and of scale * v, where v is at most 2**15: 2 * 2**15 * 2**-24 steps.
    assert (np.abs(y - x) <= step * (0.5 + 2.0**-8)).all()


@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_Q1_zero_blocks(words, dtype):
    x = np.random.default_rng(10).normal(size=(4, 384)).astype(np.float32)
    clean = quantize_jit(jnp.asarray(x, dtype), words)
    x[1] = 0
    x[2, 128:256] = 0
    word, low, scales = quantize_jit(jnp.asarray(x, dtype), words)
    y = dequantize_jit(word, low, scales)
    assert (np.asarray(y)[1] == 0).all() and (np.asarray(y)[2, 128:256] == 0).all()
    assert (np.asarray(scales)[1] == 0).all() and scales[2, 1] == 0
    chex.assert_tree_all_finite((y, scales))
    for now, was in zip((word, low), clean[:2], strict=True):
        if now is not None:
            chex.assert_trees_all_equal(now[jnp.array([0, 3])], was[jnp.array([0, 3])])
            chex.assert_trees_all_equal(now[2, :128], was[2, :128])
    chex.assert_trees_all_equal(scales[2, ::2], clean[2][2, ::2])


@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize("amax", [1e-30, 1.3e-36, 3.7e-37, 2e-38, 1.2e-38, 1e-39, 1e-45])
def test_Q1_tiny_blocks_decode_within_their_amax(words, amax):
    x = np.linspace(-1, 1, 128, dtype=np.float32)[None] * np.float32(amax)
    word, low, scales = quantize_jit(jnp.asarray(x), words)
    y = np.asarray(dequantize_jit(word, low, scales)).astype(np.float64)
    assert np.isfinite(y).all()
    assert np.abs(y).max() <= np.abs(x).max() * (1 + 1e-6)
    assert np.abs(y - x).max() <= max(amax / LEVELS[words], 1.18e-38)


def test_Q6_codes_over_a_sweep_of_amax():
    amax = np.logspace(-35, 38, 1000).astype(np.float32)[:, None]
    integers = np.arange(-127, 128, dtype=np.float32)[None, ::2]
    x = np.concatenate([amax, -amax, (integers[:, :126] * (amax / 127)).astype(np.float32)], 1)
    word, _, scales = quantize_jit(jnp.asarray(x), 1)
    assert np.abs(np.asarray(word, np.int32)).max() <= 127
    assert (np.asarray(word)[:, 0] == 127).all() and (np.asarray(word)[:, 1] == -127).all()
    assert (np.asarray(word)[:, 2:] == integers[:, :126]).all()
    exact = np.float32(2.0) ** np.arange(-100, 100)[:, None]
    grid = np.concatenate([127 * exact, integers[:, :127] * exact], 1)
    word, low, scales = quantize_jit(jnp.asarray(grid), 1)
    np.testing.assert_array_equal(np.asarray(scales), exact)
    np.testing.assert_array_equal(np.asarray(dequantize_jit(word, low, scales)), grid)


def test_Q7_two_words():
    rng = np.random.default_rng(11)
    x = rng.normal(size=(6, 256)).astype(np.float32)
    x[:, :128] *= 2.0**20
    x[:, 128:] *= 2.0**-20
    x[3, 5] = np.abs(x[3, :128]).max() / 254  # half a step of one word
    x[4] = -np.abs(x[4])
    word, low, scales = quantize_jit(jnp.asarray(x), 2)
    amax = np.abs(x).reshape(6, 2, 128).max(-1)
    error = np.abs(np.asarray(dequantize_jit(word, low, scales)) - x).reshape(6, 2, 128).max(-1)
    assert (error <= amax * 2.0**-15).all()
    low = np.asarray(low, np.int32)
    assert low.min() < 0 < low.max()  # the high word rounds, up and down, rather than truncates
    weights = rng.normal(size=(256, 40))
    exact = x.astype(np.float64) @ weights
    two = np.asarray(dequantize_jit(word, jnp.asarray(low, jnp.int8), scales), np.float64) @ weights
    one = np.asarray(dequantize_jit(*quantize_jit(jnp.asarray(x), 1)), np.float64) @ weights
    assert np.abs(one - exact).max() >= 100 * np.abs(two - exact).max()


def test_Q7_extreme_codes():
    steps = np.arange(-32639, 32640, dtype=np.float32)
    # Every code, 127 a block, beside the largest, which makes the scale 1.
    rows = np.insert(np.pad(steps, (0, -len(steps) % 127)).reshape(-1, 127), 0, 32639, axis=1)
    word, low, scales = quantize_jit(jnp.asarray(rows), 2)
    assert (np.asarray(scales) == 1).all()
    assert np.asarray(word, np.int32).min() == -127 and np.asarray(word, np.int32).max() == 127
    np.testing.assert_array_equal(np.asarray(dequantize_jit(word, low, scales)), rows)


@pytest.mark.parametrize("storage", ["int8", "int8x2"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_Q9_nan_and_inf_stay_in_their_row(storage, bad):
    layout = Layout((16, 300), storage, 1)
    x = np.random.default_rng(12).normal(size=layout.shape).astype(np.float32)
    clean = np.asarray(decode_jit(encode_jit(jnp.asarray(x), layout), layout))
    x[3, 200] = bad
    y = np.asarray(decode_jit(encode_jit(jnp.asarray(x), layout), layout))
    others = np.arange(16) != 3
    np.testing.assert_array_equal(bits(y[others]), bits(clean[others]))
    assert np.isnan(y[3, 128:256]).all()
    np.testing.assert_array_equal(y[3, :128], clean[3, :128])
    np.testing.assert_array_equal(y[3, 256:], clean[3, 256:])


@pytest.mark.parametrize("storage", ["int8", "int8x2"])
def test_quantized_rows_hold_the_parts(storage):
    layout = Layout((2, 13, 300), storage, 1)
    x = jnp.asarray(np.random.default_rng(13).normal(size=layout.shape), jnp.float32)
    data = np.asarray(encode_jit(x, layout)).reshape(-1)
    word, low, scales = quantize_jit(x, 1 if storage == "int8" else 2)
    at = quant_parts(layout, 0)
    view = full_view(layout)
    for panel, group, row in ((0, 0, 0), (1, 1, 12), (2, 0, 7)):
        n = row_of(view, panel, group, row)
        values = slice(128 * panel, min(128 * panel + 128, 300))
        length = values.stop - values.start
        np.testing.assert_array_equal(data[at.words + 128 * n :][:length], word[group, row, values])
        if low is not None:
            np.testing.assert_array_equal(data[at.low_words + 128 * n :][:length], low[group, row, values])
        assert data[at.scales + 4 * n :][:4].view(np.float32) == scales[group, row, panel]


def test_decode_to_another_dtype():
    layout = Layout((5, 200), "int8", 1)
    x = jnp.asarray(np.random.default_rng(14).normal(size=layout.shape), jnp.bfloat16)
    rows = encode_jit(x, layout)
    y = decode_jit(rows, layout, jnp.bfloat16)
    assert y.dtype == jnp.bfloat16
    chex.assert_trees_all_equal(y, decode_jit(rows, layout).astype(jnp.bfloat16))
    assert read(rows, 0, layout, full_view(layout), rows.shape[0], jnp.bfloat16)[0].dtype == jnp.bfloat16


# Errors.


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: quantize(jnp.ones((2, 3)), 3), ValueError, "words must be 1 or 2, got 3"),
        (lambda: quantize(jnp.ones((2, 3), jnp.int32)), TypeError, "x must be floating point, got int32"),
        (lambda: encode(jnp.ones((2, 3)), Layout((3, 2), "f32", 1)), ValueError, r"layout's shape \(3, 2\), got \(2, 3\)"),
        (lambda: encode(jnp.ones((2, 3)), Layout((2, 3), "bf16", 1)), TypeError, "storage bf16 takes bfloat16, got float32"),
        (lambda: encode(jnp.ones((2, 3), jnp.int8), Layout((2, 3), "int8", 1)), TypeError, "int8 takes floating point, got int8"),
        (lambda: decode(jnp.zeros((7, 128), jnp.int8), Layout((2, 3), "f32", 1)), ValueError, r"rows of shape \(8, 128\), got \(7, 128\)"),
        (
            lambda: load(jnp.zeros((64, 128), jnp.int8), 0, Layout((8, 40), "f32", 1), View(8, 8, 8), 16),
            ValueError,
            "needs rows 8 to 24, its home has 16",
        ),
        (
            lambda: write(jnp.zeros((64, 128), jnp.int8), 0, Layout((8, 40), "f32", 1), View(8, 8, 8), jnp.ones((8, 40)), 16),
            ValueError,
            "needs rows 8 to 24, its home has 16",
        ),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()
