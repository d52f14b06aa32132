"""What the tests of the gated delta rule share: the recurrence step by step as the oracle, and arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxarena.testing import normal


def naive(q, k, v, g, beta, state=None, *, scale=None, l2norm_eps=None, segment_ids=None):
    """o and the last state, one step at a time; ``g=None`` has no decay at all."""
    if l2norm_eps is not None:
        q, k = (x * (jnp.sum(x**2, -1, keepdims=True) + l2norm_eps) ** -0.5 for x in (q, k))
    repeats = v.shape[2] // k.shape[2]
    q, k = (jnp.repeat(x, repeats, axis=2) for x in (q, k))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    ids = jnp.zeros(v.shape[:2], jnp.int32) if segment_ids is None else segment_ids

    def step(carry, xs):
        state, before = carry
        q, k, v, beta, now, *g = xs
        state = jnp.where((now == before)[:, None, None, None], state, 0)
        if g:
            state = jnp.exp(g[0])[..., None, None] * state
        error = v - jnp.einsum("bhkv,bhk->bhv", state, k)
        state = state + jnp.einsum("bhk,bh,bhv->bhkv", k, beta, error)
        return (state, now), scale * jnp.einsum("bhkv,bhk->bhv", state, q)

    if state is None:
        state = jnp.zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), v.dtype)
    inputs = (q, k, v, beta, ids) if g is None else (q, k, v, beta, ids, g)
    (state, _), o = jax.lax.scan(step, (state, ids[:, 0]), tuple(jnp.moveaxis(a, 1, 0) for a in inputs))
    return jnp.moveaxis(o, 0, 1), state


def naive_outputs(*args, **params):
    return naive(*args, **params)[0]


def unit(x):
    return x / jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True).astype(x.dtype)


def arguments(shape, dtype=jnp.float32, gates=None):
    """q, k, v, g, beta for (batch, time, key heads, value heads, dk, dv); ``gates`` gives g, alike everywhere if a number."""
    b, t, hk, hv, dk, dv = shape
    g = jax.nn.log_sigmoid(normal(3, (b, t, hv))) if gates is None else jnp.broadcast_to(jnp.asarray(gates, jnp.float32), (b, t, hv))
    beta = jax.nn.sigmoid(normal(4, (b, t, hv)))
    return [unit(normal(0, (b, t, hk, dk), dtype)), unit(normal(1, (b, t, hk, dk), dtype)), normal(2, (b, t, hv, dv), dtype), g, beta]


def state_for(args, seed=7):
    """A state that ``args`` may go on from."""
    _, k, v, *_ = args
    return normal(seed, (v.shape[0], v.shape[2], k.shape[3], v.shape[3]))
