"""Numbers that are hard to quantize, and what words and scales that a kernel made must be, beside the reference's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxarena import storage
from jaxarena.ops.quantized import tile_parts


def values(m: int, k: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Random numbers with blocks of zeros, NaN, Inf, subnormal and very small numbers among them."""
    x = np.random.default_rng(m + k).standard_normal((m, k)).astype(np.float32)
    x[3, :128], x[5, 7], x[8, 180], x[12, 130] = 0, np.nan, np.inf, -np.inf
    x[9, :128] *= 1e-39
    x[10, :128] *= 3e-37
    return jnp.asarray(x, dtype)


def weight(k: int, n: int, dtype: Any) -> jax.Array:
    """Random numbers, each row of another size, with a tile of zeros and one with NaN; the last half tile is large."""
    w = np.random.default_rng(k + n).standard_normal((k, n)) * np.exp(np.random.default_rng(k).standard_normal((k, 1)))
    w[:128, 128:] *= 3e-37
    w[128:, :128] = 0
    w[-3:, -1] = np.nan, 5, np.inf
    return jnp.asarray(w, dtype)


def integers(words: tuple[jax.Array, ...]) -> np.ndarray:
    """The integers that words, or words and low words, stand for."""
    word, *low = (np.asarray(w, np.int64) for w in words)
    return 256 * word + low[0] if low else word


def assert_integers(got: np.ndarray, expected: np.ndarray, words: int) -> None:
    """They differ by at most one, and seldom: a quotient within rounding of a half may go either way.

    The kernel's quotient has three roundings more: of 1 / 127 or 1 / 32639, of the reciprocal, of the product. It is off by at most
    ``32639 * 4 * 2^-24 < 0.008`` for two words, so a quotient whose fraction is spread evenly goes the other way in less than 1.6 %.
    """
    difference = np.abs(got - expected)
    assert difference.max() <= 1, f"off by {difference.max()}"
    assert (difference > 0).mean() < {1: 2e-3, 2: 1.6e-2}[words]


def assert_codes(parts: tuple[jax.Array, ...], x: jax.Array) -> None:
    """Words (and low words) ``[m, k]`` and scales ``[panels, m]`` are those of the rows of ``x``, and decode as near to it."""
    *words, scales = parts
    count = len(words)
    got, scales = integers(tuple(words)), np.asarray(scales)
    word, low, expected_scales = storage.quantize(x, count)
    np.testing.assert_allclose(scales, np.asarray(expected_scales).T, rtol=2.5e-7)
    expected = integers((word,) if low is None else (word, low))
    wide = scales.T.repeat(128, axis=1)[:, : x.shape[1]]
    bad = np.isnan(wide)
    assert not got[bad].any()
    assert_integers(got, expected, count)
    error = np.abs(got * wide.astype(np.float64) - np.asarray(x, np.float64))[~bad]
    limit = wide[~bad] * 0.5 * (1 + {1: 1e-5, 2: 2e-2}[count])
    assert (error <= np.maximum(limit, np.finfo(np.float32).tiny)).all()


def assert_tile_codes(parts: tuple[jax.Array, ...], w: jax.Array) -> None:
    """Words (and low words) ``[n, k]`` and scales are those of the tiles of ``w [k, n]``."""
    *words, scales = parts
    *expected, expected_scales = tile_parts(w, "int8" if len(words) == 1 else "int8x2")
    np.testing.assert_allclose(np.asarray(scales), np.asarray(expected_scales), rtol=2.5e-7)
    assert_integers(integers(tuple(words)), integers(tuple(expected)), len(words))
