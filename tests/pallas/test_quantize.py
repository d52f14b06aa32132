"""The quantization kernels of rows and columns on the CPU: interpreted, with races looked for, and lowered for CUDA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena import storage
from jaxarena.pallas import quantize
from jaxarena.pallas.operands import Place
from tests.pallas.arenas import TestArena, assert_no_race, coded, launch_writing, lower, matrix, room_for_rows
from tests.pallas.codes import assert_codes, values

SMALL = quantize.QuantizeConfig(warpgroups=2)


CASES = [
    pytest.param(jnp.bfloat16, 1, True, True),
    pytest.param(jnp.bfloat16, 1, False, False, marks=pytest.mark.slow),
    pytest.param(jnp.bfloat16, 2, False, True, marks=pytest.mark.slow),
    pytest.param(jnp.float32, 1, True, False, marks=pytest.mark.slow),
    pytest.param(jnp.float32, 2, True, True, marks=pytest.mark.slow),
    pytest.param(jnp.float32, 2, False, False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("dtype", "words", "x_in_arena", "out_in_arena"), CASES)
def test_rows_interpreted(dtype: Any, words: int, x_in_arena: bool, out_in_arena: bool, capsys: pytest.CaptureFixture[str]) -> None:
    m = 136
    k = 384 if not (x_in_arena and out_in_arena) else 336 if dtype == jnp.bfloat16 else 360
    x = values(m, k, dtype)
    arena = TestArena(0)
    place = matrix(arena, x) if x_in_arena else None
    places, written = room_for_rows(arena, m, k, words)

    def kernel(ref: object, x: jax.Array) -> tuple[jax.Array, ...] | None:
        out = places[: 1 + (words == 2)] if out_in_arena else None
        return quantize.quantize_rows(
            ref, place or x, out, m=m, k=k, words=words, dtype=dtype, config=SMALL, multiprocessors=2, interpret=True
        )

    after, result = launch_writing(kernel, arena.array(), written if out_in_arena else [], x)
    assert_codes(coded(after, places, m, k) if out_in_arena else result, x)
    assert_no_race(capsys)


COLUMN_CASES = [
    pytest.param(1, True, True),
    pytest.param(1, False, False, marks=pytest.mark.slow),
    pytest.param(2, False, True, marks=pytest.mark.slow),
]


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # interpreted: of NaN and Inf, as it should
@pytest.mark.parametrize(("words", "x_in_arena", "out_in_arena"), COLUMN_CASES)
def test_columns_interpreted(words: int, x_in_arena: bool, out_in_arena: bool, capsys: pytest.CaptureFixture[str]) -> None:
    # Rows that leave half a block, columns that leave part of a tile.
    m, k = (192, 200) if x_in_arena and out_in_arena else (192, 192)
    x = values(k, m).T
    arena = TestArena(0)
    place = matrix(arena, x) if x_in_arena else None
    places, written = room_for_rows(arena, k, m, words)

    def kernel(ref: object, x: jax.Array) -> tuple[jax.Array, ...] | None:
        out = places if out_in_arena else None
        return quantize.quantize_columns(ref, place or x, out, m=m, k=k, words=words, config=SMALL, multiprocessors=2, interpret=True)

    after, result = launch_writing(kernel, arena.array(), written if out_in_arena else [], x)
    assert_codes(coded(after, places, k, m) if out_in_arena else result, x.T)
    assert_no_race(capsys)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_columns_are_the_rows_of_the_transposed() -> None:
    """Bit for bit: the transposition rounds nothing."""
    x = values(128, 256)[20:84]
    options: dict[str, Any] = {"config": SMALL, "multiprocessors": 2, "interpret": True}
    by_column = quantize.quantize_columns(None, x, m=64, k=256, **options)
    by_row = quantize.quantize_rows(None, jnp.pad(x.T, ((0, 0), (0, 64))), m=256, k=128, **options)
    assert by_column is not None and by_row is not None
    np.testing.assert_array_equal(by_column[0], by_row[0][:, :64])
    np.testing.assert_array_equal(by_column[1], by_row[1])


@pytest.mark.parametrize(("dtype", "words", "x_in_arena"), [(jnp.bfloat16, 1, False), (jnp.float32, 2, True)])
def test_rows_lower_for_cuda(dtype: Any, words: int, x_in_arena: bool) -> None:
    m, k = 264, 512
    x = values(m, k, dtype)
    arena = TestArena(1)
    place = matrix(arena, x) if x_in_arena else None
    places, _ = room_for_rows(arena, m, k, words)
    lower(lambda ref, x: quantize.quantize_rows(ref, place or x, places, m=m, k=k, words=words, dtype=dtype), arena.array(), x)


@pytest.mark.parametrize(("words", "in_arena"), [(1, True), (2, False)])
def test_columns_lower_for_cuda(words: int, in_arena: bool) -> None:
    m, k = 320, 448
    x = values(m, k)
    arena = TestArena(1)
    place = matrix(arena, x) if in_arena else None
    places, _ = room_for_rows(arena, k, m, words)
    lower(lambda ref, x: quantize.quantize_columns(ref, place or x, places if in_arena else None, m=m, k=k, words=words), arena.array(), x)


@pytest.mark.parametrize(
    ("m", "k", "x_in_arena", "out_in_arena", "dtype", "text"),
    [
        (8, 0, False, False, jnp.bfloat16, "empty"),
        (8, 128, False, False, jnp.float16, "float16"),
        (12, 128, False, True, jnp.bfloat16, "multiples of 8 rows, got 12"),
        (8, 160, True, True, jnp.bfloat16, "k = 160"),
        (8, 336, True, True, jnp.float32, "k = 336"),
        (8, 336, False, True, jnp.bfloat16, "k = 336"),
    ],
)
def test_says_what_rows_it_does_not_take(m: int, k: int, x_in_arena: bool, out_in_arena: bool, dtype: Any, text: str) -> None:
    reason = quantize.supports(m, k, x_in_arena=x_in_arena, out_in_arena=out_in_arena, dtype=dtype)
    assert reason is not None and text in reason


@pytest.mark.parametrize(
    ("m", "k", "x_in_arena", "dtype", "text"),
    [
        (0, 64, True, jnp.bfloat16, "empty"),
        (64, 64, True, jnp.float32, "float32"),
        (96, 64, True, jnp.bfloat16, "multiple of 64 rows, got 96"),
        (64, 12, True, jnp.bfloat16, "multiple of 8, got k = 12"),
        (64, 72, False, jnp.bfloat16, "multiple of 64, got k = 72"),
    ],
)
def test_says_what_columns_it_does_not_take(m: int, k: int, x_in_arena: bool, dtype: Any, text: str) -> None:
    reason = quantize.supports_columns(m, k, x_in_arena=x_in_arena, dtype=dtype)
    assert reason is not None and text in reason


def test_names_a_wrong_number_of_words_and_places() -> None:
    x = values(16, 256)
    with pytest.raises(ValueError, match="words must be 1 or 2, got 3"):
        quantize.quantize_rows(None, x, m=16, k=256, words=3)
    with pytest.raises(ValueError, match="a place for each of 2 words, got 1"):
        quantize.quantize_rows(None, x, Place(0, 16), m=16, k=256, words=2)


@pytest.mark.parametrize(("field", "value"), [("warpgroups", 5), ("depth", 0), ("blocks", 0)])
def test_config_names_a_bad_field(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field} must be .*got {value}"):
        quantize.QuantizeConfig(**{field: value})


def test_reference_of_the_tests_itself() -> None:
    """A word that is off by two does not pass."""
    x = values(16, 256)
    word, _, scales = storage.quantize(x)
    with pytest.raises(AssertionError):
        assert_codes((word.at[0, 0].add(2), scales.T), x)
