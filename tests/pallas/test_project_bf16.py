"""The bf16 product kernel on the CPU: interpreted, with races looked for, and lowered for CUDA."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena.pallas import project_bf16
from jaxarena.pallas.frame import TileConfig
from jaxarena.pallas.operands import Place
from tests.pallas.arenas import TestArena, assert_no_race, fetch, launch_writing, lower, matrix, relative_error, row_bytes

ROUNDING = 2.0**-8  # of bf16

INTERPRETED = {
    "two warpgroups": TileConfig(128, 128, 2, 2),
    "tall": TileConfig(256, 128, 2, 3, piece=32),
    "cluster": TileConfig(128, 128, 2, 2, cluster_m=2),
}
FORMS = {"forward": (False, False), "dx": (False, True), "dw": (True, False)}


def operands(m: int, n: int, k: int, transposed: tuple[bool, bool]) -> tuple[jax.Array, jax.Array, np.ndarray]:
    random = np.random.default_rng(m + n + k)
    rows = jnp.asarray(random.standard_normal((m, k)), jnp.bfloat16)
    columns = jnp.asarray(random.standard_normal((k, n)), jnp.bfloat16)
    exact = np.asarray(rows, np.float64) @ np.asarray(columns, np.float64)
    return rows.T if transposed[0] else rows, columns.T if transposed[1] else columns, exact


QUICK = {("two warpgroups", "forward", True), ("two warpgroups", "dx", True), ("two warpgroups", "dw", True), ("cluster", "forward", True)}


@pytest.mark.parametrize(
    ("name", "form", "in_arena"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in itertools.product(INTERPRETED, FORMS, (True, False))],
)
def test_interpreted(name: str, form: str, in_arena: bool, capsys: pytest.CaptureFixture[str]) -> None:
    transposed = FORMS[form]
    # The sizes that must be a multiple of 64 are; the others are not, nor a multiple of a tile.
    m, n, k = {"forward": (264, 192, 200), "dx": (264, 200, 192), "dw": (320, 192, 128)}[form] if in_arena else (320, 192, 192)
    rows, columns, exact = operands(m, n, k, transposed)
    arena = TestArena(0)
    place = matrix(arena, rows) if in_arena else None
    row, span = arena.room((m, n), jnp.bfloat16)

    def kernel(ref: object, rows: jax.Array, columns: jax.Array) -> jax.Array | None:
        return project_bf16.project_bf16(
            ref if in_arena else None,
            place or rows,
            columns,
            Place(row, m) if in_arena else None,
            m=m,
            n=n,
            k=k,
            rows_transposed=transposed[0],
            columns_transposed=transposed[1],
            config=INTERPRETED[name],
            multiprocessors=2,
            interpret=True,
        )

    after, result = launch_writing(kernel, arena.array(), [row_bytes(span)] if in_arena else [], rows, columns)
    got = fetch(after, row, (m, n), jnp.bfloat16) if in_arena else result
    assert got is not None
    assert relative_error(got, jnp.asarray(exact)) < ROUNDING
    assert_no_race(capsys)


@pytest.mark.parametrize("config", [*project_bf16.CONFIGS, "decode"])
@pytest.mark.parametrize("form", FORMS)
def test_lowers_for_cuda(config: str, form: str) -> None:
    transposed = FORMS[form]
    m, n, k = 384, 576, 320
    rows, columns, _ = operands(m, n, k, transposed)
    arena = TestArena(1)
    place = matrix(arena, rows)
    row, _ = arena.room((m, n), jnp.bfloat16)

    def kernel(ref: object, columns: jax.Array) -> jax.Array | None:
        chosen = project_bf16.DECODE if config == "decode" else project_bf16.CONFIGS[config][0]
        form = {"rows_transposed": transposed[0], "columns_transposed": transposed[1]}
        return project_bf16.project_bf16(ref, place, columns, Place(row, m), m=m, n=n, k=k, config=chosen, **form)

    lower(kernel, arena.array(), columns)


@pytest.mark.parametrize(
    ("m", "n", "k", "options", "text"),
    [
        (8, 0, 8, {}, "empty"),
        (100, 8, 64, {"rows_in_arena": True, "rows_transposed": True}, "multiples of 64"),
        (12, 64, 64, {"out_in_arena": True}, "12, 64, 64"),
        (8, 72, 64, {}, "72 columns of columns"),
        (8, 64, 72, {}, "72 columns of rows"),
        (8, 72, 64, {"columns_transposed": True}, "72 columns of the result"),
    ],
)
def test_says_what_it_does_not_take(m: int, n: int, k: int, options: dict[str, bool], text: str) -> None:
    reason = project_bf16.supports(m, n, k, **({"rows_in_arena": False, "out_in_arena": False} | options))
    assert reason is not None and text in reason
