"""Arrays in block-quantized int8, as operands and results of ops.

With ``s`` the scale of the block that a value lies in (:mod:`jaxarena.storage` states how words and scales are made)::

    x ~ s * word                 storage "int8":   7 bits and a sign, |error| <= s / 2, s = amax / 127
    x ~ s * (256 * word + low)   storage "int8x2": 15 bits and a sign, |error| <= s / 2, s = amax / 32639

``block`` says which values share a scale:

- ``"row"``, for activations ``[..., k]``: 128 consecutive values of the last axis. Scales lie in (panel, row) order,
  ``[ceil(k / 128), ...]``, as the panels of the arena do, so that the scales of one tile of rows are consecutive.
- ``"tile"``, for weights ``[k, n]``: 128 x 128 values. Words lie as ``[n, k]``, with the axis that a product sums over last: the
  Hopper tensor cores read both int8 operands so. Scales are ``[ceil(n / 128), ceil(k / 128)]``.

Gradient: straight-through, ``dx = d dequantize(quantize(x))``. Words are integers and have no gradient, so a :class:`Quantized` holds
one more array, its **carrier**: zeros of the logical shape that no op reads. Ops give the gradient of the values to the carrier, and
:func:`quantize` hands the carrier's on to ``x``. Under ``jit`` nothing is ever stored for a carrier that stays inside the function;
:meth:`Quantized.detach` drops it from what leaves the function or needs no gradient, such as weights for inference.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int8

from jaxarena.ops.checks import check_choice, check_float, check_ndim, check_shape, vary_together
from jaxarena.ops.interface import Launch, launch
from jaxarena.panels import WORDS
from jaxarena.storage import BLOCK, quantize_blocks
from jaxarena.storage import dequantize as from_words
from jaxarena.storage import quantize as to_words

__all__ = ["BLOCK", "BLOCKS", "STORAGES", "Parts", "Quantized", "block_count", "check_quantized", "quantize"]

STORAGES = tuple(WORDS)
"""What :func:`quantize` can store: one int8 word a value, or two."""

BLOCKS = ("row", "tile")

Parts = tuple[Array, ...]
"""The arrays of a :class:`Quantized` that launches read: (words, scales) or (words, low, scales)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Quantized:
    """An array in int8 words with block scales; a pytree. The module's docstring states the layouts.

    Attributes:
      words: int8, ``[..., k]`` for ``block="row"``, ``[n, k]`` for ``block="tile"`` (the array is ``[k, n]``).
      low: int8 low words of the same shape, or None in one-word storage.
      scales: float32, ``[ceil(k / 128), ...]`` or ``[ceil(n / 128), ceil(k / 128)]``.
      carrier: what gradients go through, or None where there is none to take.
      block: ``"row"`` or ``"tile"``.
      dtype: bfloat16 or float32, the dtype of the array it was made from, and of what ops make of it.
      extent: the lengths of the blocked axes, ``(k,)`` or ``(k, n)``, of the whole array, so that an op can tell a shard whose blocks
        were cut; None for an array put together by hand.
    """

    words: Any
    low: Any
    scales: Any
    carrier: Any = None
    block: str = dataclasses.field(default="row", metadata={"static": True})
    dtype: Any = dataclasses.field(default=jnp.dtype(jnp.bfloat16), metadata={"static": True})
    extent: tuple[int, ...] | None = dataclasses.field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        # One static value for each dtype, however it was written: it is compared when pytrees are.
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))

    @property
    def storage(self) -> str:
        """``"int8"`` or ``"int8x2"``."""
        return "int8" if self.low is None else "int8x2"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that this stands for."""
        shape = tuple(self.words.shape)
        return shape if self.block == "row" else (*shape[:-2], shape[-1], shape[-2])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def parts(self) -> tuple[Any, ...]:
        """(words, scales) or (words, low, scales)."""
        return (self.words, self.scales) if self.low is None else (self.words, self.low, self.scales)

    @property
    def nbytes(self) -> int:
        """Bytes of words, low words and scales."""
        return sum(math.prod(part.shape) * part.dtype.itemsize for part in self.parts)

    def detach(self) -> Quantized:
        """The same words without a carrier: no gradient, and nothing but words and scales to store."""
        return dataclasses.replace(self, carrier=None)

    def dequantize(self, dtype: DTypeLike | None = None) -> Array:
        """The values as an array of :attr:`shape`.

        Args:
          dtype: of the result, a floating-point dtype; None takes :attr:`dtype`. Values are formed in float32 and rounded once.

        Raises:
          TypeError: words or scales have another dtype than stated, or ``dtype`` is not floating point.
          ValueError: their shapes do not fit each other.
        """
        check_quantized("dequantize", "array", self, self.block)
        dtype = self.dtype if dtype is None else jnp.dtype(dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"dequantize: dtype must be floating point, got {dtype}")
        carrier, parts = vary_together(self.carrier, self.parts)
        return _dequantize(self.block, dtype, None if carrier is None else carrier.dtype, carrier, parts)


def quantize(x: Float[Array, "*shape"], storage: str = "int8", block: str = "row") -> Quantized:
    """Puts ``x`` into int8 words with one scale a block of 128 values, or of 128 x 128.

    Args:
      x: ``[..., k]``, or ``[k, n]`` for ``block="tile"``; bfloat16 or float32.
      storage: ``"int8"``, one word a value, or ``"int8x2"``, two.
      block: ``"row"`` (activations) or ``"tile"`` (weights).

    Returns:
      A :class:`Quantized` within half a scale of ``x``, and f32's rounding. A block of zeros is exact; a NaN or an Inf makes NaN of its
      block and of no other. Its gradient, through the carrier, is that of ``x``.

    Raises:
      TypeError: ``x`` is not bfloat16 or float32, or quantized already.
      ValueError: ``storage`` or ``block`` is not supported, or ``x`` has too few axes.
    """
    if isinstance(x, Quantized):
        raise TypeError("quantize: x must be an array, got a Quantized: call its dequantize() first")
    check_choice("quantize", "storage", storage, STORAGES)
    check_choice("quantize", "block", block, BLOCKS)
    check_float("quantize", "x", x)
    check_ndim("quantize", "x", x, "... k" if block == "row" else "k n")
    parts, carrier = _quantize(storage, block, x)
    return from_parts(parts, carrier, block, x.dtype, x.shape[-1:] if block == "row" else x.shape)


def from_parts(parts: Parts, carrier: Array | None, block: str, dtype: Any, extent: tuple[int, ...]) -> Quantized:
    words, *low, scales = parts
    return Quantized(words, low[0] if low else None, scales, carrier, block=block, dtype=dtype, extent=extent)


def check_quantized(op: str, name: str, q: Quantized, block: str) -> None:
    """``q`` has blocks of this kind, and words, low words and scales that fit each other."""
    if q.block != block:
        raise ValueError(f"{op}: {name} must be quantized with block={block!r}, got block={q.block!r}")
    for part, dtype in (("words", jnp.int8), ("low", jnp.int8), ("scales", jnp.float32)):
        array = getattr(q, part)
        if part == "low" and array is None:
            continue
        if getattr(array, "dtype", None) != dtype:
            raise TypeError(
                f"{op}: {name}.{part} must be an array of {jnp.dtype(dtype)}, got {getattr(array, 'dtype', type(array).__name__)}"
            )
    if block == "tile" and q.ndim != 2:
        raise ValueError(f"{op}: {name}.words must have shape (n, k), got shape {tuple(q.words.shape)}: map over a stack's leading axis")
    if block == "row" and not q.ndim:
        raise ValueError(f"{op}: {name}.words must have shape (..., k), got shape ()")
    axes = (-1,) if block == "row" else (-2, -1)
    for axis, whole in zip(axes, q.extent or (), strict=False):
        size = q.shape[axis]
        if size != whole and size % BLOCK:
            raise ValueError(
                f"{op}: {name} must be sharded by whole blocks of {BLOCK}, got {size} of {whole} along axis {q.ndim + axis}: "
                "shard the float array and quantize each shard, or choose another axis"
            )
    if q.low is not None:
        check_shape(op, f"{name}.low", q.low, q.words.shape, f"the shape of {name}.words")
    check_shape(op, f"{name}.scales", q.scales, scales_shape(q), f"one scale a block of {name}.words; shard or slice them together")


def scales_shape(q: Quantized) -> tuple[int, ...]:
    if q.block == "row":
        return (block_count(q.shape[-1]), *q.shape[:-1])
    k, n = q.shape
    return block_count(n), block_count(k)


def block_count(n: int) -> int:
    """Blocks along an axis of ``n`` values."""
    return -(-n // BLOCK)


def row_parts(x: Float[Array, "*rows k"], storage: str) -> Parts:
    """Words (and low words) ``[*rows, k]`` and scales ``[panels, *rows]``."""
    word, low, scales = to_words(x, WORDS[storage])
    return *(w for w in (word, low) if w is not None), jnp.moveaxis(scales, -1, 0)


def tile_parts(x: Float[Array, "k n"], storage: str) -> Parts:
    """Words (and low words) ``[n, k]`` and scales ``[ceil(n / 128), ceil(k / 128)]``."""
    k, n = x.shape
    across, panels = block_count(n), block_count(k)
    padded = jnp.pad(x, [(0, panels * BLOCK - k), (0, across * BLOCK - n)])
    tiles = padded.reshape(panels, BLOCK, across, BLOCK).transpose(2, 0, 3, 1)
    word, low, scales = quantize_blocks(tiles.reshape(across, panels, BLOCK * BLOCK), WORDS[storage])

    def untiled(w: Array) -> Array:
        w = w.reshape(across, panels, BLOCK, BLOCK).transpose(0, 2, 1, 3)
        return w.reshape(across * BLOCK, panels * BLOCK)[:n, :k]

    return *(untiled(w) for w in (word, low) if w is not None), scales


def row_values(parts: Parts) -> Float32[Array, "*rows k"]:
    """The values of row blocks, float32."""
    word, *low, scales = parts
    return from_words(word, low[0] if low else None, jnp.moveaxis(scales, 0, -1))


def tile_values(parts: Parts) -> Float32[Array, "n k"]:
    """The values of tiles, float32, laid out as the words are."""
    word, *low, scales = parts
    return from_words(word, low[0] if low else None, jnp.repeat(scales, BLOCK, axis=0)[: word.shape[0]])


RowParts = tuple[Int8[Array, "*rows k"], Float32[Array, "panels *rows"]]
TwoWordRowParts = tuple[Int8[Array, "*rows k"], Int8[Array, "*rows k"], Float32[Array, "panels *rows"]]
TileParts = tuple[Int8[Array, "n k"], Float32[Array, "across panels"]]
TwoWordTileParts = tuple[Int8[Array, "n k"], Int8[Array, "n k"], Float32[Array, "across panels"]]


@launch("quantize_rows", row_ndim=(1, 0))
def quantize_rows(x: Float[Array, "*rows k"]) -> RowParts:
    word, scales = row_parts(x, "int8")
    return word, scales


@launch("quantize_rows_x2", row_ndim=(1, 1, 0))
def quantize_rows_x2(x: Float[Array, "*rows k"]) -> TwoWordRowParts:
    word, low, scales = row_parts(x, "int8x2")
    return word, low, scales


@launch("quantize_tiles", row_ndim=(1, 0))
def quantize_tiles(x: Float[Array, "k n"]) -> TileParts:
    word, scales = tile_parts(x, "int8")
    return word, scales


@launch("quantize_tiles_x2", row_ndim=(1, 1, 0))
def quantize_tiles_x2(x: Float[Array, "k n"]) -> TwoWordTileParts:
    word, low, scales = tile_parts(x, "int8x2")
    return word, low, scales


@launch("dequantize_rows")
def dequantize_rows(*parts: Array, dtype: Any) -> Float[Array, "*rows k"]:
    return row_values(parts).astype(dtype)


@launch("dequantize_tiles")
def dequantize_tiles(*parts: Array, dtype: Any) -> Float[Array, "k n"]:
    return tile_values(parts).T.astype(dtype)


QUANTIZE: dict[tuple[str, str], Launch] = {
    ("int8", "row"): quantize_rows,
    ("int8x2", "row"): quantize_rows_x2,
    ("int8", "tile"): quantize_tiles,
    ("int8x2", "tile"): quantize_tiles_x2,
}
"""The launch for a storage and a kind of block; it returns :data:`Parts`."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _quantize(storage: str, block: str, x: Array) -> tuple[Parts, Array]:
    return QUANTIZE[storage, block](x), jnp.zeros_like(x)


def _quantize_fwd(storage: str, block: str, x: Array) -> tuple[tuple[Parts, Array], None]:
    return _quantize(storage, block, x), None


def _quantize_bwd(storage: str, block: str, _: None, cotangent: Any) -> tuple[Array]:
    return (cotangent[1],)


_quantize.defvjp(_quantize_fwd, _quantize_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _dequantize(block: str, dtype: Any, carried: Any, carrier: Array | None, parts: Parts) -> Array:
    return (dequantize_rows if block == "row" else dequantize_tiles)(*parts, dtype=dtype)


def _dequantize_fwd(block: str, dtype: Any, carried: Any, carrier: Array | None, parts: Parts) -> tuple[Array, None]:
    return _dequantize(block, dtype, carried, carrier, parts), None


def _dequantize_bwd(block: str, dtype: Any, carried: Any, _: None, dx: Array) -> tuple[Array | None, None]:
    return None if carried is None else dx.astype(carried), None


_dequantize.defvjp(_dequantize_fwd, _dequantize_bwd)
