"""The two-word projection kernel on the CPU: interpreted, with races looked for, and lowered for CUDA."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena.ops.project_quantized import exact_product
from jaxarena.ops.quantized import row_parts, tile_parts
from jaxarena.pallas import project_two_words
from jaxarena.pallas.frame import TileConfig
from jaxarena.pallas.operands import Place
from tests.pallas.arenas import TestArena, assert_no_race, fetch, launch_writing, lower, matrix, relative_error, row_bytes

INTERPRETED = {
    "one accumulator": TileConfig(128, 128, 2, 2, piece=32),
    "two accumulators, in turn": TileConfig(128, 128, 2, 3, piece=32, together=2, in_turn=True),
    "tall": TileConfig(256, 128, 2, 2, piece=16),
    "cluster": TileConfig(128, 128, 2, 2, cluster_n=2, piece=32),
    "few rows": TileConfig(64, 64, 1, 3, piece=32, together=2),
}

Parts = tuple[jax.Array, ...]


def operands(m: int, n: int, k: int) -> tuple[Parts, Parts]:
    random = np.random.default_rng(m + n + k)
    x = jnp.asarray(random.standard_normal((m, k)) * np.exp(random.standard_normal((m, 1))), jnp.float32)
    weight = jnp.asarray(random.standard_normal((k, n)), jnp.float32)
    return row_parts(x, "int8x2"), tile_parts(weight, "int8x2")


def places(arena: TestArena, parts: Parts) -> tuple[Place, Place]:
    words, low, scales = parts
    return matrix(arena, words)._replace(scale_row=arena.add(scales, 0), scale_stride=words.shape[0]), matrix(arena, low)


QUICK = {("one accumulator", True), ("few rows", False)}


@pytest.mark.parametrize(
    ("name", "in_arena"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in [*((name, True) for name in INTERPRETED), ("one accumulator", False), ("few rows", False)]
    ],
)
def test_interpreted(name: str, in_arena: bool, capsys: pytest.CaptureFixture[str]) -> None:
    m, n, k = (136, 256, 272) if in_arena else (88, 160, 384)
    x, (*weight, weight_scales) = operands(m, n, k)
    arena = TestArena(0)
    x_places = places(arena, x)
    weight_places = matrix(arena, weight[0]), matrix(arena, weight[1])
    row, span = arena.room((m, n), jnp.float32)

    def kernel(ref: object, x: Parts, weight: Parts, scales: jax.Array) -> jax.Array | None:
        return project_two_words.project_two_words(
            ref if in_arena else None,
            x_places if in_arena else x,
            weight_places if in_arena else weight,
            scales,
            Place(row, m) if in_arena else None,
            m=m,
            n=n,
            k=k,
            config=INTERPRETED[name],
            multiprocessors=INTERPRETED[name].cluster_n,  # a machine of two cores runs few warpgroups at once
            interpret=True,
        )

    after, result = launch_writing(kernel, arena.array(), [row_bytes(span)] if in_arena else [], x, tuple(weight), weight_scales)
    got = fetch(after, row, (m, n), jnp.float32) if in_arena else result
    assert got is not None
    # Two float32 roundings a panel and term.
    assert relative_error(got, exact_product(x, (*weight, weight_scales))) < 2 * 4 * 2.0**-24
    assert_no_race(capsys)


def test_integers_are_exact() -> None:
    """One block whose products need all four terms, up to the largest words."""
    m, n, k = 8, 64, 128
    random = np.random.default_rng(1)
    x, weight = (random.integers(-32639, 32640, shape).astype(np.float32) for shape in ((m, k), (k, n)))
    x[:, 0], weight[0] = 32639, 32639  # so that every scale is 1
    parts, (*words, scales) = row_parts(jnp.asarray(x), "int8x2"), tile_parts(jnp.asarray(weight), "int8x2")
    chex.assert_trees_all_equal(parts[2], jnp.ones((1, m)))
    y = project_two_words.project_two_words(
        None, parts, tuple(words), scales, m=m, n=n, k=k, config=INTERPRETED["few rows"], multiprocessors=1, interpret=True
    )
    exact = x.astype(np.float64) @ weight.astype(np.float64)
    chex.assert_trees_all_close(np.asarray(y, np.float64), exact, rtol=0, atol=np.abs(exact).max() * 2.0**-23)


@pytest.mark.parametrize("config", project_two_words.CONFIGS)
@pytest.mark.parametrize("in_arena", [True, False])
def test_lowers_for_cuda(config: str, in_arena: bool) -> None:
    m, n, k = 392, 576, 640
    x, (*weight, weight_scales) = operands(m, n, k)
    arena = TestArena(1)
    x_places = places(arena, x)
    row, _ = arena.room((m, n), jnp.float32)

    def kernel(ref: object, x: Parts, weight: Parts, scales: jax.Array) -> jax.Array | None:
        return project_two_words.project_two_words(
            ref if in_arena else None,
            x_places if in_arena else x,
            weight,
            scales,
            Place(row, m) if in_arena else None,
            m=m,
            n=n,
            k=k,
            config=project_two_words.CONFIGS[config][0],
        )

    lower(kernel, arena.array(), x, tuple(weight), weight_scales)


@pytest.mark.parametrize(
    ("m", "n", "k", "in_arena", "text"),
    [
        (0, 8, 16, False, "empty"),
        (12, 8, 128, True, "m, n = 12, 8"),
        (8, 8, 144, False, "k = 144"),
        (8, 40, 128, False, "n = 40"),
    ],
)
def test_says_what_it_does_not_take(m: int, n: int, k: int, in_arena: bool, text: str) -> None:
    reason = project_two_words.supports(m, n, k, rows_in_arena=in_arena, weight_in_arena=False, out_in_arena=in_arena)
    assert reason is not None and text in reason
