"""A few steps of the gated delta rule from a carried state, one by one, as in decoding.

The state, float32 (dk, dv) for each row of the batch and value head, is nearly all the memory that a step touches. With r = S^T k and
a = exp(g),

    u = beta (v - a r)        S <- a S + k u^T        o = scale * S^T q

Each row of the batch gets the bits it would get alone. XLA chooses how to sum by the size of the whole array, so the rows are taken one
after another; and it compiles a step the same way in a loop over many rows as for a single one only between barriers. The state is
written where it is read: a donated one is updated in place, with no copy of it.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxarena.ops.delta_chunks import l2norm
from jaxarena.ops.delta_spans import Config
from jaxarena.ops.interface import launch

__all__ = ["MAX_STEPS", "delta_rule_decode"]

MAX_STEPS = 16
"""More steps than this are computed by chunks."""


@launch("delta_rule_decode", row_ndim=(2, 1))
def delta_rule_decode(
    q: Float[Array, "b t hk dk"],
    k: Float[Array, "b t hk dk"],
    v: Float[Array, "b t hv dv"],
    g: Float[Array, "b t hv"],
    beta: Float[Array, "b t hv"],
    state: Float[Array, "b hv dk dv"],
    *,
    config: Config,
) -> tuple[Float[Array, "b t hv dv"], Float[Array, "b hv dk dv"]]:
    """o and the last state, from ``state``."""
    if not v.shape[0]:
        return v, state
    repeats = v.shape[2] // k.shape[2]

    def step(state: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        state, (q, k, v, g, beta) = lax.optimization_barrier((state, xs))
        q, k = (jnp.repeat(l2norm(x.astype(jnp.float32), config.l2norm_eps), repeats, axis=0) for x in (q, k))
        decay = jnp.exp(g)[:, None]
        write = beta[:, None] * (v.astype(jnp.float32) - decay * _read(state, k))
        state = decay[..., None] * state + k[:, :, None] * write[:, None, :]
        return lax.optimization_barrier((state, (config.scale * _read(state, q)).astype(v.dtype)))

    def row(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        states, o = carry
        xs = tuple(lax.dynamic_index_in_dim(a, i, keepdims=False) for a in (q, k, v, g, beta))
        row_state, row_o = lax.scan(step, lax.dynamic_index_in_dim(states, i, keepdims=False), xs)
        return lax.dynamic_update_index_in_dim(states, row_state, i, 0), lax.dynamic_update_index_in_dim(o, row_o, i, 0)

    states, o = lax.fori_loop(0, v.shape[0], row, (state, jnp.zeros_like(v)))
    return o, states


def _read(state: Float[Array, "h dk dv"], x: Float[Array, "h dk"]) -> Float[Array, "h dv"]:
    """S^T x."""
    return jnp.sum(x[:, :, None] * state, axis=1)
