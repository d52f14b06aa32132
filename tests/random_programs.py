"""Random programs from a seed, with exact arithmetic: what a step may be made of, in combinations that nobody thought of.

A program is a list of moves. Each looks at the *pool* (the inputs and all that was made so far) and adds values to it; a loop, a nested
jit or a checkpoint has a pool of its own with moves of its own. Values are small integers in every dtype. Each carries a bound on its
magnitude, so that a move clips an operand only where the result would no longer be exact (8 bits in bf16, 24 in f32): launches mostly
follow launches, and any two ways to run a program agree in every bit.

Every move draws from a generator of its own, seeded by the program's seed and the move's path, so a body that JAX traces twice is the
same both times, and a move can be left out (``skip``) to make a failing program smaller.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxarena.ops.interface import launch
from tests.programs import both_forward, sum_forward, times, times_forward, twice, twice_forward

__all__ = ["Program", "random_program", "shrink"]

SMALL = 3
"""The bound of inputs and of what loops carry."""

EXACT = {"float32": 2**22, "int32": 2**22, "bfloat16": 2**8, "bool": 1}
MOST_MOVES = 5
"""Of the body of a loop or call."""

WIDTHS = 32, 64, 96, 128, 130, 256


@launch("limit")
def limit_forward(x: Any) -> Any:
    return jnp.clip(x, -SMALL, SMALL)


@launch("flip")
def flip_forward(x: Any) -> Any:
    return -x


@launch("larger")
def larger_forward(x: Any, y: Any) -> Any:
    return jnp.where(x > y, x, y)


@launch("as_integers")
def integers_forward(x: Any) -> Any:
    return x.astype(jnp.int32)


@launch("as_bf16")
def bf16_forward(x: Any) -> Any:
    return x.astype(jnp.bfloat16)


@launch("as_f32")
def f32_forward(x: Any) -> Any:
    return x.astype(jnp.float32)


@launch("remainder")
def remainder_forward(x: Any) -> Any:
    return (3 * x + 1) % 5


@launch("positive")
def positive_forward(x: Any) -> Any:
    return x > 0


@launch("peaks", row_ndim=(0, 2, 1))
def peaks_forward(x: Any) -> Any:
    return x.max(axis=-1), -x, x.min(axis=-1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class Bounded:
    """An array and a bound on the magnitude of its values."""

    array: jax.Array
    bound: int

    @property
    def kind(self) -> tuple[tuple[int, ...], str]:
        return self.array.shape, self.array.dtype.name

    @property
    def exact(self) -> int:
        return EXACT[self.array.dtype.name]


Pool = list[Bounded]
Move = Callable[["Body", np.random.Generator, tuple[int, ...]], Iterable[Bounded]]


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of ``inputs``, made of ``moves`` moves drawn from ``seed``; ``skip`` leaves moves out, by path."""

    seed: int
    moves: int = 7
    skip: frozenset[tuple[int, ...]] = frozenset()

    @property
    def inputs(self) -> list[jax.Array]:
        rng = np.random.default_rng(self.seed)
        batch, time = int(rng.integers(1, 4)), int(rng.choice([7, 8, 16]))
        widths = rng.choice(WIDTHS, 2, p=[0.3, 0.2, 0.1, 0.2, 0.1, 0.1])
        shapes = [(batch, time, int(widths[0])), (batch, time, int(widths[1])), (time, int(widths[0])), (batch, time, int(widths[0]))]
        dtypes = [jnp.float32, rng.choice([jnp.float32, jnp.bfloat16]), jnp.float32, rng.choice([jnp.float32, jnp.int32, jnp.bfloat16])]
        arrays = [jnp.asarray(rng.integers(-SMALL, SMALL + 1, s), d) for s, d in zip(shapes, dtypes, strict=True)]
        return [*arrays, jnp.asarray(rng.integers(0, 2, shapes[0][-1:]), jnp.bool_)]

    @property
    def jaxpr(self) -> str:
        """The program as text."""
        return str(jax.make_jaxpr(self.__call__)(*self.inputs))

    def __call__(self, *inputs: jax.Array) -> Any:
        body = Body(self, [Bounded(x, 1 if x.dtype == bool else SMALL) for x in inputs], depth=0)
        body.run((), self.moves)
        rng = np.random.default_rng([self.seed, 2**31])
        picks = [body.pick(rng) for _ in range(rng.integers(2, 6))]
        # Most results are read by XLA at the very end; some are returned as they are, some twice, and an input unchanged.
        results = [v.array if rng.random() < 0.25 else _plus_zero(v.array) for v in picks]
        if rng.random() < 0.3:
            results += [results[0], inputs[0]]
        return results


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """The program without the moves that do not matter to its failing: first whole bodies, then the moves in those that stay."""
    for depth in (1, 2, 3):
        for path in reversed(list(itertools.product(range(program.moves), *[range(MOST_MOVES)] * (depth - 1)))):
            if not any(path[:n] in program.skip for n in range(1, depth + 1)):
                smaller = dataclasses.replace(program, skip=program.skip | {path})
                if smaller.jaxpr != program.jaxpr and fails(smaller):
                    program = smaller
    return program


