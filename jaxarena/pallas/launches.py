"""Which launches the kernels of this package run: each registered with what it takes, and how operands reach it.

Importing this module registers them (:meth:`jaxarena.ops.interface.Launch.kernel`). Of a product in bfloat16 the weight, and in the
weight's gradient dy, are read as row-major arrays, as are the scales of a quantized weight; everything else is read where it lies.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxarena.kernels import ArenaTensor, KernelDevice, Site
from jaxarena.ops.project_float import project_dweight, project_dx, project_forward
from jaxarena.ops.project_quantized import FORWARD, ProductForm
from jaxarena.ops.quantized import quantize_rows
from jaxarena.pallas import project_bf16, project_int8, project_two_words, quantize
from jaxarena.pallas.operands import Place, place_of

__all__: list[str] = []

Operand = ArenaTensor | jax.Array


def _site(operand: Operand) -> Site:
    return operand.site if isinstance(operand, ArenaTensor) else Site(operand.shape, operand.dtype)


def _matrix(operand: Operand | None) -> Any:
    """An operand or a result as kernels take it: its place, or a matrix, or None."""
    if isinstance(operand, ArenaTensor):
        return place_of(operand)
    return None if operand is None else operand.reshape(-1, operand.shape[-1])


def _row_count(*tensors: Operand | None) -> int:
    """Rows of the first of these that lies in the arena, with its pads, else of the first."""
    site = min((_site(t) for t in tensors if t is not None), key=lambda s: not s.in_arena)
    assert site.matrix is not None
    return site.matrix[0]


def _as(shape: tuple[int, ...], result: jax.Array | None) -> jax.Array | None:
    return None if result is None else result.reshape(shape)


def _on(device: KernelDevice) -> dict[str, Any]:
    return {"multiprocessors": device.multiprocessors, "interpret": device.interpret}


def _same_rows(**sites: Site) -> str | None:
    """Why these are not matrices of the same rows, counted with the pads that they have in the arena."""
    for name, site in sites.items():
        if site.matrix is None:
            return f"{name} does not lie as a matrix of rows"
    rows = {name: site.matrix[0] for name, site in sites.items() if site.matrix}
    if len(set(rows.values())) > 1:
        return f"rows must lie alike in all operands, got {', '.join(f'{r} in {name}' for name, r in rows.items())}"
    return None


def _no_pads(**sites: Site) -> str | None:
    """Why these are not matrices of rows without pads between them."""
    for name, site in sites.items():
        if site.matrix is None or site.matrix[0] * site.matrix[1] != site.size:
            return f"the rows of {name} must lie without pads, got shape {site.shape}"
    return None


def _must_be(dtype: Any, **sites: Site) -> str | None:
    wrong = [f"{name} of {site.dtype}" for name, site in sites.items() if site.dtype != dtype]
    return f"the kernel takes {jnp.dtype(dtype)}, not {' and '.join(wrong)}" if wrong else None


def _forward_supports(x: Site, weight: Site, *, out: Site) -> str | None:
    if reason := _must_be(jnp.bfloat16, x=x, weight=weight) or _same_rows(x=x, y=out):
        return reason
    assert out.matrix is not None
    return project_bf16.supports(
        out.matrix[0], weight.shape[1], weight.shape[0], rows_in_arena=x.in_arena, out_in_arena=out.in_arena
    )


@project_forward.kernel(_forward_supports, arrays=(1,))
def _forward(arena: Any, x: Operand, weight: jax.Array, *, out: ArenaTensor | None, device: KernelDevice) -> jax.Array | None:
    k, n = weight.shape
    y = project_bf16.project_bf16(arena, _matrix(x), weight, _matrix(out), m=_row_count(x, out), n=n, k=k, **_on(device))
    return _as((*_site(x).shape[:-1], n), y)


def _dx_supports(weight: Site, dy: Site, *, out: Site) -> str | None:
    if reason := _must_be(jnp.bfloat16, weight=weight, dy=dy) or _same_rows(dy=dy, dx=out):
        return reason
    assert out.matrix is not None
    k, n = weight.shape
    return project_bf16.supports(out.matrix[0], k, n, rows_in_arena=dy.in_arena, out_in_arena=out.in_arena, columns_transposed=True)


@project_dx.kernel(_dx_supports, arrays=(0,))
def _dx(arena: Any, weight: jax.Array, dy: Operand, *, out: ArenaTensor | None, device: KernelDevice) -> jax.Array | None:
    k, n = weight.shape
    m = _row_count(dy, out)
    dx = project_bf16.project_bf16(arena, _matrix(dy), weight, _matrix(out), m=m, n=k, k=n, columns_transposed=True, **_on(device))
    return _as((*_site(dy).shape[:-1], k), dx)


def _dweight_supports(x: Site, dy: Site, *, out: Site) -> str | None:
    if reason := _must_be(jnp.bfloat16, x=x, dy=dy) or _no_pads(x=x, dweight=out):
        return reason
    assert x.matrix is not None
    rows, k = x.matrix
    return project_bf16.supports(k, dy.shape[-1], rows, rows_in_arena=x.in_arena, out_in_arena=out.in_arena, rows_transposed=True)


@project_dweight.kernel(_dweight_supports, arrays=(1,))
def _dweight(arena: Any, x: Operand, dy: jax.Array, *, out: ArenaTensor | None, device: KernelDevice) -> jax.Array | None:
    dy = dy.reshape(-1, dy.shape[-1])
    k, (rows, n) = _site(x).shape[-1], dy.shape
    return project_bf16.project_bf16(arena, _matrix(x), dy, _matrix(out), m=k, n=n, k=rows, rows_transposed=True, **_on(device))


def _quantize_supports(x: Site, *, out: tuple[Site, Site]) -> str | None:
    words, scales = out
    if words.in_arena != scales.in_arena:
        return "words and scales must lie together, in the arena or as arrays"
    if reason := _must_be(jnp.bfloat16, x=x) or _no_pads(x=x, words=words):
        return reason
    assert words.matrix is not None
    return quantize.supports(*words.matrix, x_in_arena=x.in_arena, out_in_arena=words.in_arena)


@quantize_rows.kernel(_quantize_supports)
def _quantize(arena: Any, x: Operand, *, out: tuple[ArenaTensor | None, ArenaTensor | None], device: KernelDevice) -> Any:
    words, scales = out
    shape = _site(x).shape
    place = None if words is None else place_of(words, scales)
    result = quantize.quantize_rows(arena, _matrix(x), place, m=_row_count(x, words), k=shape[-1], **_on(device))
    return (None, None) if result is None else (result[0].reshape(shape), result[1].reshape(-1, *shape[:-1]))


def _split(operands: tuple[Any, ...], form: ProductForm) -> tuple[tuple[Any, ...], Any, tuple[Any, ...], Any]:
    """x's words and scales, and the weight's."""
    count = 2 if form.storage == "int8x2" else 1
    x, weight = operands[: count + 1], operands[count + 1 :]
    return x[:-1], x[-1], weight[:-1], weight[-1]


def _words_supports(*operands: Site, out: tuple[Site], form: ProductForm) -> str | None:
    if form.storage is None:
        return "no kernel decodes quantized operands"
    if form.activation or form.residual:
        return f"no kernel of words has an epilogue, got {form.activation or 'a residual'}"
    kernel, dtype = (project_two_words, jnp.float32) if form.storage == "int8x2" else (project_int8, jnp.bfloat16)
    if form.dtype != dtype:
        return f"the kernel of {form.storage} words gives {jnp.dtype(dtype)}, not {form.dtype}"
    x, x_scales, weight, _ = _split(operands, form)
    if len({site.in_arena for site in (*x, x_scales)}) > 1 or len({site.in_arena for site in weight}) > 1:
        return "the words and scales of an operand must lie together, in the arena or as arrays"
    if reason := _no_pads(x=x[0], y=out[0]):
        return reason
    rows, k = x[0].matrix or (0, 0)
    return kernel.supports(
        rows, weight[0].shape[0], k, rows_in_arena=x[0].in_arena, weight_in_arena=weight[0].in_arena, out_in_arena=out[0].in_arena
    )


@FORWARD[None, False].kernel(_words_supports, arrays=(-1,))
def _words(arena: Any, *operands: Operand, out: tuple[ArenaTensor | None], device: KernelDevice, form: ProductForm) -> Any:
    x, x_scales, weight, weight_scales = _split(operands, form)
    shape, n = _site(x[0]).shape, _site(weight[0]).shape[0]
    if isinstance(x_scales, ArenaTensor):
        rows = (place_of(x[0], x_scales), *(_matrix(w) for w in x[1:]))
    else:
        rows = (*(_matrix(w) for w in x), x_scales.reshape(x_scales.shape[0], -1))
    sizes = {"m": _row_count(x[0], out[0]), "n": n, "k": shape[-1]}
    columns = tuple(_matrix(w) for w in weight)
    if form.storage == "int8x2":
        y = project_two_words.project_two_words(arena, rows, columns, weight_scales, _matrix(out[0]), **sizes, **_on(device))
    else:
        left: Place | tuple[jax.Array, jax.Array] = rows[0] if len(rows) == 1 else rows
        y = project_int8.project_int8(arena, left, columns[0], weight_scales, _matrix(out[0]), **sizes, **_on(device))
    return (_as((*shape[:-1], n), y),)
