"""Projections with quantized operands, products or results; :func:`jaxarena.ops.project` checks the arguments and calls this.

With panels p of 128 along k, the words and scales of :mod:`jaxarena.ops.quantized`, and ``P(a, b) = sum over a panel of a * b``, exact
in int32::

    one word    y = sum_p  sx[p] sw[p]  P(x, w)                                                       |P| <= 128 * 127^2 < 2^21
    two words   y = sum_p  sx[p] sw[p] (2^16 P(xh, wh) + 2^8 (P(xh, wl) + P(xl, wh)) + P(xl, wl))     x = 256 xh + xl

The panels' terms are float32 and added in ascending order of p, so a row's result depends on nothing but that row. The product of the low
words stays in: for normally distributed operands it is some 5e-5 of the result, more than two words' own error. Without a product
``storage`` the operands are decoded to the result's dtype and multiplied as floating point.

Error against the exact product: a decoded value is within half its scale of its own, so

    |dy| <= sum_k (sx / 2) |w| + |x| (sw / 2) + (sx / 2) (sw / 2)

and float32's rounding, ``tolerance(float32, panels, stages=4)``. For normally distributed operands that comes to about 1.1e-2 of the
result's size (both by root mean square) in one word and 4.5e-5 in two.

Gradient: straight-through, as if the decoded operands had been the operands::

    dx = dz @ decoded(weight)^T,  dweight = decoded(x)^T @ dz,  dresidual = dy

with ``dz = dy``, or from the kept rows with swiglu (:mod:`jaxarena.ops.project`). Operands are decoded to the dtype of dy; dx has the dtype
of x, dweight that of weight. x is kept as words and scales only, and not at all where weight takes no gradient.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from jaxarena.ops.checks import vary_together
from jaxarena.ops.interface import Launch, launch
from jaxarena.ops.project_float import dot, project_dweight, project_dx, swiglu_dz
from jaxarena.ops.quantized import (
    BLOCK,
    QUANTIZE,
    Parts,
    Quantized,
    block_count,
    from_parts,
    row_parts,
    row_values,
    tile_values,
)
from jaxarena.ops.swiglu import swiglu

__all__ = ["FORWARD", "ProductForm", "exact_product", "project_quantized"]


class ProductForm(NamedTuple):
    """What of a projection is known when it is traced.

    Attributes:
      x: how x comes to the launch: None as floating point, or its storage.
      weight: the same of weight.
      storage: None for a product in ``dtype``, else the storage whose words are multiplied, which is then also that of x and weight.
      out: None for a floating-point result, or its storage.
      activation: None or ``"swiglu"``.
      residual: whether one is added.
      dtype: of the result, the dtype of x.
      weight_dtype: of the gradient of weight, the dtype of weight.
    """

    x: str | None
    weight: str | None
    storage: str | None
    out: str | None
    activation: str | None
    residual: bool
    dtype: Any
    weight_dtype: Any


def project_quantized(
    x: Array | Quantized,
    weight: Array | Quantized,
    residual: Array | None,
    *,
    storage: str | None,
    out: str | None,
    activation: str | None,
) -> Array | Quantized:
    """:func:`jaxarena.ops.project` of checked arguments."""
    form = ProductForm(
        x=x.storage if isinstance(x, Quantized) else storage,
        weight=weight.storage if isinstance(weight, Quantized) else storage,
        storage=storage,
        out=out,
        activation=activation,
        residual=residual is not None,
        dtype=jnp.dtype(x.dtype),
        weight_dtype=jnp.dtype(weight.dtype),
    )
    arrays, parts = zip(*(_operand(a) for a in (x, weight)), strict=True)
    return _project(form, *vary_together(*arrays, residual, *parts))


def _operand(a: Array | Quantized) -> tuple[Array | None, Parts | None]:
    """What the gradient goes to (None: nothing), and the words and scales of what is quantized already."""
    return (a.carrier, a.parts) if isinstance(a, Quantized) else (a, None)


def exact_product(x: Parts, weight: Parts) -> Float32[Array, "*rows n"]:
    """The product of x's row blocks ``[*rows, k]`` and the weight's tiles ``[n, k]``: exact within each panel, panels in order."""
    *x_words, x_scales = x
    *weight_words, weight_scales = weight
    *rows, k = x_words[0].shape
    n = weight_words[0].shape[0]
    panels = block_count(k)
    if not panels:
        return jnp.zeros_like(x_words[0], shape=(*rows, n), dtype=jnp.float32)

    def by_panel(words: list[Array]) -> Array:
        # Low words below the high ones: one product gives all pairs.
        flat = jnp.concatenate([w.reshape(-1, k) for w in words])
        return jnp.pad(flat, [(0, 0), (0, panels * BLOCK - k)]).reshape(len(flat), panels, BLOCK).transpose(1, 0, 2)

    x_panels, weight_panels = by_panel(x_words), by_panel(weight_words)
    x_scales = x_scales.reshape(panels, -1)
    m = x_scales.shape[1]

    def term(p: tuple[Array, ...]) -> Array:
        x_panel, x_scale, weight_panel, weight_scale = p
        sums = lax.dot_general(x_panel, weight_panel, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
        if len(x_words) == 1:
            v = sums.astype(jnp.float32)
        else:
            # 256 * (the three smaller ones) is below 2^31, and 2^16 times an integer below 2^24 is exact in float32.
            small = 256 * (sums[:m, n:] + sums[m:, :n]) + sums[m:, n:]
            v = 65536.0 * sums[:m, :n].astype(jnp.float32) + small.astype(jnp.float32)
        return v * (x_scale[:, None] * jnp.repeat(weight_scale, BLOCK)[:n])

    steps = x_panels, x_scales, weight_panels, weight_scales.T
    y = term(tuple(s[0] for s in steps))
    if panels > 1:
        y, _ = lax.scan(lambda y, p: (y + term(p), None), y, tuple(s[1:] for s in steps))
    return y.reshape(*rows, n)


def _multiply(x: Parts, weight: Parts, form: ProductForm) -> Float32[Array, "*rows n"]:
    if form.storage is not None:
        return exact_product(x, weight)
    left = x[0] if form.x is None else row_values(x).astype(form.dtype)
    right, axis = (weight[0], 0) if form.weight is None else (tile_values(weight).astype(form.dtype), 1)
    return dot(left, right, (left.ndim - 1,), (axis,))


def _forward(*operands: Array, form: ProductForm, keep: bool) -> tuple[Array, ...]:
    x, operands = _take(operands, form.x)
    weight, residual = _take(operands, form.weight)
    z = y = _multiply(x, weight, form)
    if form.activation == "swiglu":
        y = swiglu(z)
    for r in residual:
        y = y + r.astype(jnp.float32)
    result = (y.astype(form.dtype),) if form.out is None else row_parts(y, form.out)
    return (*result, z.astype(form.dtype)) if keep else result


def _take(arrays: tuple[Array, ...], storage: str | None) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """The arrays of the first operand, which is stored so, and the others."""
    count = {None: 1, "int8": 2, "int8x2": 3}[storage]
    return arrays[:count], arrays[count:]


def _forward_launch(out: str | None, keep: bool) -> Launch:
    """The launch for results stored so: operands are x's arrays, the weight's, and the residual if there is one; results are the array or
    its words, low words and scales, then the rows kept for swiglu's gradient."""
    name = "project_quantized" + (f"_to_{out}" if out else "") + ("_kept" if keep else "")
    results: tuple[int, ...] = {None: (1,), "int8": (1, 0), "int8x2": (1, 1, 0)}[out]

    def reference(*operands: Array, form: ProductForm) -> tuple[Array, ...]:
        return _forward(*operands, form=form, keep=keep)

    return launch(name, row_ndim=(*results, 1) if keep else results)(reference)