def random_program(seed: int, moves: int = 7) -> Program:
    return Program(seed, moves)


class NoOperand(Exception):
    """Nothing in the pool suits a move, which then makes nothing."""


@dataclasses.dataclass
class Body:
    """A pool under construction: a program's, or that of a loop's body or a nested call."""

    program: Program
    pool: Pool
    depth: int

    def run(self, path: tuple[int, ...], moves: int) -> None:
        for index in range(moves):
            here = (*path, index)
            if here not in self.program.skip:
                rng = np.random.default_rng([self.program.seed, *here])
                names, weights = zip(*((m, w) for m, (w, deepest) in _MOVES.items() if self.depth <= deepest), strict=True)
                move: Move = names[rng.choice(len(names), p=np.array(weights) / sum(weights))]
                with contextlib.suppress(NoOperand):
                    self.pool += move(self, rng, here)

    def pick(self, rng: np.random.Generator, where: Callable[[Bounded], bool] = lambda v: True) -> Bounded:
        """A value of the pool, most often a late one."""
        found = [v for v in self.pool if where(v)]
        if not found:
            raise NoOperand
        return found[-1 - min(int(rng.geometric(0.25)) - 1, len(found) - 1)]

    def pick_number(self, rng: np.random.Generator) -> Bounded:
        return self.pick(rng, lambda v: v.array.dtype != bool)

    def pick_rows(self, rng: np.random.Generator) -> Bounded:
        return self.pick(rng, lambda v: v.array.dtype != bool and v.array.ndim >= 2)

    def pick_like(self, rng: np.random.Generator, like: Bounded) -> Bounded:
        """Another value of the same shape and dtype, or ``like`` itself."""
        return self.pick(rng, lambda v: v.kind == like.kind)


def _plus_zero(x: jax.Array) -> jax.Array:
    return ~x if x.dtype == bool else x + jnp.zeros((), x.dtype)


def _clip(v: Bounded, bound: int, rng: np.random.Generator) -> Bounded:
    """``v`` with a magnitude of at most ``bound`` (not less than SMALL), clipped by a launch or by XLA where it has to be."""
    if v.bound <= bound:
        return v
    if rng.random() < 0.6:
        return Bounded(limit_forward(v.array), SMALL)
    return Bounded(jnp.clip(v.array, -SMALL, SMALL), SMALL)


def _apply(rng: np.random.Generator, function: Callable[..., Any], growth: Callable[..., int], *operands: Bounded) -> Bounded:
    """``function`` of operands clipped so that the result is exact; none at all when it cannot be."""
    if growth(*(v.bound for v in operands)) > operands[0].exact:
        operands = tuple(_clip(v, SMALL, rng) for v in operands)
    return Bounded(function(*(v.array for v in operands)), growth(*(v.bound for v in operands)))


