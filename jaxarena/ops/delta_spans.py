"""The chunked gated delta rule over whole sequences, a span of chunks at a time.

Batching what a chunk needs over every chunk of a long sequence would hold several float32 arrays of (batch, heads, time, C). So the
chunks are taken in spans of a few MiB an array, one span after another, and a sequence that fits is one span. The backward pass keeps
nothing between the forward and itself: it computes the states at the starts of the spans again, then takes the spans from the last to
the first, each with its chunks and states computed afresh.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxarena.ops.delta_chunks import (
    Chunks,
    Gradients,
    chunk_gradients,
    chunk_outputs,
    l2norm,
    l2norm_gradient,
    product_for,
    scan_states,
    within_chunks,
)

__all__ = ["Config", "Inputs", "gradients", "outputs"]

FORWARD_BYTES, BACKWARD_BYTES = 2**18, 2**21
"""About how large one float32 array of a span may be. The forward is fastest in a core's cache; the backward computes what the forward
did a second time where there is more than one span, which costs a short sequence more than the cache saves."""


class Config(NamedTuple):
    """What is known of a gated delta rule when it is traced."""

    scale: float
    l2norm_eps: float | None  # None: q and k are taken as they are
    chunk: int


class Inputs(NamedTuple):
    q: Float[Array, "b t hk dk"]
    k: Float[Array, "b t hk dk"]
    v: Float[Array, "b t hv dv"]
    g: Float[Array, "b t hv"]
    beta: Float[Array, "b t hv"]


State = Float[Array, "b hv dk dv"]


def outputs(inputs: Inputs, state: State | None, config: Config) -> tuple[Float[Array, "b t hv dv"], State]:
    """o, and the state after the last step; ``None`` starts from zeros."""
    v, product = inputs.v, product_for(inputs.q.dtype)
    layout = _layout(inputs, config, FORWARD_BYTES)
    padded = _pad(inputs, layout)

    def span(state: Any, i: Array) -> tuple[Any, Array]:
        o, state = chunk_outputs(_chunks(_span(padded, i, layout), config), state, config.scale, product)
        return state, _rows(o.astype(v.dtype))

    last, o = lax.scan(span, _zero_state(inputs) if state is None else state, _numbers(layout.spans))
    return _join(o, v.shape[1]), last


def gradients(
    inputs: Inputs, state: State | None, do: Float[Array, "b t hv dv"], dstate: State | None, config: Config
) -> tuple[Inputs, State]:
    """The gradients of the inputs and of the starting state; ``None`` for a gradient of zeros."""
    product = product_for(inputs.q.dtype)
    layout = _layout(inputs, config, BACKWARD_BYTES)
    padded, do = _pad((inputs, do), layout)
    start = _zero_state(inputs) if state is None else state

    def advance(state: Array, i: Array) -> tuple[Array, Array]:
        return scan_states(_chunks(_span(padded, i, layout), config), state, product)[-1], state

    last_start, starts = lax.scan(advance, start, _numbers(layout.spans - 1))
    starts = jnp.concatenate([starts, last_start[None]])

    def span(dstate: Any, xs: tuple[Array, Array]) -> tuple[Any, Inputs]:
        i, state = xs
        x = _span(padded, i, layout)
        do_chunks = config.scale * _span(do, i, layout).astype(jnp.float32)
        d, dstate = chunk_gradients(_chunks(x, config), state, do_chunks, dstate, product)
        return dstate, jax.tree.map(_rows, _input_gradients(x, d, config))

    dend = jnp.zeros_like(start) if dstate is None else dstate
    dstart, d = lax.scan(span, dend, (_numbers(layout.spans), starts), reverse=True)
    dq, dk, dv, dg, dbeta = (_join(a, inputs.q.shape[1]) for a in d)
    return Inputs(dq, dk, dv, dg[..., 0], dbeta[..., 0]), dstart


def _chunks(x: Inputs, config: Config) -> Chunks:
    q, k = (l2norm(a.astype(jnp.float32), config.l2norm_eps) for a in (x.q, x.k))
    return within_chunks(q, k, x.v.astype(jnp.float32), x.g, x.beta, product_for(x.q.dtype))


def _input_gradients(x: Inputs, d: Gradients, config: Config) -> Inputs:
    """The gradients of a span's inputs, as they are stored, from those of its chunks."""
    dq, dk = (l2norm_gradient(a.astype(jnp.float32), da, config.l2norm_eps) for a, da in ((x.q, d.q), (x.k, d.k)))
    return Inputs(dq.astype(x.q.dtype), dk.astype(x.k.dtype), d.v.astype(x.v.dtype), d.g, d.beta)


def _zero_state(x: Inputs) -> State:
    return jnp.zeros_like(x.beta, shape=(x.v.shape[0], x.v.shape[2], x.k.shape[3], x.v.shape[3]))


class _Layout(NamedTuple):
    spans: int
    chunks: int  # of a span
    chunk: int  # steps

    @property
    def steps(self) -> int:
        """Of a span."""
        return self.chunks * self.chunk


def _layout(x: Inputs, config: Config, span_bytes: int) -> _Layout:
    """As few spans as keep an array of a span within ``span_bytes``, and as even as can be."""
    batch, time, heads, size = x.v.shape
    count = max(1, -(-time // config.chunk))
    chunk_bytes = 4 * batch * heads * config.chunk * max(config.chunk, x.k.shape[3], size)
    spans = -(-count // max(1, span_bytes // max(1, chunk_bytes)))
    return _Layout(spans, -(-count // spans), config.chunk)


def _numbers(count: int) -> Array:
    return jnp.arange(count, dtype=jnp.int32)


def _pad(tree: Any, layout: _Layout) -> Any:
    """Arrays of (b, t, h, ...) made as long as all spans, with a last axis even if a head has one number."""

    def pad(a: Array) -> Array:
        a = a if a.ndim == 4 else a[..., None]
        return jnp.pad(a, ((0, 0), (0, layout.spans * layout.steps - a.shape[1]), (0, 0), (0, 0)))

    return jax.tree.map(pad, tree)


def _span(tree: Any, i: Array, layout: _Layout) -> Any:
    """Span ``i`` of padded arrays as chunks, (n, b, h, c, d)."""

    def cut(a: Array) -> Array:
        a = lax.dynamic_slice_in_dim(a, i * layout.steps, layout.steps, axis=1)
        return a.reshape(a.shape[0], layout.chunks, layout.chunk, *a.shape[2:]).transpose(1, 0, 3, 2, 4)

    return jax.tree.map(cut, tree)


def _rows(a: Float[Array, "n b h c d"]) -> Float[Array, "b steps h d"]:
    """The steps of a span again, from its chunks."""
    chunks, batch, heads, chunk, size = a.shape
    return a.transpose(1, 0, 3, 2, 4).reshape(batch, chunks * chunk, heads, size)


def _join(a: Float[Array, "s b steps h d"], time: int) -> Float[Array, "b t h d"]:
    spans, batch, steps, *rest = a.shape
    return jnp.moveaxis(a, 0, 1).reshape(batch, spans * steps, *rest)[:, :time]
