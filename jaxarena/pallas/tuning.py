"""The search for a product's fastest config on the GPU at hand.

It climbs from the config that the kernel would choose by itself: first the other configs of the kernel's table, then changes of one
field, in a fixed order, for as long as some change is faster and trials are left. A candidate runs in turn with the best so far, with a
pause before each: a large product draws more power than the card may use, and what runs second would run slower. It must be 1 % faster,
which is more than the medians differ by themselves, and give the same bits. Operands are arrays; a call
launches the product with several copies of its columns, as a decode step does with the weights of its layers, so that a weight comes
from memory and not from the second-level cache, and the host keeps ahead.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxarena.ops.quantized import row_parts, tile_parts
from jaxarena.pallas import project_bf16, project_int8, project_kept, project_two_words
from jaxarena.pallas.configs import Product, Table, Tuned
from jaxarena.pallas.frame import TileConfig

__all__ = ["KERNELS", "neighbours", "seconds_in_turn", "tune"]

GAIN = 1.01
"""How many times as fast a candidate must be."""

ROUNDS, PAUSE, AT_LEAST = 5, 0.1, 0.02
"""Of a comparison: its rounds, the pause before each, and the seconds of queued calls in one: the clocks need some to rise."""

_BYTES = 2**28
"""Of the copies of the columns together, where eight are so large: several times the second-level cache."""

Operands = tuple[Any, Any, Callable[[TileConfig, Any, Any], Any]]
"""Rows, columns, and what launches the product of the two with a config."""


def _normal(product: Product, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Rows ``[m, k]`` and columns ``[k, n]``."""
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (product.m, product.k), dtype), jax.random.normal(keys[1], (product.k, product.n), dtype)


def _sizes(product: Product, interpret: bool) -> dict[str, Any]:
    return {"m": product.m, "n": product.n, "k": product.k, "multiprocessors": product.multiprocessors, "interpret": interpret}


def _bf16(product: Product, interpret: bool) -> Operands:
    sizes = _sizes(product, interpret)
    return *_normal(product, jnp.bfloat16), lambda config, x, w: project_bf16.project_bf16(None, x, w, **sizes, config=config)


def _int8(product: Product, interpret: bool) -> Operands:
    (x, w), sizes = _normal(product, jnp.bfloat16), _sizes(product, interpret)
    return _rows(x, "int8"), _tiles(w, "int8"), lambda config, x, w: project_int8.project_int8(None, x, *w, **sizes, config=config)


def _two_words(product: Product, interpret: bool) -> Operands:
    (x, w), sizes = _normal(product, jnp.float32), _sizes(product, interpret)

    def launch(config: TileConfig, x: Any, w: Any) -> Any:
        return project_two_words.project_two_words(None, x, w[:2], w[2], **sizes, config=config)

    return _rows(x, "int8x2"), _tiles(w, "int8x2"), launch


def _kept(product: Product, interpret: bool) -> Operands:
    (x, dy), sizes = _normal(product, jnp.bfloat16), _sizes(product, interpret)
    sizes |= {"k": product.m, "m": product.k}  # of x and dy, which are summed over m
    return _rows(x.T, "int8"), dy, lambda config, x, dy: project_kept.dweight_kept(None, x, dy, **sizes, config=config)


_rows = jax.jit(row_parts, static_argnums=1)
_tiles = jax.jit(tile_parts, static_argnums=1)


@dataclasses.dataclass(frozen=True)
class Tunable:
    """A kernel: its operands for a product, the config it chooses by itself, and its table."""

    operands: Callable[[Product, bool], Operands]
    config_for: Callable[[int, int, int, int], TileConfig]
    table: Table


KERNELS = {
    "project_bf16": Tunable(_bf16, project_bf16.config_for, project_bf16.CONFIGS),
    "project_int8": Tunable(_int8, project_int8.config_for, project_int8.CONFIGS),
    "project_two_words": Tunable(_two_words, project_two_words.config_for, project_two_words.CONFIGS),
    "dweight_kept": Tunable(_kept, project_kept.config_for, project_kept.CONFIGS),
}