def _launch_of_one(body: Body, rng: np.random.Generator, path: tuple[int, ...]) -> Iterable[Bounded]:
    v = body.pick_number(rng)
    choice = rng.integers(8)
    if choice < 3:
        return [_apply(rng, twice if choice else twice_forward, lambda b: 2 * b, v)]
    if choice == 3:
        return [Bounded(limit_forward(v.array), SMALL)]
    if choice == 4 and v.array.dtype == jnp.int32:
        return [_apply(rng, remainder_forward, lambda b: 5, v)]
    if choice == 5:
        function = integers_forward if v.array.dtype == jnp.float32 else f32_forward
        return [Bounded(function(v.array), v.bound)]
    if choice == 6:
        return [Bounded(bf16_forward(w.array), w.bound) for w in [_clip(v, EXACT["bfloat16"], rng)]]
    if choice == 7 and rng.random() < 0.3:
        return [Bounded(positive_forward(v.array), 1)]
    return [Bounded(flip_forward(v.array), v.bound)]


def _launch_of_two(body: Body, rng: np.random.Generator, path: tuple[int, ...]) -> Iterable[Bounded]:
    v = body.pick_number(rng)
    w = body.pick_like(rng, v)
    if rng.random() < 0.4:
        return [_apply(rng, sum_forward, lambda a, b: a + b, v, w)]
    if rng.random() < 0.5:
        return [_apply(rng, times if rng.random() < 0.5 else times_forward, lambda a, b: a * b, v, w)]
    return [Bounded(larger_forward(v.array, w.array), max(v.bound, w.bound))]


