"""The int8 projection kernel on the CPU: interpreted, with races looked for, and lowered for CUDA."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena.ops.project_quantized import exact_product
from jaxarena.ops.quantized import row_parts, tile_parts
from jaxarena.pallas import project_int8
from jaxarena.pallas.frame import TileConfig
from jaxarena.pallas.operands import Place
from tests.pallas.arenas import TestArena, assert_no_race, fetch, launch_writing, lower, matrix, relative_error, row_bytes, words

ROUNDING = 2.0**-8  # of bf16

INTERPRETED = {
    "two warpgroups": TileConfig(128, 128, 2, 2),
    "wide, in turn": TileConfig(128, 256, 2, 2, in_turn=True),
    "tall": TileConfig(256, 128, 2, 2, piece=32),
    "three warpgroups": TileConfig(192, 128, 3, 2, piece=32, in_turn=True),
    "cluster": TileConfig(128, 128, 2, 2, cluster_n=2),
    "decode": TileConfig(64, 64, 1, 3, piece=32, together=2),
}


def named(config: str) -> TileConfig:
    return project_int8.DECODE if config == "decode" else project_int8.CONFIGS[config][0]


def operands(m: int, n: int, k: int) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    random = np.random.default_rng(m + n + k)
    x = jnp.asarray(random.standard_normal((m, k)) * np.exp(random.standard_normal((m, 1))), jnp.float32)
    weight = jnp.asarray(random.standard_normal((k, n)), jnp.float32)
    return row_parts(x, "int8"), tile_parts(weight, "int8")


QUICK = {("two warpgroups", True), ("cluster", True), ("decode", False)}


@pytest.mark.parametrize(
    ("name", "in_arena"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in itertools.product(INTERPRETED, (True, False))],
)
def test_interpreted(name: str, in_arena: bool, capsys: pytest.CaptureFixture[str]) -> None:
    m, n, k = (264, 256, 272) if in_arena else (216, 192, 384)
    x, (weight, weight_scales) = operands(m, n, k)
    arena = TestArena(0)
    place = words(arena, x) if in_arena else None
    weight_place = matrix(arena, weight) if in_arena else None
    row, span = arena.room((m, n), jnp.bfloat16)
    out = Place(row, m) if in_arena else None

    def kernel(ref: object, x: tuple[jax.Array, jax.Array], weight: jax.Array, scales: jax.Array) -> jax.Array | None:
        return project_int8.project_int8(
            ref if in_arena else None,
            place or x,
            weight_place or weight,
            scales,
            out,
            m=m,
            n=n,
            k=k,
            config=INTERPRETED[name],
            multiprocessors=2 if INTERPRETED[name].warpgroups < 3 else 1,  # a machine of two cores runs no more than six at once
            interpret=True,
        )

    after, result = launch_writing(kernel, arena.array(), [row_bytes(span)] if in_arena else [], x, weight, weight_scales)
    got = fetch(after, row, (m, n), jnp.bfloat16) if in_arena else result
    assert got is not None
    assert relative_error(got, exact_product(x, (weight, weight_scales))) < ROUNDING
    assert_no_race(capsys)


def test_a_bad_row_stays_in_its_row() -> None:
    m, n, k = 72, 64, 256
    x = jnp.ones((m, k), jnp.float32).at[5, 130].set(jnp.nan).at[9, 3].set(jnp.inf).at[11].set(0)
    parts, (weight, scales) = row_parts(x, "int8"), tile_parts(jnp.ones((k, n), jnp.float32), "int8")
    y = project_int8.project_int8(
        None, parts, weight, scales, m=m, n=n, k=k, config=INTERPRETED["decode"], multiprocessors=1, interpret=True
    )
    expected = np.full((m, n), k, np.float32)
    expected[[5, 9]], expected[11] = np.nan, 0
    np.testing.assert_array_equal(np.asarray(y, np.float32), expected)


@pytest.mark.parametrize("config", [*project_int8.CONFIGS, "decode"])
@pytest.mark.parametrize("in_arena", [True, False])
def test_lowers_for_cuda(config: str, in_arena: bool) -> None:
    m, n, k = 392, 576, 640
    x, (weight, weight_scales) = operands(m, n, k)
    arena = TestArena(1)
    place = words(arena, x) if in_arena else None
    row, _ = arena.room((m, n), jnp.bfloat16)

    def kernel(ref: object, x: tuple[jax.Array, jax.Array], weight: jax.Array, scales: jax.Array) -> jax.Array | None:
        out = Place(row, m) if in_arena else None
        return project_int8.project_int8(ref if in_arena else None, place or x, weight, scales, out, m=m, n=n, k=k, config=named(config))

    lower(kernel, arena.array(), x, weight, weight_scales)


@pytest.mark.parametrize(
    ("m", "n", "k", "in_arena", "text"),
    [
        (0, 8, 16, False, "empty"),
        (12, 8, 128, True, "m, n = 12, 8"),
        (8, 8, 144, False, "k = 144"),
        (8, 12, 128, True, "m, n = 8, 12"),
        (8, 72, 128, False, "n = 72"),
    ],
)
def test_says_what_it_does_not_take(m: int, n: int, k: int, in_arena: bool, text: str) -> None:
    reason = project_int8.supports(m, n, k, rows_in_arena=in_arena, weight_in_arena=False, out_in_arena=in_arena)
    assert reason is not None and text in reason


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tile_m", 100),
        ("tile_n", 96),
        ("warpgroups", 4),
        ("stages", 0),
        ("piece", 24),
        ("group", 0),
        ("cluster_m", 3),
        ("together", 7),
        ("buffers", 3),
    ],
)
def test_config_names_a_bad_field(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field} must be .*got {value}"):
        dataclasses.replace(named("small"), **{field: value})


def test_config_fits_the_size() -> None:
    assert project_int8.config_for(64, 8192, 8192) is project_int8.DECODE
    assert project_int8.config_for(8192, 8192, 8192) is named("large")
    # 96 tiles of 128 x 128 fill 96 of 132 multiprocessors; 64 tiles of 192 x 128 fill only 64.
    assert project_int8.config_for(1536, 1024, 1024) is named("small")
