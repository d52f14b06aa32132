"""The kernel that decodes rows of words on the CPU: interpreted, with races looked for, and lowered for CUDA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena.ops.quantized import row_parts, row_values
from jaxarena.pallas import dequantize
from jaxarena.pallas.operands import Place
from jaxarena.pallas.quantize import QuantizeConfig
from tests.pallas.arenas import TestArena, assert_no_race, fetch, launch_writing, lower, row_bytes, words


def parts(m: int, k: int) -> tuple[jax.Array, jax.Array]:
    x = np.random.default_rng(m + k).standard_normal((m, k)).astype(np.float32)
    x[3, :128], x[5, 7], x[8, -1] = 0, np.nan, np.inf
    word, scales = row_parts(jnp.asarray(x), "int8")
    return word, scales


@pytest.mark.parametrize(
    ("words_in_arena", "out_in_arena"), [(True, True), *(pytest.param(a, not a, marks=pytest.mark.slow) for a in (True, False))]
)
def test_interpreted(words_in_arena: bool, out_in_arena: bool, capsys: pytest.CaptureFixture[str]) -> None:
    m, k = 136, 300 if words_in_arena and out_in_arena else 320
    x = parts(m, k)
    arena = TestArena(0)
    place = words(arena, x) if words_in_arena else None
    row, span = arena.room((m, k), jnp.bfloat16)

    def kernel(ref: object, x: tuple[jax.Array, jax.Array]) -> jax.Array | None:
        out = Place(row, m) if out_in_arena else None
        return dequantize.dequantize_rows(
            ref, place or x, out, m=m, k=k, config=QuantizeConfig(warpgroups=2), multiprocessors=2, interpret=True
        )

    after, result = launch_writing(kernel, arena.array(), [row_bytes(span)] if out_in_arena else [], x)
    if out_in_arena:
        result = fetch(after, row, (m, k), jnp.bfloat16)
        pads = fetch(after, row, (m, 320), jnp.bfloat16)[:, k:]
        np.testing.assert_array_equal(pads, jnp.zeros_like(pads))
    np.testing.assert_array_equal(np.asarray(result, np.float32), row_values(x).astype(jnp.bfloat16).astype(jnp.float32))
    assert_no_race(capsys)


@pytest.mark.parametrize("in_arena", [True, False])
def test_lowers_for_cuda(in_arena: bool) -> None:
    m, k = 264, 448
    x = parts(m, k)
    arena = TestArena(1)
    place = words(arena, x)
    row, _ = arena.room((m, k), jnp.bfloat16)

    def kernel(ref: object, x: tuple[jax.Array, jax.Array]) -> jax.Array | None:
        return dequantize.dequantize_rows(ref, place if in_arena else x, Place(row, m) if in_arena else None, m=m, k=k)

    lower(kernel, arena.array(), x)


@pytest.mark.parametrize(
    ("m", "k", "out_in_arena", "text"), [(0, 8, True, "empty"), (8, 72, False, "k = 72"), (12, 64, True, "multiples of 8 rows, got 12")]
)
def test_says_what_it_does_not_take(m: int, k: int, out_in_arena: bool, text: str) -> None:
    reason = dequantize.supports(m, k, words_in_arena=True, out_in_arena=out_in_arena)
    assert reason is not None and text in reason
