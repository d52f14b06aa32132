"""Quantization of a weight ``w [k, n]`` in tiles of 128 x 128 with one scale each (:mod:`jaxarena.pallas.codes`), read once and written
in both orientations that a training step needs::

    forward    words [n, k], scales [ceil(n / 128), ceil(k / 128)]    y = x w       sums over k
    backward   words [k, n], scales [ceil(k / 128), ceil(n / 128)]    dx = dy w^T   sums over n

as the tensor cores read int8 operands with the contracted axis last. Both hold the same words. The gradient ``dw = x^T dy`` takes dy in
the forward orientation: words ``[n, m]``.

A warpgroup works alone on a tile: it reads it from shared memory once for its largest magnitude and again, in pieces of 64 x 64, for the
words. Words are transposed by a product with the identity; they are exact in bf16. Each thread's magnitudes meet through shared memory.

Memory-bound: 2 or 4 bytes read and 2 written a value in one word, 4 in two.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxarena.pallas.codes import encode, magnitudes, transposed, write_identity
from jaxarena.pallas.operands import Matrix, Place, pack, unpack
from jaxarena.pallas.tiles import read_bytes, tile, viewed

__all__ = ["TilesConfig", "config_for", "quantize_tiles", "supports"]

_TILE, _HALF = 128, 64
_PIECES = [(down, across) for down in range(2) for across in range(2)]

Parts = tuple[jax.Array, ...]


@dataclass(frozen=True)
class TilesConfig:
    """How the work is spread.

    Attributes:
      warpgroups: a block, 1 to 4.
      depth: tiles a warpgroup has on their way, or in work.
      buffers: pieces of results a warpgroup has on their way out, or in work.

    Raises:
      ValueError: for a field outside what its line says.
    """

    warpgroups: int
    depth: int = 1
    buffers: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.warpgroups <= 4:
            raise ValueError(f"TilesConfig: warpgroups must be 1 to 4, got {self.warpgroups}")
        for name in ("depth", "buffers"):
            if getattr(self, name) < 1:
                raise ValueError(f"TilesConfig: {name} must be at least 1, got {getattr(self, name)}")


def config_for(dtype: Any, words: int) -> TilesConfig:
    """The config for a weight of this dtype: as many warpgroups as there is shared memory for."""
    wide = jnp.dtype(dtype).itemsize == 4
    return TilesConfig(warpgroups=2 if wide or words == 2 else 3, buffers=1 if wide and words == 2 else 2)


def supports(k: int, n: int, *, dtype: Any, w_in_arena: bool) -> str | None:
    """None if the kernel takes this weight, else why not."""
    if not (k and n):
        return "the weight is empty"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        return f"the kernel takes bfloat16 and float32, not {jnp.dtype(dtype)}"
    if w_in_arena and jnp.dtype(dtype) != jnp.bfloat16:
        return f"in the arena the kernel takes bfloat16, not {jnp.dtype(dtype)}"
    if k % _HALF or n % _HALF:
        return f"rows and columns must be multiples of {_HALF}, got k, n = {k}, {n}"
    return None


class _Form(NamedTuple):
    k: int
    n: int
    dtype: Any
    words: int
    orientations: tuple[str, ...]
    w_in_arena: bool
    out_in_arena: bool


ORIENTATIONS = ("forward", "backward")


def quantize_tiles(
    arena: Any,
    w: Place | jax.Array,
    out: tuple[Place, ...] | None = None,
    *,
    k: int,
    n: int,
    words: int = 1,
    orientations: tuple[str, ...] = ORIENTATIONS,
    config: TilesConfig | None = None,
    multiprocessors: int = 132,
    interpret: bool = False,
) -> tuple[Parts, ...]:
    """Words and scales of ``w``, by tiles.

    Args:
      arena: the arena's ref; None when no operand is a place.
      w: bf16 or float32 ``[k, n]``, or the place of a bf16 one.
      out: where words go: for each orientation its words, and with two words its low words; None: to arrays of their own.
      k: rows of ``w``.
      n: its columns.
      words: 1, or 2 for low words too.
      orientations: of the result: ``"forward"``, ``"backward"`` or both.
      config: overrides :func:`config_for`.
      multiprocessors: of the device.
      interpret: whether to interpret the kernel on the CPU, looking for races.

    Returns:
      For each orientation int8 words, with two words low words, and float32 scales; the scales alone when ``out`` is given. Scales are
      arrays of their own in any case.

    Raises:
      ValueError: when :func:`supports` has a reason against it, or ``words``, ``orientations`` or ``out`` are not as said here.
    """
    dtype = jnp.dtype(jnp.bfloat16 if isinstance(w, Place) else w.dtype)
    if reason := supports(k, n, dtype=dtype, w_in_arena=isinstance(w, Place)):
        raise ValueError(f"quantize_tiles: {reason}")
    if words not in (1, 2):
        raise ValueError(f"quantize_tiles: words must be 1 or 2, got {words}")
    if not orientations or len(set(orientations)) < len(orientations) or not set(orientations) <= set(ORIENTATIONS):
        raise ValueError(f"quantize_tiles: orientations must be one or both of {', '.join(ORIENTATIONS)}, got {orientations}")
    count = words * len(orientations)
    if out is not None and len(out) != count:
        raise ValueError(f"quantize_tiles: out must have {words} place(s) for each of {len(orientations)} orientation(s), got {len(out)}")
    form = _Form(k, n, dtype, words, orientations, isinstance(w, Place), out is not None)
    offsets = pack([w if isinstance(w, Place) else None, *(out or [None] * count)])
    array = None if isinstance(w, Place) else w
    made = _launch(arena, offsets, array, form, config or config_for(dtype, words), multiprocessors, interpret)
    each = 1 if form.out_in_arena else words + 1
    return tuple(made[each * i : each * (i + 1)] for i in range(len(orientations)))


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _launch(
    arena: Any, offsets: jax.Array, w: jax.Array | None, form: _Form, config: TilesConfig, multiprocessors: int, interpret: bool
) -> Parts:
    c, k, n = config, form.k, form.n
    down, across = -(-k // _TILE), -(-n // _TILE)
    blocks = min(multiprocessors, -(-down * across // c.warpgroups))
    stride = blocks * c.warpgroups
    kinds = len(form.orientations)

    def body(offsets_gmem: Any, *refs: Any) -> None:
        remaining = list(refs)
        w_ref = arena if form.w_in_arena else remaining.pop(0)
        outs: list[list[Matrix]] = []
        scales_refs = []
        for kind in range(kinds):
            places = [unpack(offsets_gmem, 1 + kind * form.words + word) if form.out_in_arena else None for word in range(form.words)]
            outs.append([Matrix(arena if form.out_in_arena else remaining.pop(0), place) for place in places])
            scales_refs.append(remaining.pop(0))
        w_smem, out_smem, word_smem, identity_smem, top_smem, scale_smem, full = remaining
        source = Matrix(w_ref, unpack(offsets_gmem, 0) if form.w_in_arena else None)
        warpgroup = lax.axis_index("warpgroup")
        first = lax.axis_index("block") * c.warpgroups + warpgroup
        mine = lax.div(down * across - first + stride - 1, jnp.int32(stride))
        numbers = w_smem[1] if form.w_in_arena else w_smem
        identity = identity_smem.at[warpgroup]
        write_identity(identity)

        def corner(i: Any) -> tuple[Any, Any]:
            """Which tile: down the rows of w, and across."""
            index = first + i * stride
            row = lax.div(index, jnp.int32(across))
            return row, index - row * across

        def slot(i: Any) -> Any:
            return warpgroup * c.depth + lax.rem(i, jnp.int32(c.depth))

        def fetch(i: Any) -> None:
            row, column = corner(i)
            for number, (r, s) in enumerate(_PIECES):
                # For a piece outside w one inside stands in, and is not used.
                top = jnp.minimum(row * _TILE + r * _HALF, k - _HALF)
                if form.w_in_arena:
                    panel = jnp.minimum(2 * column + s, n // _HALF - 1)
                    plgpu.copy_gmem_to_smem(source.tile(top, _HALF, panel), w_smem[0].at[slot(i), number], full.at[slot(i)])
                else:
                    left = jnp.minimum(column * _TILE + s * _HALF, n - _HALF)
                    piece = w_ref.at[pl.ds(top, _HALF), pl.ds(left, _HALF)]
                    plgpu.copy_gmem_to_smem(piece, w_smem.at[slot(i), number], full.at[slot(i)])

        def inside(i: Any, r: int, s: int) -> tuple[Any, Any]:
            row, column = corner(i)
            return row * _TILE + r * _HALF < k, column * _TILE + s * _HALF < n

        def values(i: Any, number: int) -> jax.Array:
            x = plgpu.load(numbers.at[slot(i), number], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
            if (k % _TILE == 0 and n % _TILE == 0) or number == 0:
                return x
            within_k, within_n = inside(i, *_PIECES[number])
            mask = 0 - (within_k & within_n).astype(jnp.int32)
            return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & mask, jnp.float32)

        def largest(i: Any) -> jax.Array:
            """The tile's largest magnitude, by its bits, in each of 64 rows."""
            tops = [magnitudes([values(i, number)]) for number in range(len(_PIECES))]
            top_smem[warpgroup] = functools.reduce(jnp.maximum, tops)
            plgpu.commit_smem()
            # Read as the columns of a piece, each row meets all 64.
            columns = plgpu.load(top_smem.at[warpgroup], layout=plgpu.Layout.WGMMA.reduce(0))
            return jnp.max(lax.broadcast_in_dim(columns, (_HALF, _HALF), [1]), axis=1)

        def store(kind: int, i: Any, r: int, s: int, buffer: Any) -> None:
            row, column = corner(i)
            within_k, within_n = inside(i, r, s)
            if form.orientations[kind] == "backward":
                top, panel, half, there, whole = row * _TILE + r * _HALF, column, s, within_k, within_n
            else:
                top, panel, half, there, whole = column * _TILE + s * _HALF, row, r, within_n, within_k

            # In the arena the last panel's pads are written too, with zeros.
            @pl.when(there if form.out_in_arena else there & whole)
            def _() -> None:
                for word in range(form.words):
                    target = outs[kind][word].tile(top, _HALF, panel).at[:, pl.ds(half * _HALF, _HALF)]
                    from_smem = out_smem.at[buffer, kind * form.words + word]
                    plgpu.copy_smem_to_gmem(from_smem, target, commit_group=False)

        def step(i: Any, _: Any) -> Any:
            plgpu.barrier_wait(full.at[slot(i)])
            if form.w_in_arena:
                for number in range(len(_PIECES)):
                    read_bytes(w_smem, (slot(i), number), interpret=interpret)
            top = largest(i)
            for number, (r, s) in enumerate(_PIECES):
                (coded,), scale = encode([values(i, number)], top, form.words)
                plgpu.wait_smem_to_gmem(c.buffers - 1, wait_read_only=True)
                buffer = warpgroup * c.buffers + number % c.buffers
                for kind, orientation in enumerate(form.orientations):
                    for word in range(form.words):
                        if orientation == "backward":
                            out_smem[buffer, kind * form.words + word] = coded[word]
                        else:
                            word_smem[warpgroup, word] = coded[word].astype(jnp.bfloat16)
                if number == 0:
                    scale_smem[warpgroup] = scale
                plgpu.commit_smem()
                if "forward" in form.orientations:
                    kind = form.orientations.index("forward")
                    for word in range(form.words):
                        turned = transposed(word_smem.at[warpgroup, word], identity)
                        out_smem[buffer, kind * form.words + word] = turned.astype(jnp.int8)
                    plgpu.commit_smem()
                for kind in range(kinds):
                    store(kind, i, r, s, buffer)
                plgpu.commit_smem_to_gmem_group()
            row, column = corner(i)
            for kind, orientation in enumerate(form.orientations):
                at = (row, column) if orientation == "backward" else (column, row)
                scales_refs[kind][at] = scale_smem[warpgroup, 0]

            @pl.when(i + c.depth < mine)
            def _() -> None:
                fetch(i + c.depth)

            return 0

        for i in range(c.depth):

            @pl.when(i < mine)
            def _(i: int = i) -> None:
                fetch(jnp.int32(i))

        lax.fori_loop(0, mine, step, 0)
        plgpu.wait_smem_to_gmem(0)

    w_type = tile((c.warpgroups * c.depth, len(_PIECES), _HALF, _HALF), form.dtype)
    if form.w_in_arena:
        w_type = viewed(tile((c.warpgroups * c.depth, len(_PIECES), _HALF, 128), jnp.int8), w_type, interpret=interpret)
    results: list[jax.ShapeDtypeStruct] = []
    for orientation in form.orientations:
        shape, scales = ((n, k), (across, down)) if orientation == "forward" else ((k, n), (down, across))
        results += [] if form.out_in_arena else [jax.ShapeDtypeStruct(shape, jnp.int8)] * form.words
        results.append(jax.ShapeDtypeStruct(scales, jnp.float32))
    made = plgpu.kernel(
        body,
        out_type=tuple(results),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=c.warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            w_type,
            tile((c.warpgroups * c.buffers, kinds * form.words, _HALF, _HALF), jnp.int8, _HALF),
            tile((c.warpgroups, form.words, _HALF, _HALF), jnp.bfloat16),
            tile((c.warpgroups, _HALF, _HALF), jnp.bfloat16),
            plgpu.SMEM((c.warpgroups, _HALF), jnp.int32),
            plgpu.SMEM((c.warpgroups, _HALF), jnp.float32),
            plgpu.Barrier(num_arrivals=len(_PIECES), num_barriers=c.warpgroups * c.depth),
        ],
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(*([offsets] if w is None else [offsets, w]))
    return tuple(made)
