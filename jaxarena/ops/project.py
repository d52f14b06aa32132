"""A linear projection, with an optional residual sum or SwiGLU behind it, in floating point or on int8 words.

::

    y = x @ weight                          plain
    y = x @ weight + residual               residual
    [a | u] = x @ weight,  y = silu(a) * u  swiglu: the gate's columns first, then as many of the up projection

Shazeer, "GLU Variants Improve Transformer", 2020; ``silu(z) = z * sigmoid(z)``. Products are summed in float32; the residual and
the activation are applied to that sum, which is rounded once, to the dtype of x. Products of float32 arrays follow
``jax.default_matmul_precision``.

Gradient::

    dx = dy @ weight^T,  dweight = x^T @ dy,  dresidual = dy

and with swiglu, ``dz = [dy * u * silu'(a) | dy * silu(a)]`` takes the place of dy, where
``silu'(z) = p (1 + z (1 - p))``, ``p = sigmoid(z)``. For that the rows ``z = [a | u]`` are kept, rounded to the dtype of x.

The launches: :mod:`jaxarena.ops.project_float`; with quantized operands, products or results, and what these compute exactly,
:mod:`jaxarena.ops.project_quantized`.
"""

from __future__ import annotations

from typing import overload

from jaxtyping import Array, Float

from jaxarena.ops.checks import (
    check_axis,
    check_choice,
    check_float,
    check_ndim,
    check_same_dtype,
    check_shape,
    vary_together,
)
from jaxarena.ops.project_float import project_add, project_plain, project_swiglu
from jaxarena.ops.project_quantized import project_quantized
from jaxarena.ops.quantized import STORAGES, Quantized, check_quantized

__all__ = ["project"]

ACTIVATIONS = (None, "swiglu")


@overload
def project(
    x: Array | Quantized,
    weight: Array | Quantized,
    *,
    residual: Array | None = None,
    activation: str | None = None,
    storage: str | None = None,
    out_storage: None = None,
) -> Array: ...


@overload
def project(
    x: Array | Quantized,
    weight: Array | Quantized,
    *,
    residual: Array | None = None,
    activation: str | None = None,
    storage: str | None = None,
    out_storage: str,
) -> Quantized: ...


def project(
    x: Float[Array, "*rows k"] | Quantized,
    weight: Float[Array, "k columns"] | Quantized,
    *,
    residual: Float[Array, "*rows n"] | None = None,
    activation: str | None = None,
    storage: str | None = None,
    out_storage: str | None = None,
) -> Float[Array, "*rows n"] | Quantized:
    """Multiplies each row of ``x`` by ``weight``, then adds ``residual`` or applies ``activation``.

    Args:
      x: ``[..., k]``, bfloat16 or float32, or quantized by rows.
      weight: ``[k, n]``, or ``[k, 2 n]`` with ``"swiglu"`` (gate columns first), in the dtype of ``x`` (with a ``storage``, of either
        dtype: give the float32 master weight as it is), or quantized by tiles.
      residual: ``[..., n]`` in the dtype of ``x``, or None. Not together with an activation.
      activation: None or ``"swiglu"``.
      storage: what is multiplied. None: floating point in the dtype of ``x``; quantized operands are decoded to it. ``"int8"`` or
        ``"int8x2"``: words, summed exactly within each block of 128 along k; floating-point operands are quantized first, ``x`` by rows
        and ``weight`` by tiles, and quantized ones must be stored so.
      out_storage: None for an array; ``"int8"`` or ``"int8x2"`` for the result quantized by rows, from the float32 sum.

    Returns:
      ``[..., n]`` in the dtype of ``x``, or such a :class:`~jaxarena.ops.Quantized`.

      In floating point within ``tolerance(dtype, length of the sum)`` of float64, gradients too; with swiglu ``stages=3`` for gradients,
      as kept rows are rounded (:func:`jaxarena.testing.tolerance`). For normally distributed operands one word is within 1.5e-2 of
      float64 and two words are within 5e-5 (root mean square of the error over that of the result), in a float32 result.

      Gradients are straight-through: those of the same product of the decoded operands, in the dtype of ``x``, given to ``x`` and to the
      master weight. A :class:`~jaxarena.ops.Quantized` hands its gradient on through its carrier to what it was quantized from; one
      without a carrier takes none, and the other operand still has its own. For the backward pass ``x`` is kept in words alone: where
      several projections read one ``x``, quantize it once and pass it to all of them, and they keep the same words.

    Raises:
      TypeError: an array is not bfloat16 or float32, or ``weight`` (without a ``storage``) or ``residual`` has another dtype than ``x``.
      ValueError: the shapes do not fit, ``activation``, ``storage`` or ``out_storage`` is not supported, both ``residual`` and
        ``activation`` are given, or a quantized operand has the wrong kind of blocks, another storage, or was cut within a block.
    """
    check_float("project", "x", x)
    check_float("project", "weight", weight)
    check_choice("project", "storage", storage, (None, *STORAGES))
    check_choice("project", "out_storage", out_storage, (None, *STORAGES))
    _check_quantized("x", x, "row", storage)
    _check_quantized("weight", weight, "tile", storage)
    check_ndim("project", "x", x, "... k")
    check_ndim("project", "weight", weight, "k n")
    if storage is None and not isinstance(weight, Quantized):
        check_same_dtype("project", "weight", weight, "x", x)
    check_axis("project", "weight", weight, 0, x.shape[-1], "the last axis of x")
    check_choice("project", "activation", activation, ACTIVATIONS)
    if residual is not None:
        if activation is not None:
            raise ValueError("project: residual must be None with activation 'swiglu', got an array: add it to the next projection")
        check_float("project", "residual", residual)
        check_same_dtype("project", "residual", residual, "x", x)
        check_shape("project", "residual", residual, (*x.shape[:-1], weight.shape[1]), "the rows of x by the columns of weight")
    if activation == "swiglu" and weight.shape[1] % 2:
        raise ValueError(
            f"project: weight must have an even number of columns with activation 'swiglu' (gate, then up), got {weight.shape[1]}"
        )
    if isinstance(x, Quantized) or isinstance(weight, Quantized) or storage is not None or out_storage is not None:
        return project_quantized(x, weight, residual, storage=storage, out=out_storage, activation=activation)
    if activation == "swiglu":
        return project_swiglu(*vary_together(x, weight))
    if residual is None:
        return project_plain(*vary_together(x, weight))
    return project_add(*vary_together(x, weight, residual))


def _check_quantized(name: str, operand: Array | Quantized, block: str, storage: str | None) -> None:
    if not isinstance(operand, Quantized):
        return
    check_quantized("project", name, operand, block)
    if storage not in (None, operand.storage):
        raise ValueError(
            f"project: {name} must be stored as {storage!r} with storage={storage!r}, got a Quantized stored as {operand.storage!r}"
        )