def neighbours(config: TileConfig) -> Iterator[TileConfig]:
    """The valid configs that differ from one in one field, or in how two share a cluster."""
    c = config
    changes: list[dict[str, Any]] = [
        *({"cluster_m": m, "cluster_n": n} for m, n in ((1, 1), (2, 1), (1, 2))),
        *({"stages": c.stages + more} for more in (1, -1, 2, -2)),
        {"in_turn": not c.in_turn},
        *({"buffers": count} for count in (1, 2)),
        *({"group": rows} for rows in (c.group // 2, 2 * c.group)),
        *({"together": panels} for panels in (1, 2, 4)),
        *({"piece": columns} for columns in (16, 32, 64)),
    ]
    for change in changes:
        try:
            other = dataclasses.replace(c, **change)
        except ValueError:
            continue
        if other != c:
            yield other


def seconds_in_turn(*calls: Callable[[], Any]) -> list[float]:
    """The median seconds of each of some calls that run in turn."""
    counts = []
    for call in calls:
        jax.block_until_ready(call())
        start = time.perf_counter()
        jax.block_until_ready([call() for _ in range(10)][-1])
        counts.append(max(10, round(AT_LEAST * 10 / (time.perf_counter() - start))))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, count, taken in zip(calls, counts, times, strict=True):
            time.sleep(PAUSE)
            start = time.perf_counter()
            for _ in range(count):
                last = call()
            jax.block_until_ready(last)
            taken.append((time.perf_counter() - start) / count)
    return [statistics.median(t) for t in times]


def tune(
    product: Product,
    *,
    trials: int,
    interpret: bool = False,
    seconds: Callable[..., Sequence[float]] = seconds_in_turn,
    say: Callable[[str], None] = print,
) -> Tuned:
    """The fastest config found for a product.

    Args:
      product: its kernel one of :data:`KERNELS`.
      trials: candidates at most, beside the config that the kernel chooses by itself.
      interpret: whether to interpret the kernel on the CPU.
      seconds: takes calls and returns the seconds of each.
      say: takes a line about every trial.

    Raises:
      ValueError: when the kernel is none of those, does not take the product, or ``trials`` is negative.
    """
    if product.kernel not in KERNELS:
        raise ValueError(f"tune: kernel must be one of {', '.join(KERNELS)}, got {product.kernel}")
    if trials < 0:
        raise ValueError(f"tune: trials must be at least 0, got {trials}")
    kernel = KERNELS[product.kernel]
    rows, columns, launch = kernel.operands(product, interpret)
    copies = min(8, -(-_BYTES // sum(a.nbytes for a in jax.tree.leaves(columns))))
    many = [jax.tree.map(lambda a: a + 0, columns) for _ in range(copies)]
    default = kernel.config_for(*product[1:])
    best, run_best = default, _compiled(default, launch, rows, many)
    expected = run_best()[0]
    (default_seconds,) = seconds(run_best)
    gain, tried, climbing = 1.0, {default}, True
    while climbing:
        climbing = False
        for candidate in (*(config for config, _ in kernel.table.values()), *neighbours(best)):
            if candidate in tried:
                continue
            if len(tried) > trials:
                break
            tried.add(candidate)
            changed = ", ".join(f"{name}={value}" for name, value in _difference(best, candidate).items())
            try:
                run = _compiled(candidate, launch, rows, many)
                same = bool(jnp.array_equal(run()[0], expected))
            except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
                say(f"  {changed}: refused: {str(error).splitlines()[0]}")
                continue
            if not same:
                say(f"  {changed}: refused: other bits than the default's")
                continue
            before, after = seconds(run_best, run)
            faster = before / after
            say(f"  {changed}: {faster:.3f} times the best so far")
            if faster >= GAIN:
                best, run_best, gain, climbing = candidate, run, gain * faster, True
                break
    milliseconds = 1e3 * default_seconds / copies
    return Tuned(product, best, milliseconds / gain, milliseconds)


def _compiled(config: TileConfig, launch: Callable[..., Any], rows: Any, many: list[Any]) -> Callable[[], list[jax.Array]]:
    """A call of the products of rows with many columns."""
    run = jax.jit(lambda rows, many: [launch(config, rows, columns) for columns in many]).lower(rows, many).compile()
    return lambda: run(rows, many)


def _difference(a: TileConfig, b: TileConfig) -> dict[str, Any]:
    mine = dataclasses.asdict(a)
    return {name: value for name, value in dataclasses.asdict(b).items() if value != mine[name]}
