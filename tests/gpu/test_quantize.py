"""The quantization kernels and a projection's gradients in int8 on an NVIDIA GPU: values, the same bits each time, the declared bytes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena.ops.quantized import row_parts, row_values
from jaxarena.pallas import dequantize, project_kept, quantize, quantize_tiles
from jaxarena.pallas.operands import Place
from tests.pallas.arenas import (
    TestArena,
    coded,
    fetch,
    launch,
    launch_writing,
    matrix,
    relative_error,
    room_for_rows,
    room_for_tiles,
    row_bytes,
    words,
)
from tests.pallas.backward import Backward
from tests.pallas.codes import assert_codes, assert_tile_codes, values, weight

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("m", "k"), [(16, 256), (200, 384), (1032, 4096)])
@pytest.mark.parametrize(("dtype", "count"), [(jnp.bfloat16, 1), (jnp.bfloat16, 2), (jnp.float32, 1), (jnp.float32, 2)])
@pytest.mark.parametrize("x_in_arena", [True, False])
@pytest.mark.parametrize("out_in_arena", [True, False])
def test_rows(m: int, k: int, dtype: Any, count: int, x_in_arena: bool, out_in_arena: bool) -> None:
    x = values(m, k, dtype)
    arena = TestArena(0)
    place = matrix(arena, x) if x_in_arena else None
    places, written = room_for_rows(arena, m, k, count)

    def kernel(ref: Any, x: Any) -> Any:
        return quantize.quantize_rows(ref, place or x, places if out_in_arena else None, m=m, k=k, words=count, dtype=dtype)

    after, result = launch_writing(kernel, arena.array(), written if out_in_arena else [], x)
    assert_codes(coded(after, places, m, k) if out_in_arena else result, x)


@pytest.mark.parametrize(("m", "k"), [(64, 256), (192, 320), (1088, 4160)])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("in_arena", [True, False])
def test_columns(m: int, k: int, count: int, in_arena: bool) -> None:
    x = values(m, k)
    arena = TestArena(1)
    place = matrix(arena, x) if in_arena else None
    places, written = room_for_rows(arena, k, m, count)

    def kernel(ref: Any, x: Any) -> Any:
        return quantize.quantize_columns(ref, place or x, places if in_arena else None, m=m, k=k, words=count)

    after, result = launch_writing(kernel, arena.array(), written if in_arena else [], x)
    assert_codes(coded(after, places, k, m) if in_arena else result, x.T)


@pytest.mark.parametrize(("k", "n"), [(192, 320), (128, 256), (2112, 1088)])
@pytest.mark.parametrize(("dtype", "count"), [(jnp.bfloat16, 1), (jnp.bfloat16, 2), (jnp.float32, 1), (jnp.float32, 2)])
@pytest.mark.parametrize("orientations", [("forward", "backward"), ("backward",), ("forward",)], ids=str)
@pytest.mark.parametrize("in_arena", [True, False])
def test_tiles(k: int, n: int, dtype: Any, count: int, orientations: tuple[str, ...], in_arena: bool) -> None:
    w = weight(k, n, dtype)
    arena = TestArena(2)
    place = matrix(arena, w) if in_arena and dtype == jnp.bfloat16 else None
    places, written = room_for_tiles(arena, k, n, count, orientations)

    def kernel(ref: Any, w: Any) -> Any:
        out = places if in_arena else None
        return quantize_tiles.quantize_tiles(ref, place or w, out, k=k, n=n, words=count, orientations=orientations)

    after, made = launch_writing(kernel, arena.array(), written if in_arena else [], w)
    for kind, orientation in enumerate(orientations):
        parts = made[kind]
        if in_arena:
            shape = (n, k) if orientation == "forward" else (k, n)
            mine = places[count * kind : count * (kind + 1)]
            parts = (*(fetch(after, int(p.row), shape, jnp.int8) for p in mine), *parts)
        assert_tile_codes(parts, w if orientation == "forward" else w.T)


@pytest.mark.parametrize(("m", "k"), [(16, 256), (200, 384), (1032, 4096)])
@pytest.mark.parametrize("in_arena", [True, False])
def test_decoded_rows(m: int, k: int, in_arena: bool) -> None:
    x = row_parts(values(m, k), "int8")
    arena = TestArena(3)
    place = words(arena, x)
    row, span = arena.room((m, k), jnp.bfloat16)

    def kernel(ref: Any, x: Any) -> Any:
        return dequantize.dequantize_rows(ref, place if in_arena else x, Place(row, m) if in_arena else None, m=m, k=k)

    after, result = launch_writing(kernel, arena.array(), [row_bytes(span)] if in_arena else [], x)
    got = fetch(after, row, (m, k), jnp.bfloat16) if in_arena else result
    np.testing.assert_array_equal(np.asarray(got, np.float32), row_values(x).astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("shape", [(192, 256, 128), (320, 384, 640), (2112, 1152, 1024)], ids=str)
def test_gradients_in_int8(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    case = Backward(m=m, n=n, k=k)

    def kernel(ref: Any, w: jax.Array) -> Any:
        return case.launches(ref, w, product=None, small=False)

    after, scales = launch_writing(kernel, case.arena.array(), case.written, case.w)
    case.check(after, *scales)
    again, _ = launch(kernel, case.arena.array(), case.w)
    np.testing.assert_array_equal(again, after)


@pytest.mark.parametrize("shape", [(64, 64, 128), (320, 448, 640), (2112, 1088, 1152)], ids=str)
@pytest.mark.parametrize("config", [None, *project_kept.CONFIGS])
@pytest.mark.parametrize(("in_arena", "dtype"), [(True, jnp.float32), (True, jnp.bfloat16), (False, jnp.float32)])
def test_weight_gradient_from_kept_words(shape: tuple[int, int, int], config: str | None, in_arena: bool, dtype: Any) -> None:
    m, n, k = shape
    random = np.random.default_rng(m)
    word, scales = row_parts(jnp.asarray(random.standard_normal((m, k)), jnp.float32), "int8")
    dy = jnp.asarray(random.standard_normal((m, n)), jnp.bfloat16)
    arena = TestArena(4)
    place = words(arena, (word, scales))
    row, span = arena.room((k, n), dtype)
    chosen = project_kept.CONFIGS[config][0] if config else None

    def kernel(ref: Any, x: Any, dy: Any) -> Any:
        out = Place(row, k) if in_arena else None
        return project_kept.dweight_kept(ref, place if in_arena else x, dy, out, m=m, n=n, k=k, out_dtype=dtype, config=chosen)

    after, result = launch_writing(kernel, arena.array(), [row_bytes(span)] if in_arena else [], (word, scales), dy)
    got = fetch(after, row, (k, n), dtype) if in_arena else result
    decoded = np.asarray(row_values((word, scales)).astype(jnp.bfloat16), np.float64)
    # Of float32: a rounding a sum of 16 products in the tensor cores, which truncate.
    limit = 2.0**-8 if dtype == jnp.bfloat16 else (m // 16) * 2.0**-23
    assert relative_error(got, decoded.T @ np.asarray(dy, np.float64)) < limit