# By the storage of the result, and whether swiglu's rows are kept.
FORWARD = {(out, keep): _forward_launch(out, keep) for out in (None, "int8", "int8x2") for keep in (False, True)}


@launch("project_quantized_dx")
def project_quantized_dx(*operands: Array) -> Float[Array, "*rows k"]:
    """Operands: the weight's words, low words and scales, then dy."""
    *weight, dy = operands
    right = tile_values(tuple(weight)).astype(dy.dtype)
    return dot(dy, right, (dy.ndim - 1,), (0,)).astype(dy.dtype)


@launch("project_quantized_dweight")
def project_quantized_dweight(*operands: Array, dtype: Any) -> Float[Array, "k n"]:
    """Operands: x's words, low words and scales, then dy."""
    *x, dy = operands
    rows = tuple(range(dy.ndim - 1))
    left = row_values(tuple(x)).astype(dy.dtype)
    return dot(left, dy, rows, rows).astype(dtype)


Kept = tuple[Parts | None, Parts | None, Array | None]
"""x and weight as the launches take them, each None where its gradient is not asked for or the other takes none; swiglu's rows."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(
    form: ProductForm, x: Array | None, weight: Array | None, residual: Array | None, x_parts: Parts | None, weight_parts: Parts | None
) -> Array | Quantized:
    """The product; gradients go to x, weight and residual, of which the first two are carriers where there are parts (or None)."""
    return _run(form, _launch_operand(form.x, "row", x, x_parts), _launch_operand(form.weight, "tile", weight, weight_parts), residual)[0]


def _launch_operand(storage: str | None, block: str, array: Any, parts: Parts | None) -> Parts:
    if parts is not None:
        return parts
    return (array,) if storage is None else QUANTIZE[storage, block](array)


def _run(
    form: ProductForm, x: Parts, weight: Parts, residual: Array | None, *, keep: bool = False
) -> tuple[Array | Quantized, Array | None]:
    """The result, and the rows that swiglu keeps or None."""
    results = FORWARD[form.out, keep](*x, *weight, *(() if residual is None else (residual,)), form=form)
    results, z = (results[:-1], results[-1]) if keep else (results, None)
    if form.out is None:
        return results[0], z
    words = results[0]
    return from_parts(results, jnp.zeros_like(words, dtype=form.dtype), "row", form.dtype, words.shape[-1:]), z


def _project_fwd(
    form: ProductForm, x: Array | None, weight: Array | None, residual: Array | None, x_parts: Parts | None, weight_parts: Parts | None
) -> tuple[Array | Quantized, Kept]:
    left, right = _launch_operand(form.x, "row", x, x_parts), _launch_operand(form.weight, "tile", weight, weight_parts)
    y, z = _run(form, left, right, residual, keep=form.activation == "swiglu")
    return y, (None if weight is None else left, None if x is None else right, z)


def _project_bwd(form: ProductForm, kept: Kept, cotangent: Any) -> tuple[Array | None, Array | None, Array | None, None, None]:
    left, right, z = kept
    dy = cotangent if form.out is None else cotangent.carrier
    dz = dy if z is None else swiglu_dz(z, dy)
    dx = dweight = None
    if right is not None:
        dx = project_dx(*right, dz) if form.weight is None else project_quantized_dx(*right, dz)
    if left is not None:
        dweight = project_dweight(*left, dz) if form.x is None else project_quantized_dweight(*left, dz, dtype=form.weight_dtype)
    return dx, dweight, dy if form.residual else None, None, None


_project.defvjp(_project_fwd, _project_bwd)
