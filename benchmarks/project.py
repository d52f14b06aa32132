"""Projection kernels beside XLA (cuBLAS) on one NVIDIA GPU.

    python benchmarks/project.py            # writes results/project-<device>.json

Ours and the peer run in turn, at least 0.03 s of queued calls each, with a pause before each so that both start from the same clocks:
a product of this size draws more power than the card may use, and what runs second would run slower. The median is over rounds.
Operands of ours lie in an arena, rotating weights keep decode out of the second-level cache.

Rooflines: operations over what XLA's plain product of the same dtype reaches at 8192 cubed in this run, bytes over 4.3 TB/s.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import results
from jax import lax

from jaxarena import storage
from jaxarena.ops.project_quantized import exact_product
from jaxarena.ops.quantized import row_parts, tile_parts
from jaxarena.pallas.dequantize import dequantize_rows
from jaxarena.pallas.operands import Place
from jaxarena.pallas.project_backward import dweight_int8, dx_int8
from jaxarena.pallas.project_bf16 import project_bf16
from jaxarena.pallas.project_int8 import project_int8
from jaxarena.pallas.project_kept import dweight_kept
from jaxarena.pallas.project_two_words import project_two_words
from jaxarena.pallas.quantize import quantize_columns, quantize_rows
from jaxarena.pallas.quantize_tiles import quantize_tiles
from jaxarena.panels import Layout

SHAPES = [(8192, 8192, 8192), (16384, 8192, 2048), (8192, 2048, 8192), (4096, 12288, 4096)]
BANDWIDTH = 4.3e12
ROUNDS, PAUSE = 9, 0.15
AT_LEAST = 0.03
"""Seconds of queued calls in a round: the clocks need some to rise."""


class Arena:
    """A donated arena with its operands laid one after another; a launch is compiled once and called in place."""

    def __init__(self, *arrays: jax.Array, room: int):
        rows, self.rows = [], []
        for x in arrays:
            layout = Layout(x.shape, storage.STORAGE_OF_DTYPE[x.dtype], 0 if x.dtype == jnp.float32 else 1)
            self.rows.append(sum(map(len, rows)))
            rows.append(storage.encode(x, layout))
        self.free = sum(map(len, rows))
        self.buffer = jnp.concatenate([*rows, jnp.zeros((-(-room // 1024) * 8, 128), jnp.int8)])

    def launch(self, kernel: Callable[..., Any], *arrays: jax.Array) -> Callable[[], Any]:
        def run(buffer: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, Any]:
            ref = jax.new_ref(buffer)
            result = kernel(ref, *arrays)
            return ref[...], result

        compiled = jax.jit(run, donate_argnums=0).lower(self.buffer, *arrays).compile()

        def call() -> Any:
            self.buffer, result = compiled(self.buffer, *arrays)
            return self.buffer, result

        return call

    def read(self, row: int, shape: tuple[int, int]) -> jax.Array:
        layout = Layout(shape, "bf16", 1)
        return storage.decode(self.buffer[row : row + layout.bytes // 128], layout)


def in_turn(*calls: Callable[[], Any]) -> list[tuple[float, float]]:
    """The median seconds of each, and its spread."""
    counts = []
    for call in calls:
        jax.block_until_ready([call() for _ in range(3)][-1])
        start = time.perf_counter()
        jax.block_until_ready([call() for _ in range(10)][-1])
        counts.append(max(20, round(AT_LEAST * 10 / (time.perf_counter() - start))))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, count, seconds in zip(calls, counts, times, strict=True):
            time.sleep(PAUSE)
            start = time.perf_counter()
            for _ in range(count):
                last = call()
            jax.block_until_ready(last)
            seconds.append((time.perf_counter() - start) / count)
    return [results.median_and_spread(t) for t in times]


def row(
    case: str,
    metric: str,
    work: float,
    ours: tuple[float, float],
    peer: str,
    peer_seconds: float,
    target: str,
    roofline: float | None = None,
) -> results.Row:
    scale = 1e9 if metric == "GB/s" else 1e12
    mine, theirs = work / ours[0] / scale, work / peer_seconds / scale
    made = results.Row(case, metric, mine, peer, theirs, peer_seconds / ours[0], target, roofline, ours[1])
    print(f"{case:62s} {mine:8.1f} {metric}  {peer} {theirs:8.1f}  x{made.ratio:.3f}", flush=True)
    return made


def error(got: jax.Array, exact: jax.Array) -> float:
    return float(jax.jit(lambda a, b: jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))(got, exact))


def operands(m: int, n: int, k: int) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(m + n + k))
    return jax.random.normal(keys[0], (m, k), jnp.bfloat16), jax.random.normal(keys[1], (k, n), jnp.bfloat16)


def forward_rows(m: int, n: int, k: int, peaks: dict[str, float]) -> list[results.Row]:
    x, w = operands(m, n, k)
    words, weight_scales = jax.jit(lambda w: tile_parts(w, "int8"))(w)
    size, work = f"{m}x{n}x{k}", 2.0 * m * n * k
    panels = -(-k // 128)
    arena = Arena(x, room=m * k + 4 * m * panels + 2 * m * n + 2048)
    x_place, words_row = Place(arena.rows[0], m), arena.free
    scale_row = words_row + m * k // 128
    quantized = Place(words_row, m, scale_row, 0, m)
    out_row = scale_row + -(-4 * m * panels // 1024) * 8

    def product(ref: Any, words: Any, scales: Any) -> None:
        project_int8(ref, quantized, words, scales, Place(out_row, m), m=m, n=n, k=k)

    def both(ref: Any, words: Any, scales: Any) -> None:
        quantize_rows(ref, x_place, quantized, m=m, k=k)
        product(ref, words, scales)

    def plain(ref: Any, w: Any) -> None:
        project_bf16(ref, x_place, w, Place(out_row, m), m=m, n=n, k=k)

    xla = jax.jit(lambda x, w: x @ w)
    quantize_and_multiply, multiply = arena.launch(both, words, weight_scales), arena.launch(product, words, weight_scales)
    quantize_and_multiply()
    exact = jax.jit(lambda x, *w: exact_product(row_parts(x, "int8"), w))(x[:512], words, weight_scales)
    wrong = error(arena.read(out_row, (m, n))[:512], exact)
    whole, alone, bf16, peer = in_turn(quantize_and_multiply, multiply, arena.launch(plain, w), lambda: xla(x, w))
    roofline = peaks["int8"]
    rows = [
        row(f"project forward int8 {size}, rows quantized too", "TFLOP/s", work, whole, "xla", peer[0], "1.5 times", roofline),
        row(
            f"project forward int8 {size}, the product alone", "TFLOP/s", work, alone, "xla", peer[0], "1250 TOP/s at 8192 cubed", roofline
        ),
        row(f"project forward bf16 {size}", "TFLOP/s", work, bf16, "xla", peer[0], "0.97 times", peaks["bf16"]),
        results.Row(f"project forward int8 {size}: result beside the exact product of the words", "error", wrong, target="3.9e-3, of bf16"),
    ]
    return rows


def two_word_rows(size: int, peaks: dict[str, float]) -> list[results.Row]:
    """Words that are quantized already, float32 results, beside XLA's ways to multiply float32 arrays."""
    keys = jax.random.split(jax.random.key(size))
    x, w = (jax.random.normal(k, (size, size), jnp.float32) for k in keys)
    words, low, scales = jax.jit(lambda x: row_parts(x, "int8x2"))(x)
    *weight, weight_scales = jax.jit(lambda w: tile_parts(w, "int8x2"))(w)
    arena = Arena(words, low, scales, *weight, room=4 * size * size)
    x_places = Place(arena.rows[0], size, arena.rows[2], 0, size), Place(arena.rows[1], size)
    weight_places = Place(arena.rows[3], size), Place(arena.rows[4], size)

    def product(ref: Any, scales: Any) -> None:
        project_two_words(ref, x_places, weight_places, scales, Place(arena.free, size), m=size, n=size, k=size)

    ours = arena.launch(product, weight_scales)
    presets = lax.DotAlgorithmPreset
    precisions = {
        "xla f32 highest": (lax.Precision.HIGHEST, "6 times"),
        "xla BF16x3": (presets.BF16_BF16_F32_X3, "1.5 times"),
        "xla TF32": (presets.TF32_TF32_F32, "0.9 times"),
    }
    peers = [jax.jit(functools.partial(jnp.matmul, precision=precision)) for precision, _ in precisions.values()]
    mine, *theirs = in_turn(ours, *(functools.partial(peer, x, w) for peer in peers))
    exact = np.asarray(x[:256], np.float64) @ np.asarray(w, np.float64)
    layout = Layout((size, size), "f32", 1)
    ours()
    y = storage.decode(arena.buffer[arena.free : arena.free + layout.bytes // 128], layout)
    case = f"project forward two words {size}x{size}x{size}"
    rows = [
        row(case, "TFLOP/s", 2.0 * size**3, mine, name, seconds, target, peaks["int8"] / 4)
        for (name, (_, target)), (seconds, _) in zip(precisions.items(), theirs, strict=True)
    ]
    for name, result, target in [("", y, "5e-5"), *((name, peer(x, w), "") for name, peer in zip(precisions, peers, strict=True))]:
        wrong = float(np.linalg.norm(np.asarray(result[:256], np.float64) - exact) / np.linalg.norm(exact))
        rows.append(results.Row(f"{case}: {name or 'result'} beside float64", "error", wrong, target=target))
    return rows


def backward_rows(m: int, n: int, k: int, peaks: dict[str, float]) -> list[results.Row]:
    x, w = operands(m, n, k)
    dy, _ = operands(m, 8, n)
    arena = Arena(x, room=1024)
    place = Place(arena.rows[0], m)

    def ours(ref: Any, w: Any, dy: Any) -> Any:
        dx = project_bf16(None, dy, w, m=m, n=k, k=n, columns_transposed=True)
        return dx, project_bf16(ref, place, dy, m=k, n=n, k=m, rows_transposed=True)

    xla = jax.jit(lambda x, w, dy: (dy @ w.T, x.T @ dy))
    mine, peer = in_turn(arena.launch(ours, w, dy), lambda: xla(x, w, dy))
    return [row(f"project backward bf16 {m}x{n}x{k}", "TFLOP/s", 4.0 * m * n * k, mine, "xla", peer[0], "0.9 times", peaks["bf16"])]


class Free:
    """Hands out places in an arena's free rows."""

    def __init__(self, arena: Arena):
        self.row = arena.free

    def matrix(self, m: int, row_bytes: int) -> Place:
        place = Place(self.row, m)
        self.row += m * -(-row_bytes // 128)
        return place

    def words(self, m: int, k: int) -> Place:
        """Words and scales."""
        place = self.matrix(m, k)
        place = place._replace(scale_row=self.row, scale_stride=m)
        self.row += -(-m * -(-k // 128) // 256) * 8
        return place


def backward_int8_rows(m: int, n: int, k: int, peaks: dict[str, float]) -> list[results.Row]:
    """From words: both products in int8, with and without quantizing what they take; and in bf16, from kept rows of words."""
    x, w = operands(m, n, k)
    dy, _ = operands(m, 8, n)
    arena = Arena(x, dy, room=2 * m * n + 2 * m * k + 4 * m * k + (m * n + 2 * m * k) // 16 + 8192)
    free = Free(arena)
    x_place, dy_place = (Place(row, m) for row in arena.rows)
    dy_rows, x_columns, dy_tiles, kept = free.words(m, n), free.words(k, m), free.matrix(n, m), free.words(m, k)
    dx, decoded = free.matrix(m, 2 * k), free.matrix(m, 2 * k)
    ((weight, weight_scales),) = jax.jit(lambda w: quantize_tiles(None, w, k=k, n=n, orientations=("backward",)))(w)
    *_, dy_scales = jax.jit(lambda dy: tile_parts(dy, "int8"))(dy)

    def products(ref: Any, weight: Any, weight_scales: Any, dy_scales: Any) -> Any:
        dx_int8(ref, dy_rows, weight, weight_scales, dx, m=m, n=n, k=k)
        return dweight_int8(ref, x_columns, dy_tiles, dy_scales, m=m, n=n, k=k)

    def whole(ref: Any, weight: Any, weight_scales: Any) -> Any:
        quantize_rows(ref, dy_place, dy_rows, m=m, k=n)
        quantize_columns(ref, x_place, x_columns, m=m, k=k)
        ((scales,),) = quantize_tiles(ref, dy_place, (dy_tiles,), k=m, n=n, orientations=("forward",))
        return products(ref, weight, weight_scales, scales)

    def from_words(ref: Any, w: Any, dy: Any) -> Any:
        project_bf16(ref, dy_place, w, dx, m=m, n=k, k=n, columns_transposed=True)
        return dweight_kept(ref, kept, dy, m=m, n=n, k=k)

    def decoded_first(ref: Any, w: Any, dy: Any) -> Any:
        project_bf16(ref, dy_place, w, dx, m=m, n=k, k=n, columns_transposed=True)
        dequantize_rows(ref, kept, decoded, m=m, k=k)
        return project_bf16(ref, decoded, dy, m=k, n=n, k=m, rows_transposed=True)

    run = arena.launch(whole, weight, weight_scales)
    _, dw = run()
    exact_dx = jax.jit(lambda dy, w: dy.astype(jnp.float32) @ w.astype(jnp.float32).T)(dy[:512], w)
    exact_dw = jax.jit(lambda x, dy: x.astype(jnp.float32).T @ dy.astype(jnp.float32))(x[:, :512], dy)
    wrong = error(arena.read(dx.row, (m, k))[:512], exact_dx), error(dw[:512], exact_dw)
    prepare = arena.launch(lambda ref: quantize_rows(ref, x_place, kept, m=m, k=k))
    prepare()
    xla = jax.jit(lambda x, w, dy: (dy @ w.T, x.T @ dy))
    alone = arena.launch(products, weight, weight_scales, dy_scales)
    bf16_runs = arena.launch(from_words, w, dy), arena.launch(decoded_first, w, dy)
    all_of_it, two, bf16, first, peer = in_turn(run, alone, *bf16_runs, lambda: xla(x, w, dy))
    size, work, roofline = f"{m}x{n}x{k}", 4.0 * m * n * k, peaks["int8"]
    return [
        row(f"project backward int8 {size}, operands quantized too", "TFLOP/s", work, all_of_it, "xla", peer[0], "1.3 times", roofline),
        row(f"project backward int8 {size}, the products alone", "TFLOP/s", work, two, "xla", peer[0], "", roofline),
        row(f"project backward bf16 {size}, from kept int8 rows", "TFLOP/s", work, bf16, "xla", peer[0], "0.9 times", peaks["bf16"]),
        row(f"project backward bf16 {size}, int8 rows decoded first", "TFLOP/s", work, first, "xla", peer[0], "", peaks["bf16"]),
        results.Row(f"project backward int8 {size}: dx beside float32", "error", wrong[0], target="1.5e-2"),
        results.Row(f"project backward int8 {size}: dw beside float32", "error", wrong[1], target="1.5e-2"),
    ]


def memory_rows(m: int, k: int) -> list[results.Row]:
    """What only moves memory: each beside a copy of the same array, in bytes read and written."""
    x, _ = operands(m, 8, k)
    wide = x.astype(jnp.float32)
    arena = Arena(x, room=2 * (2 * m * k + m * k // 16) + 8192)
    free = Free(arena)
    rows, columns, x_place = free.words(m, k), free.words(k, m), Place(arena.rows[0], m)
    forward, backward = rows._replace(stride=k), columns._replace(stride=m)
    low = Place(columns.row, m)

    def decode(ref: Any) -> Any:
        return dequantize_rows(ref, rows, m=m, k=k)

    def tiles(ref: Any, w: Any) -> Any:
        return quantize_tiles(ref, w, (forward, backward), k=m, n=k)

    launches: list[tuple[str, float, Callable[..., Any], tuple[jax.Array, ...]]] = [
        ("quantize rows int8", 3 + 1 / 32, lambda ref: quantize_rows(ref, x_place, rows, m=m, k=k), ()),
        ("quantize rows two-word", 4 + 1 / 32, lambda ref: quantize_rows(ref, x_place, (rows, low), m=m, k=k, words=2), ()),
        ("quantize columns int8", 3 + 1 / 32, lambda ref: quantize_columns(ref, x_place, columns, m=m, k=k), ()),
        ("quantize tiles int8, both orientations", 4, tiles, (x,)),
        (
            "quantize tiles int8, float32, both orientations",
            6,
            lambda ref, w: quantize_tiles(ref, w, (forward, backward), k=m, n=k),
            (wide,),
        ),
        ("quantize tiles two-word, float32, both orientations", 8, lambda ref, w: quantize_tiles(None, w, k=m, n=k, words=2), (wide,)),
        ("dequantize rows int8", 3 + 1 / 32, decode, ()),
    ]
    copy = jax.jit(jnp.negative)
    made = []
    for name, per_value, kernel, arrays in launches:
        mine, peer = in_turn(arena.launch(kernel, *arrays), lambda: copy(x))
        work = per_value * m * k
        # The copy moves 4 bytes a value.
        made.append(row(f"{name} {m}x{k}", "GB/s", work, mine, "copy bandwidth", peer[0] * per_value / 4, "", BANDWIDTH / 1e9))
    return made


def decode_row(m: int, n: int, k: int, copies: int = 4) -> results.Row:
    padded = -(-m // 8) * 8
    x, w = operands(padded, n, k)
    x = x.at[m:].set(0)
    words, scales = jax.jit(lambda w: tile_parts(w, "int8"))(w)
    x_words, x_scales = jax.jit(lambda x: row_parts(x, "int8"))(x)
    many_words, many = [words + 0 for _ in range(copies)], [w + 0 for _ in range(copies)]
    ours = jax.jit(lambda x, s, ws: [project_int8(None, (x, s), v, scales, m=padded, n=n, k=k) for v in ws])
    xla = jax.jit(lambda x, ws: [x @ v for v in ws])
    mine, peer = in_turn(lambda: ours(x_words, x_scales, many_words), lambda: xla(x[:m], many))
    work = float(copies * (n * k + padded * k + 2 * padded * n))
    target = "1.7 times, 80 % of copy bandwidth"
    return row(f"project decode int8 {m}x{n}x{k}", "GB/s", work, mine, "xla", peer[0], target, BANDWIDTH / 1e9)


def peaks_at(size: int) -> dict[str, float]:
    x, w = operands(size, size, size)
    words = jax.random.randint(jax.random.key(0), (size, size), -127, 128, jnp.int8)
    int8 = jax.jit(lambda a: lax.dot_general(a, a, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32))
    bf16 = jax.jit(lambda x, w: x @ w)
    (fast, _), (plain, _) = in_turn(lambda: int8(words), lambda: bf16(x, w))
    found = {"int8": 2.0 * size**3 / fast / 1e12, "bf16": 2.0 * size**3 / plain / 1e12}
    print("peaks", found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="h200", help="names the result file")
    device = parser.parse_args().device
    peaks = peaks_at(8192)
    rows = [r for shape in SHAPES for r in forward_rows(*shape, peaks)]
    rows += [r for size in (4096, 8192) for r in two_word_rows(size, peaks)]
    rows += [r for shape in SHAPES[:2] for r in backward_rows(*shape, peaks)]
    rows += [r for shape in SHAPES for r in backward_int8_rows(*shape, peaks)]
    rows += memory_rows(8192, 8192)
    rows += [decode_row(m, 8192, 8192) for m in (1, 8, 32)]
    print(results.write("project", device, rows, results.device_name()))


if __name__ == "__main__":
    main()
