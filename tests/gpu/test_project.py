"""The projection kernels on an NVIDIA GPU: values, the same bits each time, and no byte written but the result's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena.ops.project_quantized import exact_product
from jaxarena.ops.quantized import row_parts, tile_parts
from jaxarena.pallas import project_bf16, project_int8, project_two_words
from jaxarena.pallas.operands import Place
from tests.pallas.arenas import TestArena, fetch, launch, launch_writing, matrix, relative_error, row_bytes, words

pytestmark = pytest.mark.gpu

ROUNDING = 2.0**-8  # of bf16

# (m, n, k): no multiple of a tile, fewer rows than a tile, several tiles for every multiprocessor.
SHAPES = [(8, 64, 128), (40, 192, 256), (264, 448, 640), (1032, 2112, 1024), (3080, 4160, 128)]


def normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("config", [None, *project_int8.CONFIGS])
@pytest.mark.parametrize("in_arena", [True, False])
def test_int8_product(shape: tuple[int, int, int], config: str | None, in_arena: bool) -> None:
    m, n, k = shape
    x, (weight, scales) = row_parts(normal(0, (m, k)), "int8"), tile_parts(normal(1, (k, n)), "int8")
    arena = TestArena(2)
    place = words(arena, x) if in_arena else None
    row, span = arena.room((m, n), jnp.bfloat16)

    def kernel(ref: Any, x: Any, weight: Any, scales: Any) -> Any:
        out = Place(row, m) if in_arena else None
        chosen = project_int8.CONFIGS[config][0] if config else None
        return project_int8.project_int8(ref if in_arena else None, place or x, weight, scales, out, m=m, n=n, k=k, config=chosen)

    after, result = launch_writing(kernel, arena.array(), [row_bytes(span)] if in_arena else [], x, weight, scales)
    got = fetch(after, row, (m, n), jnp.bfloat16) if in_arena else result
    assert relative_error(got, exact_product(x, (weight, scales))) < ROUNDING


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("config", [None, *project_two_words.CONFIGS])
@pytest.mark.parametrize("in_arena", [True, False])
def test_two_word_product(shape: tuple[int, int, int], config: str | None, in_arena: bool) -> None:
    m, n, k = shape
    x, (*weight, scales) = row_parts(normal(0, (m, k)), "int8x2"), tile_parts(normal(1, (k, n)), "int8x2")
    arena = TestArena(2)
    place = Place(arena.add(x[0]), m, arena.add(x[2], 0), 0, m), matrix(arena, x[1])
    row, span = arena.room((m, n), jnp.float32)

    def kernel(ref: Any, x: Any, weight: Any, scales: Any) -> Any:
        out = Place(row, m) if in_arena else None
        chosen = project_two_words.CONFIGS[config][0] if config else None
        return project_two_words.project_two_words(
            ref if in_arena else None, place if in_arena else x, weight, scales, out, m=m, n=n, k=k, config=chosen
        )

    after, result = launch_writing(kernel, arena.array(), [row_bytes(span)] if in_arena else [], x, tuple(weight), scales)
    again, repeated = launch(kernel, arena.array(), x, tuple(weight), scales)
    got = fetch(after, row, (m, n), jnp.float32) if in_arena else result
    assert relative_error(got, exact_product(x, (*weight, scales))) < 2 * (k // 128 + 1) * 2.0**-24
    np.testing.assert_array_equal(again if in_arena else repeated, after if in_arena else result)


def test_repeats_bit_for_bit() -> None:
    m, n, k = 1032, 2112, 1024
    x, (weight, scales) = row_parts(normal(0, (m, k)), "int8"), tile_parts(normal(1, (k, n)), "int8")
    run = jax.jit(lambda x, weight, scales: project_int8.project_int8(None, x, weight, scales, m=m, n=n, k=k))
    results = [np.asarray(run(x, weight, scales), np.float32) for _ in range(5)]
    for again in results[1:]:
        np.testing.assert_array_equal(again, results[0])


@pytest.mark.parametrize("shape", [(64, 64, 128), (320, 448, 640), (1088, 2112, 1024)], ids=str)
@pytest.mark.parametrize("form", ["forward", "dx", "dw"])
@pytest.mark.parametrize("in_arena", [True, False])
def test_bf16_products(shape: tuple[int, int, int], form: str, in_arena: bool) -> None:
    m, n, k = shape
    rows_transposed, columns_transposed = form == "dw", form == "dx"
    rows, columns = normal(0, (m, k)), normal(1, (k, n))
    exact = np.asarray(rows, np.float64) @ np.asarray(columns, np.float64)
    rows, columns = rows.T if rows_transposed else rows, columns.T if columns_transposed else columns
    arena = TestArena(2)
    place = matrix(arena, rows) if in_arena else None
    row, span = arena.room((m, n), jnp.bfloat16)

    def kernel(ref: Any, rows: Any, columns: Any) -> Any:
        return project_bf16.project_bf16(
            ref if in_arena else None,
            place or rows,
            columns,
            Place(row, m) if in_arena else None,
            m=m,
            n=n,
            k=k,
            rows_transposed=rows_transposed,
            columns_transposed=columns_transposed,
        )

    after, result = launch_writing(kernel, arena.array(), [row_bytes(span)] if in_arena else [], rows, columns)
    got = fetch(after, row, (m, n), jnp.bfloat16) if in_arena else result
    assert relative_error(got, jnp.asarray(exact)) < ROUNDING
