"""Rotary position embedding, half-split convention.

For a head of size d, the first ``r = rotary_dim`` elements are rotated and the rest are left as they are. Element i of the first
half of those r pairs with element ``i + r/2``, and the pair at position p turns by ``a = p * base^(-2i/r)``::

    y[i]       = x[i] cos(a) - x[i + r/2] sin(a)
    y[i + r/2] = x[i + r/2] cos(a) + x[i] sin(a)

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021; the pairing of GPT-NeoX, in which a checkpoint
of the Llama or Qwen family is stored. A rotation's transpose is the rotation by the opposite angle, so the gradient is the same
launch turned back, and nothing is kept for it but the positions.

An angle in float32 would be off by up to ``p * 2**-24`` radians, 0.06 at a million. So whole turns are dropped before anything is rounded:
with f the turns a position, in float64, and F the integer nearest ``2**32 f``, the int32 product ``p F`` wraps exactly where a turn ends,
and the rest, ``f - F / 2**32``, is below ``2**-33``::

    a = 2 pi ((p F mod 2**32) / 2**32 + p (f - F / 2**32))

The angle is right to 1e-6 radians, modulo whole turns, at every int32 position, negative ones too.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxarena.ops.checks import check_finite, check_float, check_int, check_ndim, check_positive_int, check_shape, vary_together
from jaxarena.ops.interface import launch

__all__ = ["rotary"]


def rotary(
    x: Float[Array, "b t h d"],
    *,
    positions: Int[Array, " t"] | Int[Array, "b t"] | None = None,
    base: float = 10000.0,
    rotary_dim: int | None = None,
) -> Float[Array, "b t h d"]:
    """Rotates the first ``rotary_dim`` elements of each head by angles proportional to the row's position.

    Args:
      x: ``[batch, time, heads, head size]``, bfloat16 or float32.
      positions: int32 ``[time]`` or ``[batch, time]``, any value; None for ``0 .. time - 1``.
      base: the ratio of the slowest to the fastest turn is about this; above 0.
      rotary_dim: even, at most the head size; None for the head size, which must then be even.

    Returns:
      The shape and dtype of ``x``; elements from ``rotary_dim`` on are those of ``x``, unchanged. Within ``tolerance(dtype, stages=2)`` of
      float64 (:func:`jaxarena.testing.tolerance`). A row's result depends on its position only, so a decoded row is that of a full pass.

    Raises:
      TypeError: ``x`` is not bfloat16 or float32, ``positions`` not int32, ``base`` not a number or ``rotary_dim`` not an int.
      ValueError: a shape does not fit, ``rotary_dim`` is odd or larger than the head size, or ``base`` is not above 0.
    """
    check_float("rotary", "x", x)
    check_ndim("rotary", "x", x, "batch time heads head_size")
    b, t, _, d = x.shape
    check_finite("rotary", "base", base)
    if base <= 0:
        raise ValueError(f"rotary: base must be above 0, got {base}")
    if rotary_dim is None:
        rotary_dim = d
    check_positive_int("rotary", "rotary_dim", rotary_dim)
    if rotary_dim % 2 or rotary_dim > d:
        raise ValueError(f"rotary: rotary_dim must be even and at most the head size of x, {d}, got {rotary_dim}")
    if positions is None:
        positions = jnp.arange(t, dtype=jnp.int32)
    check_int("rotary", "positions", positions)
    check_shape("rotary", "positions", positions, (t,) if positions.ndim == 1 else (b, t), "(time,) or (batch, time) of x")
    return _rotary(*vary_together(x, positions), float(base), rotary_dim)


def _angles(positions: Int[Array, "*rows"], base: float, half: int) -> Float[Array, "*rows half"]:
    """The angle of each pair at each position, without its whole turns."""
    turns = np.power(base, -np.arange(half, dtype=np.float64) / half) / (2 * np.pi)
    turns -= np.rint(turns)
    whole = np.rint(turns * 2.0**32)
    rest = jnp.asarray(turns - whole / 2.0**32, jnp.float32)
    wrapped = positions[..., None] * jnp.asarray(whole.astype(np.int64).astype(np.int32))
    return np.float32(2 * np.pi) * (wrapped.astype(jnp.float32) * np.float32(2.0**-32) + positions[..., None].astype(jnp.float32) * rest)


@launch("rotary", row_ndim=2)
def rotary_turn(
    x: Float[Array, "b t h d"], positions: Int[Array, " t"] | Int[Array, "b t"], *, base: float, rotary_dim: int, back: bool
) -> Float[Array, "b t h d"]:
    half = rotary_dim // 2
    angles = _angles(positions, base, half)[..., None, :]
    cos, sin = jnp.cos(angles), jnp.sin(-angles if back else angles)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:rotary_dim].astype(jnp.float32)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*(part.astype(x.dtype) for part in turned), x[..., rotary_dim:]], axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rotary(x: Array, positions: Array, base: float, rotary_dim: int) -> Array:
    return rotary_turn(x, positions, base=base, rotary_dim=rotary_dim, back=False)


def _rotary_fwd(x: Array, positions: Array, base: float, rotary_dim: int) -> tuple[Array, Array]:
    return _rotary(x, positions, base, rotary_dim), positions


def _rotary_bwd(base: float, rotary_dim: int, positions: Array, dy: Array) -> tuple[Array, None]:
    return rotary_turn(dy, positions, base=base, rotary_dim=rotary_dim, back=True), None


_rotary.defvjp(_rotary_fwd, _rotary_bwd)
