"""What the tests of every kernel share: an arena of random bytes with operands in it, and what a launch may write there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena import storage
from jaxarena.pallas.operands import Place
from jaxarena.panels import Layout

Span = tuple[int, int]


class TestArena:
    """An ``int8[rows, 128]`` arena. Operands are added one after another, with random bytes between and after them."""

    __test__ = False

    def __init__(self, seed: int):
        self._random = np.random.default_rng(seed)
        self._blocks = [self._noise(24)]

    def _noise(self, rows: int) -> np.ndarray:
        return self._random.integers(-128, 128, (rows, 128), np.int8)

    def _append(self, rows: np.ndarray) -> int:
        first = sum(len(b) for b in self._blocks)
        self._blocks += [rows, self._noise(8)]
        return first

    def add(self, x: jax.Array, row_ndim: int = 1) -> int:
        """Puts an array there and returns its first arena row."""
        layout = Layout(x.shape, storage.STORAGE_OF_DTYPE[x.dtype], row_ndim)
        return self._append(np.asarray(storage.encode(x, layout)))

    def room(self, shape: tuple[int, ...], dtype: Any, row_ndim: int = 1) -> tuple[int, Span]:
        """Leaves random bytes where a result will go: its first arena row, and the rows that may be written."""
        rows = Layout(shape, storage.STORAGE_OF_DTYPE[jnp.dtype(dtype)], row_ndim).bytes // 128
        first = self._append(self._noise(rows))
        return first, (first, first + rows)

    def array(self) -> jax.Array:
        return jnp.asarray(np.concatenate(self._blocks))


def matrix(arena: TestArena, x: jax.Array) -> Place:
    """The place of a matrix that is added to the arena."""
    return Place(arena.add(x), x.shape[0])


def words(arena: TestArena, parts: tuple[jax.Array, jax.Array]) -> Place:
    """The place of int8 words ``[m, k]`` and scales ``[panels, m]`` that are added to the arena."""
    x, scales = parts
    return Place(arena.add(x), x.shape[0], arena.add(scales, 0), 0, x.shape[0])


def fetch(arena: jax.Array, row: int, shape: tuple[int, ...], dtype: Any, row_ndim: int = 1) -> jax.Array:
    """The array that lies at an arena row."""
    layout = Layout(shape, storage.STORAGE_OF_DTYPE[jnp.dtype(dtype)], row_ndim)
    return storage.decode(arena[row : row + layout.bytes // 128], layout)


def room_for_rows(arena: TestArena, m: int, k: int, words: int) -> tuple[tuple[Place, ...], list[Span]]:
    """Room for words and scales, and the bytes of it."""
    panels = -(-k // 128)
    rooms = [arena.room((m, k), jnp.int8) for _ in range(words)]
    scale_row, _ = arena.room((panels, m), jnp.float32, 0)
    places = [Place(row, m, scale_row, 0, m) for row, _ in rooms]
    return tuple(places), [*(row_bytes(span) for _, span in rooms), scale_bytes(scale_row, panels * m)]


def coded(after: jax.Array, places: tuple[Place, ...], m: int, k: int) -> tuple[jax.Array, ...]:
    """The words and scales ``[m, k]`` that lie at these places."""
    words = [fetch(after, int(place.row), (m, k), jnp.int8) for place in places]
    return *words, fetch(after, int(places[0].scale_row), (-(-k // 128), m), jnp.float32, 0)


def room_for_tiles(arena: TestArena, k: int, n: int, words: int, orientations: tuple[str, ...]) -> tuple[tuple[Place, ...], list[Span]]:
    """Room for the words of a weight ``[k, n]``, and the bytes of it."""
    shapes = [(n, k) if orientation == "forward" else (k, n) for orientation in orientations for _ in range(words)]
    rooms = [arena.room(shape, jnp.int8) for shape in shapes]
    return tuple(Place(row, shape[0]) for (row, _), shape in zip(rooms, shapes, strict=True)), [row_bytes(span) for _, span in rooms]


def launch(kernel: Callable[..., Any], arena: jax.Array, *arrays: Any) -> tuple[jax.Array, Any]:
    """Runs ``kernel(arena's ref, *arrays)`` under jit: the arena after it, and what it returned."""

    def run(arena: jax.Array, *arrays: Any) -> tuple[jax.Array, Any]:
        ref = jax.new_ref(arena)
        result = kernel(ref, *arrays)
        return ref[...], result

    return jax.jit(run)(arena, *arrays)


def lower(kernel: Callable[..., Any], arena: jax.Array, *arrays: Any) -> None:
    """Lowers the kernel for CUDA, which needs no GPU."""

    def run(arena: jax.Array, *arrays: Any) -> tuple[jax.Array, Any]:
        ref = jax.new_ref(arena)
        result = kernel(ref, *arrays)
        return ref[...], result

    lowered = jax.jit(run, donate_argnums=0).trace(arena, *arrays).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def launch_writing(kernel: Callable[..., Any], arena: jax.Array, written: Sequence[Span], *arrays: Any) -> tuple[jax.Array, Any]:
    """:func:`launch`, and a proof that it writes all of these bytes of the arena and no other.

    It runs twice, over bytes that are all different in what it may write: what both runs leave there must be the same, and everything
    else must be as before.

    Args:
      kernel: as for :func:`launch`.
      arena: ``int8[rows, 128]``, random bytes where the results will go.
      written: runs of bytes ``(start, stop)``, counted from the arena's start.
      arrays: as for :func:`launch`.

    Returns:
      The arena after the first run, and what the kernel returned.

    Raises:
      AssertionError: naming the first bytes that were changed and should not have been, or were left.
    """
    before = np.asarray(arena).reshape(-1)
    declared = np.zeros(before.shape, bool)
    for start, stop in written:
        declared[start:stop] = True
    other = np.where(declared, ~before, before)

    def run(arena: jax.Array, *arrays: Any) -> tuple[jax.Array, Any]:
        ref = jax.new_ref(arena)
        result = kernel(ref, *arrays)
        return ref[...], result

    jitted = jax.jit(run)
    after, result = jitted(arena, *arrays)
    again, _ = jitted(jnp.asarray(other.reshape(arena.shape)), *arrays)
    first, second = (np.asarray(a).reshape(-1) for a in (after, again))
    changed = np.flatnonzero((first != before) & ~declared)
    assert not len(changed), f"{len(changed)} bytes changed that were not declared, first {changed[:8].tolist()}, outside {list(written)}"
    left = np.flatnonzero(declared & (first != second))
    assert not len(left), f"{len(left)} declared bytes were not written, or depend on what lay there, first {left[:8].tolist()}"
    return after, result


def row_bytes(span: Span) -> Span:
    """The bytes of a run of arena rows."""
    return 128 * span[0], 128 * span[1]


def scale_bytes(row: int, count: int) -> Span:
    """The bytes of ``count`` scales from an arena row on."""
    return 128 * row, 128 * row + 4 * count


def assert_no_race(capsys: pytest.CaptureFixture[str]) -> None:
    """Interpret mode, which prints the races it finds, found none."""
    assert "RACE DETECTED" not in capsys.readouterr().out


def relative_error(actual: jax.Array, expected: jax.Array) -> float:
    a, b = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
