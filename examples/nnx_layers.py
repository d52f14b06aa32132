"""Layers of a Flax NNX model made of jaxarena's ops, trained in a planned step.

An op is a function of arrays, so a module holds parameters and calls it. A planned step takes arrays: ``nnx.split`` the model before,
``nnx.merge`` it inside. Run it with ``python examples/nnx_layers.py``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxarena as ja
from jaxarena import ops


class Attention(nnx.Module):
    """Causal self-attention with rotary positions, before it a norm, behind it the residual sum."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.heads = heads
        self.scale = nnx.Param(jnp.ones(width))
        self.qkv = nnx.Param(jax.random.normal(rngs.params(), (width, 3 * width)) * width**-0.5)
        self.out = nnx.Param(jax.random.normal(rngs.params(), (width, width)) * width**-0.5)

    def __call__(self, h: jax.Array) -> jax.Array:
        batch, time, width = h.shape
        qkv = ops.project(ops.rms_norm(h, self.scale[...]), self.qkv[...])
        q, k, v = (a.reshape(batch, time, self.heads, -1) for a in jnp.split(qkv, 3, axis=-1))
        o = ops.attention(ops.rotary(q), ops.rotary(k), v)
        return ops.project(o.reshape(batch, time, width), self.out[...], residual=h)


class Experts(nnx.Module):
    """A mixture of SwiGLU experts, before it a norm, behind it the residual sum."""

    def __init__(self, width: int, experts: int, expert_width: int, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones(width))
        self.router = nnx.Param(jax.random.normal(rngs.params(), (width, experts)) * width**-0.5)
        self.gate_up = nnx.Param(jax.random.normal(rngs.params(), (experts, width, 2 * expert_width)) * width**-0.5)
        self.down = nnx.Param(jax.random.normal(rngs.params(), (experts, expert_width, width)) * expert_width**-0.5)

    def __call__(self, h: jax.Array) -> jax.Array:
        x = ops.rms_norm(h, self.scale[...])
        return ops.moe(x, self.router[...], self.gate_up[...], self.down[...], top_k=2, residual=h).y


class Model(nnx.Module):
    """An embedding, one layer of each kind, and the embedding again as the head."""

    def __init__(self, vocabulary: int, width: int, *, rngs: nnx.Rngs):
        self.embedding = nnx.Param(0.02 * jax.random.normal(rngs.params(), (vocabulary, width)))
        self.attention = Attention(width, 4, rngs=rngs)
        self.experts = Experts(width, 4, 48, rngs=rngs)

    def loss(self, tokens: jax.Array) -> jax.Array:
        h = self.experts(self.attention(ops.embed(tokens[:, :-1], self.embedding[...])))
        return ops.cross_entropy(h, self.embedding[...], tokens[:, 1:])


def main(steps: int = 20) -> list[float]:
    """Trains on one batch and returns the losses."""
    graph, state = nnx.split(Model(64, 32, rngs=nnx.Rngs(0)))
    optimizer = optax.adam(3e-3)

    def train_step(state: nnx.State, opt_state: Any, tokens: jax.Array) -> tuple[nnx.State, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda state: nnx.merge(graph, state).loss(tokens))(state)
        updates, opt_state = optimizer.update(gradients, opt_state, state)
        return optax.apply_updates(state, updates), opt_state, loss

    opt_state = optimizer.init(state)
    tokens = jax.random.randint(jax.random.key(1), (2, 33), 0, 64)
    step = ja.jit(train_step, donate_argnums=(0, 1))
    plan = step.plan(state, opt_state, tokens)
    print(plan)
    arena, losses = plan.allocate(), []
    for _ in range(steps):
        (state, opt_state, loss), arena = step(arena, state, opt_state, tokens)
        losses.append(float(loss))
    model = nnx.merge(graph, state)
    print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {steps} steps, {float(model.loss(tokens)):.4f} of the merged model")
    return losses


if __name__ == "__main__":
    main()