def _launch_with_many_results(body: Body, rng: np.random.Generator, path: tuple[int, ...]) -> Iterable[Bounded]:
    v = body.pick_rows(rng)
    width = v.array.shape[-1]
    if rng.random() < 0.6 and v.array.size and v.exact >= SMALL * width:
        v = _clip(v, v.exact // width - 1, rng)
        first, total = both_forward(v.array)
        return [Bounded(first, v.bound + 1), Bounded(total, v.bound * width)]
    if not v.array.size:
        return []
    return [Bounded(r, v.bound) for r in peaks_forward(v.array)]


def _shapes_of(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[int, ...]:
    """Another shape of as many values."""
    options = [(math.prod(shape),), (1, *shape), (*shape, 1), (*shape[:-1], 1, *shape[-1:])]
    if len(shape) > 1:
        options += [(math.prod(shape[:-1]), shape[-1]), (shape[0], math.prod(shape[1:])), shape[::-1]]
    for heads in (2, 4):
        if shape and shape[-1] % heads == 0:
            options.append((*shape[:-1], heads, shape[-1] // heads))
        if shape and shape[0] % heads == 0:
            options.append((heads, shape[0] // heads, *shape[1:]))
    if 1 in shape:
        options.append(tuple(n for n in shape if n != 1))
    return options[rng.integers(len(options))]


def _reshape(body: Body, rng: np.random.Generator, path: tuple[int, ...]) -> Iterable[Bounded]:
    v = body.pick(rng)
    if v.array.ndim > 4:
        return [Bounded(v.array.reshape(-1), v.bound)]
    other = v.array.reshape(_shapes_of(v.array.shape, rng))
    if rng.random() < 0.4:
        other = other.reshape(v.array.shape)
    elif rng.random() < 0.2:
        other = jnp.squeeze(jnp.expand_dims(v.array, int(rng.integers(v.array.ndim + 1))))
    return [Bounded(other, v.bound)]


def _bounds(rng: np.random.Generator, size: int, count: int) -> list[int]:
    """``count`` places to cut an axis at: at tile bounds or anywhere, in order."""
    step = int(rng.choice([1, 8, 32, 64, 128]))
    return sorted(min(int(rng.integers(0, size // step + 1)) * step, size) for _ in range(count))


def _slice(body: Body, rng: np.random.Generator, path: tuple[int, ...]) -> Iterable[Bounded]:
    v = body.pick(rng, lambda v: v.array.ndim >= 1 and v.array.size > 0)
    axis = v.array.ndim - 1 if rng.random() < 0.5 else int(rng.integers(v.array.ndim))
    start, stop = _bounds(rng, v.array.shape[axis], 2)
    if start == stop:
        start, stop = 0, max(1, v.array.shape[axis] // 2)
    if rng.random() < 0.1:
        return [Bounded(v.array[..., ::2], v.bound)]
    return [Bounded(lax.slice_in_dim(v.array, start, stop, axis=axis), v.bound)]


def _split(body: Body, rng: np.random.Generator, path: tuple[int, ...]) -> Iterable[Bounded]:
    v = body.pick(rng, lambda v: v.array.ndim >= 1 and v.array.size > 0)
    axis = v.array.ndim - 1 if rng.random() < 0.7 else int(rng.integers(v.array.ndim))
    cuts = _bounds(rng, v.array.shape[axis], int(rng.integers(1, 3)))
    if rng.random() < 0.5 and v.array.shape[axis] % 2 == 0:
        cuts = [v.array.shape[axis] // 2]
    return [Bounded(p, v.bound) for p in jnp.split(v.array, cuts, axis=axis) if p.size]


def _concatenate(body: Body, rng: np.random.Generator, path: tuple[int, ...]) -> Iterable[Bounded]:
    v = body.pick(rng, lambda v: v.array.ndim >= 1)
    axis = v.array.ndim - 1 if rng.random() < 0.85 else 0

    def fits(w: Bounded) -> bool:
        rest = [w.array.shape[:axis], w.array.shape[axis + 1 :]] == [v.array.shape[:axis], v.array.shape[axis + 1 :]]
        return w.array.ndim == v.array.ndim and rest and w.array.dtype == v.array.dtype

    parts = [v] if rng.random() < 0.7 else [Bounded(_plus_zero(v.array), v.bound)]
    for _ in range(rng.integers(1, 3)):
        w = body.pick(rng, fits)
        fresh = rng.random() < 0.5 and w.array.dtype != bool
        parts.append(Bounded(flip_forward(w.array), w.bound) if fresh else w)
    if rng.random() < 0.5 and v.array.dtype != bool:
        parts[0] = Bounded(flip_forward(v.array), v.bound)
    parts = [parts[i] for i in rng.permutation(len(parts))]
    if sum(p.array.size for p in parts) > 2**16:
        return []
    return [Bounded(jnp.concatenate([p.array for p in parts], axis), max(p.bound for p in parts))]


def _xla(body: Body, rng: np.random.Generator, path: tuple[int, ...]) -> Iterable[Bounded]:
    v = body.pick(rng)
    x, b = v.array, v.bound
    if x.dtype == bool:
        return [Bounded(x.astype(jnp.float32), 1)]
    choice = rng.integers(9)
    if choice == 0:
        return [Bounded(-x, b)]
    if choice == 1:
        return [_apply(rng, lambda x: x + jnp.ones((), x.dtype), lambda b: b + 1, v)]
    if choice == 2:
        return [_apply(rng, lambda x, y: x - y, lambda a, b: a + b, v, body.pick_like(rng, v))]
    if choice == 3 and x.ndim and x.size:
        return [Bounded(x.max(axis=int(rng.integers(x.ndim)), keepdims=bool(rng.integers(2))), b)]
    if choice == 4 and x.ndim and x.dtype != jnp.bfloat16:
        axis = int(rng.integers(x.ndim))
        return [_apply(rng, lambda x: x.sum(axis), lambda b: b * max(x.shape[axis], 1), v)]
    if choice == 5 and x.ndim >= 2:
        return [Bounded(jnp.swapaxes(x, -1, int(rng.integers(x.ndim - 1))), b)]
    if choice == 6:
        return [Bounded(jnp.where(x > 0, x, jnp.zeros((), x.dtype)), b)]
    if choice == 7 and x.ndim:
        return [Bounded(x.at[..., : x.shape[-1] // 2].set(0), b)]
    return [Bounded(x.astype(jnp.float32), b)]


def _barrier(body: Body, rng: np.random.Generator, path: tuple[int, ...]) -> Iterable[Bounded]:
    picks = [body.pick(rng) for _ in range(rng.integers(1, 4))]
    guarded = lax.optimization_barrier([v.array for v in picks])
    return [Bounded(a, v.bound) for a, v in zip(guarded, picks, strict=True)]


def _copy(body: Body, rng: np.random.Generator, path: tuple[int, ...]) -> Iterable[Bounded]:
    v = body.pick(rng)
    return [Bounded(jnp.copy(v.array), v.bound)]


def _alias(v: Bounded, rng: np.random.Generator) -> Bounded:
    """The same values under another name, most of which share its memory; or joined of parts that launches make."""
    x, choice = v.array, rng.integers(6)
    if choice == 0:
        x = jnp.copy(x)
    elif choice == 1:
        x = lax.optimization_barrier(x)
    elif choice == 2:
        x = x.reshape(1, *x.shape).reshape(x.shape)
    elif choice == 3 and x.ndim >= 2 and x.shape[-1] % 2 == 0:
        x = jnp.concatenate([flip_forward(-part) for part in jnp.split(x, 2, axis=-1)], -1)
    elif choice == 4:
        x = jax.checkpoint(lambda x: x)(x)
    return Bounded(x, v.bound)


def _call(
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]], body: Body, rng: np.random.Generator, path: tuple[int, ...]
) -> Iterable[Bounded]:
    """A nested call: some operands are passed, the rest of the pool is closed over."""
    passed = [body.pick(rng) for _ in range(rng.integers(1, 4))]
    moves = int(rng.integers(1, 4))
    bounds: list[int] = []

    def function(*arrays: Any) -> list[Any]:
        inner = Body(body.program, body.pool[-3:] + [Bounded(a, v.bound) for a, v in zip(arrays, passed, strict=True)], body.depth + 1)
        start = len(inner.pool)
        inner.run(path, moves)
        made = inner.pool[start:] or inner.pool[-1:]
        bounds[:] = [v.bound for v in made]
        return [v.array for v in made]

    results = wrap(function)(*(v.array for v in passed))
    return [Bounded(r, b) for r, b in zip(results, bounds, strict=True)]


def _predicate(body: Body, rng: np.random.Generator) -> jax.Array:
    v = body.pick(rng, lambda v: v.array.size > 0)
    return v.array.reshape(-1)[int(rng.integers(v.array.size))] > 0


def _cond(body: Body, rng: np.random.Generator, path: tuple[int, ...]) -> Iterable[Bounded]:
    v = body.pick_number(rng)
    w = body.pick_like(rng, v)
    branches = (lambda x, y: (limit_forward(x), y), lambda x, y: (x, flip_forward(limit_forward(y))))
    results = lax.cond(_predicate(body, rng), *branches, v.array, w.array)
    return [Bounded(r, max(v.bound, w.bound, SMALL)) for r in results]


def _while(body: Body, rng: np.random.Generator, path: tuple[int, ...]) -> Iterable[Bounded]:
    v = _clip(body.pick_number(rng), SMALL, rng)
    _, result = lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, limit_forward(twice_forward(s[1]))), (0, v.array))
    return [Bounded(result, SMALL)]


def _scan(body: Body, rng: np.random.Generator, path: tuple[int, ...]) -> Iterable[Bounded]:
    length = int(rng.integers(1, 5))
    carried = [_clip(body.pick_number(rng), SMALL, rng) for _ in range(rng.integers(1, 4))]
    late: Pool = []
    if rng.random() < 0.5:
        # A start that a launch makes, which is known by another name too.
        late.append(Bounded(flip_forward(carried[0].array), carried[0].bound))
        carried[0] = _alias(late[0], rng)
        late = [_alias(late[0], rng)]
    if rng.random() < 0.5:
        carried[-1] = body.pick_like(rng, carried[0])
        carried[-1] = _clip(carried[-1], SMALL, rng)
    if rng.random() < 0.15:
        carried[0] = Bounded(jnp.zeros_like(carried[0].array), 0)
    stacks = [v for v in body.pool if v.array.ndim >= 2 and v.array.shape[0] == length]
    scanned = [stacks[rng.integers(len(stacks))] for _ in range(rng.integers(3)) if stacks]
    if rng.random() < 0.4:
        v = body.pick_number(rng)
        scanned.append(
            Bounded(
                jnp.stack([v.array, *(body.pick_like(rng, v).array for _ in range(length - 1))]),
                max(w.bound for w in body.pool if w.kind == v.kind),
            )
        )
    moves = int(rng.integers(1, MOST_MOVES if body.depth else MOST_MOVES + 1))
    outer = [*late, *(body.pick(rng) for _ in range(rng.integers(3)))]
    bounds: list[int] = []

    def turn(carry: Any, elements: Any) -> Any:
        draw = np.random.default_rng([body.program.seed, *path, 2**31])
        given = [Bounded(c, SMALL) for c in carry]
        inner = Body(body.program, [*outer, *(Bounded(e, v.bound) for e, v in zip(elements, scanned, strict=True)), *given], body.depth + 1)
        inner.run(path, moves)
        outs = []
        for old in given:
            if draw.random() < 0.5:
                # Launches on some value of this kind, and perhaps a late read of the old one.
                if draw.random() < 0.5:
                    inner.pool.append(_alias(old, draw))
                new = Bounded(flip_forward(limit_forward(inner.pick_like(draw, old).array)), SMALL)
                if draw.random() < 0.5:
                    inner.pool.append(Bounded(flip_forward(old.array), old.bound))
                new = _alias(new, draw)
            else:
                new = _clip(inner.pick_like(draw, old), SMALL, draw)
            inner.pool.append(new)
            outs.append(new)
        kept = [inner.pick(draw) for _ in range(draw.integers(4))]
        if draw.random() < 0.3:
            kept.append(given[0])
        if draw.random() < 0.3:
            kept.append(outs[0])
        if draw.random() < 0.3 and scanned:
            kept.append(inner.pool[len(outer)])
        bounds[:] = [v.bound for v in kept]
        return [v.array for v in outs], [v.array for v in kept]

    start = [v.array for v in carried]
    finals, stacked = lax.scan(
        turn, start, [v.array for v in scanned], length=length, reverse=bool(rng.integers(2)), unroll=int(rng.choice([1, 1, 1, 2]))
    )
    return [*(Bounded(y, b) for y, b in zip(stacked, bounds, strict=True)), *(Bounded(f, SMALL) for f in finals), *late]


def _gradient(body: Body, rng: np.random.Generator, path: tuple[int, ...]) -> Iterable[Bounded]:
    """The gradient of a loop of layers: kept activations, read backwards; perhaps recomputed."""
    v = body.pick(rng, lambda v: v.array.dtype == jnp.float32 and v.array.ndim >= 1)
    x = jnp.sign(v.array) if rng.random() < 0.5 else limit_forward(v.array)
    length, residual, joined, checkpointed = int(rng.integers(1, 3)), *(bool(rng.integers(2)) for _ in range(3))
    weights = jnp.stack([jnp.sign(body.pick_like(rng, v).array)] * length)

    def layer(h: Any, w: Any) -> Any:
        new = times(twice(h), w)
        if joined:
            first, second = jnp.split(times(jnp.concatenate([h, new], -1), jnp.concatenate([w, w], -1)), 2, axis=-1)
            new = first + second
        return (h + new if residual else new), None

    def loss(x: Any, weights: Any) -> Any:
        h, _ = lax.scan(jax.checkpoint(layer) if checkpointed else layer, x, weights, reverse=bool(rng.integers(2)))
        return jnp.sum(h)

    return [Bounded(jnp.clip(g, -SMALL, SMALL), SMALL) for g in jax.grad(loss, argnums=(0, 1) if rng.random() < 0.7 else (0,))(x, weights)]


_jit = functools.partial(_call, jax.jit)
_checkpoint = functools.partial(_call, jax.checkpoint)

# Each move's weight, and the deepest body it is made in: the program's own is 0, that of a loop or call in it 1.
_MOVES: dict[Move, tuple[float, int]] = {
    _launch_of_one: (6, 9),
    _launch_of_two: (4, 9),
    _launch_with_many_results: (2, 9),
    _reshape: (3, 9),
    _slice: (2, 9),
    _split: (2, 9),
    _concatenate: (3, 9),
    _xla: (3, 9),
    _barrier: (1, 9),
    _copy: (0.7, 9),
    _jit: (0.7, 1),
    _checkpoint: (0.7, 1),
    _cond: (0.7, 9),
    _while: (0.5, 9),
    _scan: (9, 1),
    _gradient: (1, 0),
}
