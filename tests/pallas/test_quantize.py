"""The quantization kernel on the CPU: interpreted, with races looked for, and lowered for CUDA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena import storage
from jaxarena.pallas import quantize
from jaxarena.pallas.operands import Place
from tests.pallas.arenas import Span, TestArena, assert_no_race, assert_writes_only, fetch, launch, lower, matrix


def values(m: int, k: int) -> jax.Array:
    """Random numbers with blocks of zeros, NaN, Inf, subnormal and very small numbers among them."""
    x = np.random.default_rng(m + k).standard_normal((m, k)).astype(np.float32)
    x[3, :128], x[5, 7], x[8, 200], x[12, 130] = 0, np.nan, np.inf, -np.inf
    x[9, :128] *= 1e-39
    x[10, :128] *= 3e-37
    return jnp.asarray(x, jnp.bfloat16)


def place_for(arena: TestArena, m: int, k: int) -> tuple[Place, list[Span]]:
    panels = -(-k // 128)
    row, span = arena.room((m, k), jnp.int8)
    scale_row, scale_span = arena.room((panels, m), jnp.float32, 0)
    return Place(row, m, scale_row, 0, m), [span, scale_span]


@pytest.mark.parametrize("x_in_arena", [True, False])
@pytest.mark.parametrize("out_in_arena", [True, False])
def test_interpreted(x_in_arena: bool, out_in_arena: bool, capsys: pytest.CaptureFixture[str]) -> None:
    m, k = 200, 336 if x_in_arena and out_in_arena else 384
    x = values(m, k)
    arena = TestArena(0)
    place = matrix(arena, x) if x_in_arena else None
    out, spans = place_for(arena, m, k)

    def kernel(ref: object, x: jax.Array) -> tuple[jax.Array, jax.Array] | None:
        config = quantize.QuantizeConfig(warpgroups=2)
        target = out if out_in_arena else None
        return quantize.quantize_rows(ref, place or x, target, m=m, k=k, config=config, multiprocessors=2, interpret=True)

    before = arena.array()
    after, result = launch(kernel, before, x)
    if out_in_arena:
        result = fetch(after, int(out.row), (m, k), jnp.int8), fetch(after, int(out.scale_row), (3, m), jnp.float32, 0)
    words, scales = (np.asarray(r) for r in result)
    expected_words, _, expected_scales = (None if r is None else np.asarray(r) for r in storage.quantize(x))
    assert expected_scales is not None and expected_words is not None
    np.testing.assert_allclose(scales, expected_scales.T, rtol=2e-7)
    difference = np.abs(words.astype(int) - expected_words)
    # A quotient within rounding of a half may go either way.
    assert difference.max() <= 1 and (difference > 0).mean() < 2e-3
    bad = np.isnan(scales.T).repeat(128, axis=1)[:, :k]
    decoded = words * scales.T.repeat(128, axis=1)[:, :k]
    error = np.abs(decoded - np.asarray(x, np.float32))[~bad]
    limit = (scales.T.repeat(128, axis=1)[:, :k] * 0.5 * (1 + 1e-5))[~bad]
    tiny = np.finfo(np.float32).tiny
    assert (error <= np.maximum(limit, tiny)).all()
    assert not words[bad].any()
    assert_writes_only(before, after, spans if out_in_arena else [])
    assert_no_race(capsys)


@pytest.mark.parametrize("x_in_arena", [True, False])
def test_lowers_for_cuda(x_in_arena: bool) -> None:
    m, k = 264, 512
    x = values(m, k)
    arena = TestArena(1)
    place = matrix(arena, x) if x_in_arena else None
    out, _ = place_for(arena, m, k)
    lower(lambda ref, x: quantize.quantize_rows(ref, place or x, out, m=m, k=k), arena.array(), x)


@pytest.mark.parametrize(
    ("m", "k", "x_in_arena", "out_in_arena", "text"),
    [
        (8, 0, False, False, "empty"),
        (12, 128, False, True, "multiples of 8 rows, got 12"),
        (8, 160, True, True, "k = 160"),
        (8, 336, False, True, "k = 336"),
    ],
)
def test_says_what_it_does_not_take(m: int, k: int, x_in_arena: bool, out_in_arena: bool, text: str) -> None:
    reason = quantize.supports(m, k, x_in_arena=x_in_arena, out_in_arena=out_in_arena)
    assert reason is not None and text in reason


@pytest.mark.parametrize(("field", "value"), [("warpgroups", 5), ("depth", 0), ("blocks", 0)])
def test_config_names_a_bad_field(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field} must be .*got {value}"):
        quantize.QuantizeConfig(**{field: value})
