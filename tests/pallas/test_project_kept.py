"""The weight's gradient from kept words on the CPU: interpreted, with races looked for, and lowered for CUDA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena.ops.quantized import row_parts, row_values
from jaxarena.pallas import project_kept
from jaxarena.pallas.frame import TileConfig
from jaxarena.pallas.operands import Place
from tests.pallas.arenas import TestArena, assert_no_race, fetch, launch_writing, lower, relative_error, row_bytes, words

INTERPRETED = {"plain": TileConfig(128, 128, 2, 2), "cluster": TileConfig(128, 128, 2, 2, cluster_m=2)}
LIMIT = {jnp.bfloat16: 2.0**-8, jnp.float32: 1e-6}


def operands(m: int, n: int, k: int) -> tuple[tuple[jax.Array, jax.Array], jax.Array, np.ndarray]:
    random = np.random.default_rng(m + n + k)
    x = jnp.asarray(random.standard_normal((m, k)) * np.exp(random.standard_normal((m, 1))), jnp.float32)
    dy = jnp.asarray(random.standard_normal((m, n)), jnp.bfloat16)
    word, scales = row_parts(x, "int8")
    decoded = np.asarray(row_values((word, scales)).astype(jnp.bfloat16), np.float64)
    return (word, scales), dy, decoded.T @ np.asarray(dy, np.float64)


@pytest.mark.parametrize(
    ("name", "in_arena", "dtype"),
    [
        ("plain", True, jnp.float32),
        pytest.param("cluster", True, jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param("plain", False, jnp.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_interpreted(name: str, in_arena: bool, dtype: Any, capsys: pytest.CaptureFixture[str]) -> None:
    m, n, k = 320, 192, 256
    x, dy, exact = operands(m, n, k)
    arena = TestArena(0)
    place = words(arena, x)
    row, span = arena.room((k, n), dtype)

    def kernel(ref: object, x: tuple[jax.Array, jax.Array], dy: jax.Array) -> jax.Array | None:
        return project_kept.dweight_kept(
            ref,
            place if in_arena else x,
            dy,
            Place(row, k) if in_arena else None,
            m=m,
            n=n,
            k=k,
            out_dtype=dtype,
            config=INTERPRETED[name],
            multiprocessors=2,
            interpret=True,
        )

    after, result = launch_writing(kernel, arena.array(), [row_bytes(span)] if in_arena else [], x, dy)
    got = fetch(after, row, (k, n), dtype) if in_arena else result
    assert got is not None
    assert relative_error(got, exact) < LIMIT[dtype]
    assert_no_race(capsys)


@pytest.mark.parametrize("config", project_kept.CONFIGS)
@pytest.mark.parametrize(("in_arena", "dtype"), [(True, jnp.float32), (False, jnp.bfloat16)])
def test_lowers_for_cuda(config: str, in_arena: bool, dtype: Any) -> None:
    m, n, k = 320, 448, 640
    x, dy, _ = operands(m, n, k)
    arena = TestArena(1)
    place = words(arena, x)
    row, _ = arena.room((k, n), dtype)

    def kernel(ref: object, x: tuple[jax.Array, jax.Array], dy: jax.Array) -> jax.Array | None:
        sizes: dict[str, Any] = {"m": m, "n": n, "k": k, "out_dtype": dtype, "config": project_kept.CONFIGS[config][0]}
        return project_kept.dweight_kept(ref, place if in_arena else x, dy, Place(row, k) if in_arena else None, **sizes)

    lower(kernel, arena.array(), x, dy)


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "text"),
    [
        (64, 0, 128, jnp.float32, "empty"),
        (64, 64, 128, jnp.float16, "float16"),
        (96, 64, 128, jnp.float32, "m, k = 96, 128"),
        (64, 64, 192, jnp.float32, "m, k = 64, 192"),
        (64, 72, 128, jnp.float32, "n = 72"),
    ],
)
def test_says_what_it_does_not_take(m: int, n: int, k: int, dtype: Any, text: str) -> None:
    reason = project_kept.supports(m, n, k, out_in_arena=True, out_dtype=dtype)
    assert reason is not None and text in reason


def test_names_a_config_it_does_not_take() -> None:
    x, dy, _ = operands(64, 64, 128)
    with pytest.raises(ValueError, match="tile_m 128 and 2 warpgroups, got 64 and 1"):
        project_kept.dweight_kept(None, x, dy, m=64, n=64, k=128, config=TileConfig(64, 64, 1, 2))
