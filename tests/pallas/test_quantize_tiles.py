"""The quantization kernel of weights on the CPU: interpreted, with races looked for, and lowered for CUDA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxarena.pallas import quantize_tiles
from jaxarena.pallas.operands import Place
from tests.pallas.arenas import TestArena, assert_no_race, fetch, launch_writing, lower, matrix, room_for_tiles
from tests.pallas.codes import assert_tile_codes, weight

SMALL = quantize_tiles.TilesConfig(warpgroups=2, buffers=1)  # interpret mode counts every copy as a group of its own


BOTH = ("forward", "backward")
CASES = [
    pytest.param(jnp.bfloat16, 1, BOTH, True, marks=pytest.mark.slow),
    pytest.param(jnp.float32, 2, BOTH, True),
    pytest.param(jnp.float32, 1, BOTH, False, marks=pytest.mark.slow),
    pytest.param(jnp.bfloat16, 2, ("backward",), False, marks=pytest.mark.slow),
    pytest.param(jnp.bfloat16, 1, ("forward",), True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("dtype", "words", "orientations", "in_arena"), CASES)
def test_interpreted(dtype: Any, words: int, orientations: tuple[str, ...], in_arena: bool, capsys: pytest.CaptureFixture[str]) -> None:
    k, n = 192, 320
    w = weight(k, n, dtype)
    arena = TestArena(0)
    w_in_arena = in_arena and dtype == jnp.bfloat16
    place = matrix(arena, w) if w_in_arena else None
    places, written = room_for_tiles(arena, k, n, words, orientations)

    def kernel(ref: object, w: jax.Array) -> tuple[tuple[jax.Array, ...], ...]:
        return quantize_tiles.quantize_tiles(
            ref,
            place or w,
            places if in_arena else None,
            k=k,
            n=n,
            words=words,
            orientations=orientations,
            config=SMALL,
            multiprocessors=2,
            interpret=True,
        )

    after, made = launch_writing(kernel, arena.array(), written if in_arena else [], w)
    for kind, orientation in enumerate(orientations):
        parts = made[kind]
        if in_arena:
            shape = (n, k) if orientation == "forward" else (k, n)
            mine = places[words * kind : words * (kind + 1)]
            parts = (*(fetch(after, int(p.row), shape, jnp.int8) for p in mine), *parts)
        assert_tile_codes(parts, w if orientation == "forward" else w.T)
    assert_no_race(capsys)


@pytest.mark.parametrize(("dtype", "words", "in_arena"), [(jnp.bfloat16, 1, True), (jnp.float32, 2, True), (jnp.float32, 1, False)])
def test_lowers_for_cuda(dtype: Any, words: int, in_arena: bool) -> None:
    k, n = 320, 448
    w = weight(k, n, dtype)
    arena = TestArena(1)
    place = matrix(arena, w) if in_arena and dtype == jnp.bfloat16 else None
    places, _ = room_for_tiles(arena, k, n, words, BOTH)

    def kernel(ref: object, w: jax.Array) -> Any:
        return quantize_tiles.quantize_tiles(ref, place or w, places if in_arena else None, k=k, n=n, words=words)

    lower(kernel, arena.array(), w)


@pytest.mark.parametrize(
    ("k", "n", "dtype", "w_in_arena", "text"),
    [
        (0, 64, jnp.bfloat16, False, "empty"),
        (64, 64, jnp.float16, False, "float16"),
        (64, 64, jnp.float32, True, "in the arena the kernel takes bfloat16"),
        (64, 96, jnp.bfloat16, False, "k, n = 64, 96"),
    ],
)
def test_says_what_it_does_not_take(k: int, n: int, dtype: Any, w_in_arena: bool, text: str) -> None:
    reason = quantize_tiles.supports(k, n, dtype=dtype, w_in_arena=w_in_arena)
    assert reason is not None and text in reason


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"words": 3}, "words must be 1 or 2, got 3"),
        ({"orientations": ("sideways",)}, "orientations must be one or both of forward, backward"),
        ({"out": (Place(0, 64),)}, "1 place.s. for each of 2 orientation.s., got 1"),
    ],
)
def test_names_what_is_wrong(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        quantize_tiles.quantize_tiles(None, jnp.ones((64, 64)), k=64, n=64, **options)


@pytest.mark.parametrize(("field", "value"), [("warpgroups", 5), ("depth", 0), ("buffers", 0)])
def test_config_names_a_bad_field(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field} must be .*got {value}"):
        quantize_tiles.TilesConfig(**({"warpgroups": 1} | {field: value}))
