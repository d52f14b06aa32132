"""An op of one's own, outside the package: a weighted squared ReLU, with its gradient, used in a planned step.

::

    y  = w * r^2                 r = max(x, 0), w a weight for each column
    dx = 2 w r dy
    dw = sum over rows of r^2 dy

The activation is that of So et al., "Primer: Searching for Efficient Transformers for Language Modeling", 2021. The forward launch has a
Pallas kernel too, which a GPU runs on the arena in place. docs/own-op.md goes through this file piece by piece. Run it with
``python examples/own_op.py``.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import jaxarena as ja
from jaxarena.kernels import ArenaTensor, KernelDevice, Site
from jaxarena.ops import launch
from jaxarena.ops.checks import check_float, check_ndim, check_shape, vary_together
from jaxarena.pallas.operands import Matrix, pack, place_of, unpack
from jaxarena.pallas.tiles import read_bytes, tile, viewed, write_bytes


@launch("relu2")
def relu2_forward(x: jax.Array, weight: jax.Array) -> jax.Array:
    r = jnp.maximum(x.astype(jnp.float32), 0)
    return (weight.astype(jnp.float32) * r * r).astype(x.dtype)


ROWS = 64  # of a tile


def relu2_supports(x: Site, weight: Site, *, out: Site) -> str | None:
    if not (x.in_arena and out.in_arena):
        return "it reads and writes the arena"
    if x.matrix is None or x.matrix != out.matrix or x.matrix[0] % ROWS:
        return f"it takes a multiple of {ROWS} rows, pads counted, got shape {x.shape}"
    return None


@relu2_forward.kernel(relu2_supports, arrays=(1,))
def relu2_kernel(arena: Any, x: ArenaTensor, weight: jax.Array, *, out: ArenaTensor, device: KernelDevice) -> None:
    rows, columns = x.site.matrix or (0, 0)
    pads = -columns % (128 // x.site.dtype.itemsize)
    weight = jnp.pad(weight.astype(jnp.float32), (0, pads))  # so that the pads of the result are zeros
    relu2_tiles(arena, pack([place_of(x), place_of(out)]), weight, rows, x.site.dtype, device.interpret)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def relu2_tiles(arena: Any, places: jax.Array, weight: jax.Array, rows: int, dtype: Any, interpret: bool) -> None:
    """One block for each panel of each 64 rows. Compiled once for a size, wherever x and y lie: their places are run-time numbers."""
    width = 128 // dtype.itemsize

    def body(places: Any, weight: Any, buffer: Any, weight_buffer: Any, arrived: Any) -> None:
        panel, row = lax.axis_index("panel"), lax.axis_index("tile") * ROWS
        as_bytes, as_numbers = buffer
        x, y = (Matrix(arena, unpack(places, i)).tile(row, ROWS, panel) for i in range(2))
        plgpu.copy_gmem_to_smem(x, as_bytes, arrived)
        plgpu.copy_gmem_to_smem(weight.at[pl.ds(panel * width, width)], weight_buffer, arrived)
        plgpu.barrier_wait(arrived)
        read_bytes(buffer, ..., interpret=interpret)
        r = jnp.maximum(plgpu.load(as_numbers, layout=plgpu.Layout.WGMMA).astype(jnp.float32), 0)
        w = plgpu.load(weight_buffer, layout=plgpu.Layout.WGMMA.reduce(0))
        as_numbers[...] = (lax.broadcast_in_dim(w, r.shape, [1]) * r * r).astype(dtype)
        write_bytes(buffer, ..., interpret=interpret)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(as_bytes, y)
        plgpu.wait_smem_to_gmem(0)

    plgpu.kernel(
        body,
        out_type=(),
        grid=(rows // ROWS, weight.size // width),
        grid_names=("tile", "panel"),
        scratch_types=[
            viewed(tile((ROWS, 128), jnp.int8), tile((ROWS, width), dtype), interpret=interpret),
            plgpu.SMEM((width,), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
        ],
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(places, weight)


@launch("relu2_dx")
def relu2_dx(x: jax.Array, weight: jax.Array, dy: jax.Array) -> jax.Array:
    r = jnp.maximum(x.astype(jnp.float32), 0)
    return (2 * weight.astype(jnp.float32) * r * dy.astype(jnp.float32)).astype(x.dtype)


@launch("relu2_dweight", row_ndim=0)
def relu2_dweight(x: jax.Array, dy: jax.Array, *, dtype: jnp.dtype) -> jax.Array:
    r = jnp.maximum(x.astype(jnp.float32), 0)
    rows = tuple(range(x.ndim - 1))
    return jnp.sum(r * r * dy.astype(jnp.float32), axis=rows).astype(dtype)


@jax.custom_vjp
def _relu2(x: jax.Array, weight: jax.Array) -> jax.Array:
    return relu2_forward(x, weight)


def _relu2_fwd(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return relu2_forward(x, weight), (x, weight)


def _relu2_bwd(kept: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = kept
    return relu2_dx(x, weight, dy), relu2_dweight(x, dy, dtype=weight.dtype)


_relu2.defvjp(_relu2_fwd, _relu2_bwd)


def relu2(x: jax.Array, weight: jax.Array) -> jax.Array:
    """``weight * max(x, 0)**2`` for ``x [..., d]`` and ``weight [d]``, each bfloat16 or float32; in the shape and dtype of ``x``."""
    check_float("relu2", "x", x)
    check_float("relu2", "weight", weight)
    check_ndim("relu2", "x", x, "... d")
    check_shape("relu2", "weight", weight, x.shape[-1:], "a number for each column of x")
    return _relu2(*vary_together(x, weight))


Params = dict[str, jax.Array]


def train_step(params: Params, x: jax.Array, target: jax.Array) -> tuple[Params, jax.Array]:
    """One step of gradient descent on a network of two projections with ``relu2`` between them."""

    def loss(params: Params) -> jax.Array:
        h = relu2(ja.ops.project(x, params["w_in"]), params["scale"])
        error = ja.ops.project(h, params["w_out"]) - target
        return jnp.mean(error * error)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def init(key: jax.Array, d: int, width: int) -> Params:
    """Float32 weights for rows of ``d`` numbers and a network ``width`` wide."""
    k_in, k_out = jax.random.split(key)
    return {
        "w_in": jax.random.normal(k_in, (d, width)) / d**0.5,
        "scale": jnp.ones(width),
        "w_out": jax.random.normal(k_out, (width, d)) / width**0.5,
    }


def main(steps: int = 20) -> list[float]:
    """Prints the plan, trains on one batch, and returns the losses."""
    params = init(jax.random.key(0), 48, 200)
    x = jax.random.normal(jax.random.key(1), (4, 32, 48))
    target = jnp.sin(3 * x)
    step = ja.jit(train_step, donate_argnums=0)
    plan = step.plan(params, x, target)
    print(plan)
    arena = plan.allocate()
    losses = []
    for _ in range(steps):
        (params, loss), arena = step(arena, params, x, target)
        losses.append(float(loss))
    print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {steps} steps")
    return losses


if __name__ == "__main__":
    main()
