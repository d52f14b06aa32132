"""All launches of a projection's gradients in int8 over one arena, for the tests that interpret, lower and run them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxarena.ops.project_quantized import exact_product
from jaxarena.pallas.frame import TileConfig
from jaxarena.pallas.operands import Place
from jaxarena.pallas.project_backward import dweight_int8, dx_int8
from jaxarena.pallas.quantize import QuantizeConfig, quantize_columns, quantize_rows
from jaxarena.pallas.quantize_tiles import TilesConfig, quantize_tiles
from tests.pallas.arenas import Span, TestArena, coded, fetch, matrix, relative_error, room_for_rows, row_bytes
from tests.pallas.codes import assert_codes, assert_tile_codes

ROUNDING = 2.0**-8  # of bf16
ONE_WORD = 1.5e-2

SMALL = QuantizeConfig(warpgroups=2)
SMALL_TILES = TilesConfig(warpgroups=2, buffers=1)


class Backward:
    """An arena with x and dy, and room for their words and both gradients."""

    def __init__(self, m: int, n: int, k: int):
        random = np.random.default_rng(m + n + k)
        self.m, self.n, self.k = m, n, k
        # Channels of x of many sizes.
        self.x = jnp.asarray(random.standard_normal((m, k)) * np.exp(random.standard_normal((1, k))), jnp.bfloat16)
        self.dy = jnp.asarray(random.standard_normal((m, n)), jnp.bfloat16)
        self.w = jnp.asarray(random.standard_normal((k, n)), jnp.float32)
        self.arena = TestArena(0)
        self.written: list[Span] = []
        self.x_place, self.dy_place = matrix(self.arena, self.x), matrix(self.arena, self.dy)
        self.dy_rows, self.x_columns = self._room_for_words(m, n), self._room_for_words(k, m)
        self.dy_tiles, self.weight = self._room((n, m), jnp.int8), self._room((k, n), jnp.int8)
        self.dx, self.dw = self._room((m, k), jnp.bfloat16), self._room((k, n), jnp.float32)

    def _room(self, shape: tuple[int, int], dtype: Any) -> Place:
        row, span = self.arena.room(shape, dtype)
        self.written.append(row_bytes(span))
        return Place(row, shape[0])

    def _room_for_words(self, m: int, k: int) -> Place:
        (place,), written = room_for_rows(self.arena, m, k, 1)
        self.written += written
        return place

    def launches(self, ref: Any, w: jax.Array, *, product: TileConfig | None, small: bool, **device: Any) -> tuple[jax.Array, jax.Array]:
        """Runs all and returns the scales of w and dy by tiles."""
        m, n, k = self.m, self.n, self.k
        rows, tiles = (SMALL, SMALL_TILES) if small else (None, None)
        ((weight_scales,),) = quantize_tiles(ref, w, (self.weight,), k=k, n=n, orientations=("backward",), config=tiles, **device)
        quantize_rows(ref, self.dy_place, self.dy_rows, m=m, k=n, config=rows, **device)
        quantize_columns(ref, self.x_place, self.x_columns, m=m, k=k, config=rows, **device)
        ((dy_scales,),) = quantize_tiles(ref, self.dy_place, (self.dy_tiles,), k=m, n=n, orientations=("forward",), config=tiles, **device)
        dx_int8(ref, self.dy_rows, self.weight, weight_scales, self.dx, m=m, n=n, k=k, config=product, **device)
        dweight_int8(ref, self.x_columns, self.dy_tiles, dy_scales, self.dw, m=m, n=n, k=k, config=product, **device)
        return weight_scales, dy_scales

    def check(self, after: jax.Array, weight_scales: jax.Array, dy_scales: jax.Array) -> None:
        m, n, k = self.m, self.n, self.k
        dx = fetch(after, int(self.dx.row), (m, k), jnp.bfloat16)
        dw = fetch(after, int(self.dw.row), (k, n), jnp.float32)
        dy_rows, x_columns = coded(after, (self.dy_rows,), m, n), coded(after, (self.x_columns,), k, m)
        weight = fetch(after, int(self.weight.row), (k, n), jnp.int8), weight_scales
        dy_tiles = fetch(after, int(self.dy_tiles.row), (n, m), jnp.int8), dy_scales
        assert_codes(dy_rows, self.dy)
        assert_codes(x_columns, self.x.T)
        assert_tile_codes(weight, self.w.T)
        assert_tile_codes(dy_tiles, self.dy)
        assert relative_error(dx, exact_product(dy_rows, weight)) < ROUNDING
        assert relative_error(dw, exact_product(x_columns, dy_tiles)) < 4 * -(-m // 128) * 2.0**-24
        x, dy, w = (np.asarray(a, np.float64) for a in (self.x, self.dy, self.w))
        assert relative_error(dx, dy @ w.T) < ONE_WORD
        assert relative_error(dw, x.T @ dy) < ONE_WORD
        # Also every channel by itself, however small.
        channels = np.linalg.norm(np.asarray(dw) - x.T @ dy, axis=1) / np.linalg.norm(x.T @ dy, axis=1)
        assert channels.max() < 2 * ONE_WORD
