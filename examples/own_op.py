"""An op of one's own, outside the package: a weighted squared ReLU, with its gradient, used in a planned step.

::

    y  = w * r^2                 r = max(x, 0), w a weight for each column
    dx = 2 w r dy
    dw = sum over rows of r^2 dy

The activation is that of So et al., "Primer: Searching for Efficient Transformers for Language Modeling", 2021. docs/own-op.md goes
through this file piece by piece. Run it with ``python examples/own_op.py``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jaxarena as ja
from jaxarena.ops import launch
from jaxarena.ops.checks import check_float, check_ndim, check_shape, vary_together


@launch("relu2")
def relu2_forward(x: jax.Array, weight: jax.Array) -> jax.Array:
    r = jnp.maximum(x.astype(jnp.float32), 0)
    return (weight.astype(jnp.float32) * r * r).astype(x.dtype)


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
    x = jax.random.normal(jax.random.key(1), (4, 33, 48))
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
