"""Cross entropy of a language-model head, without ever holding all logits.

::

    logits[i]  = hidden[i] @ head^T                     float32
    lse[i]     = log sum_v exp(logits[i, v])
    loss[i]    = lse[i] - logits[i, label[i]]           0 where the label is ignored
    result     = sum_i loss[i] / max(1, number of labels that are not ignored)

Gradient of the per-token losses, with ``c[i]`` the gradient of ``loss[i]``::

    dlogits[i] = c[i] (exp(logits[i] - lse[i]) - onehot(label[i]))       0 where the label is ignored
    dhidden    = dlogits @ head,   dhead = dlogits^T @ hidden

Only ``lse`` is kept; logits are computed again. The forward pass and ``dhidden`` run over blocks of tokens; ``dhead`` runs over
blocks of the vocabulary, so each of its rows is one sum over all tokens and is written once. A block of logits takes about
16 MiB whatever the number of tokens and the vocabulary (Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models",
2024, keep the same quantities). The last block starts early enough to be a whole one, and what it computes twice is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxarena.ops.checks import (
    check_axis,
    check_float,
    check_int,
    check_ndim,
    check_same_dtype,
    check_shape,
    vary_together,
)
from jaxarena.ops.interface import launch

__all__ = ["cross_entropy"]

BLOCK_BYTES = 16 * 2**20
MIN_BLOCK = 64  # The head (or the hidden rows) is read once a block: fewer rows than this would read it too often.


def cross_entropy(
    hidden: Float[Array, "*rows d"], head: Float[Array, "v d"], labels: Int[Array, "*rows"], *, ignore_index: int = -100
) -> Float[Array, ""]:
    """The mean cross entropy of ``softmax(hidden @ head^T)`` against ``labels``.

    Args:
      hidden: ``[..., d]``, bfloat16 or float32.
      head: ``[v, d]``, as an embedding table is stored, in the dtype of ``hidden``; ``v`` at least 1.
      labels: int32 ``[...]``. A label that is ``ignore_index``, below 0 or from ``v`` on is ignored: it adds nothing to the loss,
        its row has gradient zero and is not counted in the mean, even where the row of ``hidden`` is NaN.
      ignore_index: a label to ignore besides those out of range.

    Returns:
      A float32 scalar; 0 when every label is ignored. Under ``jax.shard_map`` the mean is that of one device's labels.

    Raises:
      TypeError: ``hidden`` is not bfloat16 or float32, ``head`` has another dtype, ``labels`` is not int32 or ``ignore_index``
        not an int.
      ValueError: the shapes do not fit.
    """
    check_float("cross_entropy", "hidden", hidden)
    check_float("cross_entropy", "head", head)
    check_int("cross_entropy", "labels", labels)
    check_ndim("cross_entropy", "hidden", hidden, "... d")
    check_ndim("cross_entropy", "head", head, "v d")
    check_same_dtype("cross_entropy", "head", head, "hidden", hidden)
    check_axis("cross_entropy", "head", head, 1, hidden.shape[-1], "the last axis of hidden")
    check_shape("cross_entropy", "labels", labels, hidden.shape[:-1], "the rows of hidden")
    if head.shape[0] == 0:
        raise ValueError(f"cross_entropy: head must have at least one row, got shape {tuple(head.shape)}")
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        raise TypeError(f"cross_entropy: ignore_index must be a Python int, got {type(ignore_index).__name__} {ignore_index!r}")
    hidden, head, labels = vary_together(hidden.reshape(-1, hidden.shape[-1]), head, labels.reshape(-1))
    counted = (labels != ignore_index) & (labels >= 0) & (labels < head.shape[0])
    losses = _token_losses(hidden, head, jnp.where(counted, labels, -1))
    return jnp.sum(losses) / jnp.maximum(jnp.sum(counted, dtype=jnp.int32), 1).astype(jnp.float32)


def _map_blocks(f: Callable[[Array], tuple[Array, ...]], size: int, block: int) -> tuple[Array, ...]:
    """Joins ``f(start)``, each a result for the rows ``start .. start + block - 1``, over the blocks that cover ``size`` rows."""
    count = -(-size // block)
    if count == 1:
        return f(jnp.int32(0))
    starts = np.minimum(np.arange(count) * block, size - block).astype(np.int32)
    rest = size - (count - 1) * block

    def join(parts: Array) -> Array:
        if rest == block:
            return parts.reshape(size, *parts.shape[2:])
        return jnp.concatenate([parts[:-1].reshape(size - rest, *parts.shape[2:]), parts[-1, block - rest :]])

    return tuple(join(parts) for parts in jax.lax.map(f, jnp.asarray(starts)))


def _block(size: int, width: int) -> int:
    """How many of ``size`` rows of ``width`` float32 logits make a block; blocks as equal as they can be."""
    most = max(MIN_BLOCK, BLOCK_BYTES // (4 * width))
    return -(-size // -(-size // most))


def _slice(a: Array, start: Array, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(a, start, size)


def _logits(hidden: Array, head: Array) -> Array:
    return jax.lax.dot_general(hidden, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _dlogits(logits: Array, lse: Array, labels: Array, dloss: Array, first: Array) -> Array:
    """The gradient of a block of logits whose first column is vocabulary entry ``first``, in float32."""
    column = first + jnp.arange(logits.shape[1], dtype=jnp.int32)
    onehot = (labels[:, None] == column).astype(jnp.float32)
    return jnp.where((labels >= 0)[:, None], dloss[:, None] * (jnp.exp(logits - lse[:, None]) - onehot), 0)


@launch("cross_entropy", row_ndim=0)
def cross_entropy_forward(
    hidden: Float[Array, "n d"], head: Float[Array, "v d"], labels: Int[Array, " n"]
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    n = hidden.shape[0]
    if n == 0:
        empty = jnp.zeros_like(hidden, shape=(0,), dtype=jnp.float32)
        return empty, empty
    block = _block(n, head.shape[0])

    def rows(start: Array) -> tuple[Array, Array]:
        logits = _logits(_slice(hidden, start, block), head)
        label = _slice(labels, start, block)
        lse = jax.nn.logsumexp(logits, axis=1)
        chosen = jnp.take_along_axis(logits, jnp.maximum(label, 0)[:, None], axis=1)[:, 0]
        return jnp.where(label >= 0, lse - chosen, 0), lse

    loss, lse = _map_blocks(rows, n, block)
    return loss, lse


@launch("cross_entropy_dhidden")
def cross_entropy_dhidden(
    hidden: Float[Array, "n d"], head: Float[Array, "v d"], labels: Int[Array, " n"], lse: Float[Array, " n"], dloss: Float[Array, " n"]
) -> Float[Array, "n d"]:
    n = hidden.shape[0]
    if n == 0:
        return jnp.zeros_like(hidden)
    block = _block(n, head.shape[0])

    def rows(start: Array) -> tuple[Array]:
        h, label, row_lse, c = (_slice(a, start, block) for a in (hidden, labels, lse, dloss))
        dlogits = _dlogits(_logits(h, head), row_lse, label, c, jnp.int32(0)).astype(head.dtype)
        return (jnp.matmul(dlogits, head, preferred_element_type=jnp.float32).astype(hidden.dtype),)

    return _map_blocks(rows, n, block)[0]


@launch("cross_entropy_dhead")
def cross_entropy_dhead(
    hidden: Float[Array, "n d"], head: Float[Array, "v d"], labels: Int[Array, " n"], lse: Float[Array, " n"], dloss: Float[Array, " n"]
) -> Float[Array, "v d"]:
    n, v = hidden.shape[0], head.shape[0]
    if n == 0:
        return jnp.zeros_like(head)
    block = _block(v, n)
    # An ignored row may hold anything: zero times NaN would reach the whole gradient.
    counted = jnp.where((labels >= 0)[:, None], hidden, 0)

    def columns(start: Array) -> tuple[Array]:
        dlogits = _dlogits(_logits(hidden, _slice(head, start, block)), lse, labels, dloss, start).astype(hidden.dtype)
        product = jax.lax.dot_general(dlogits, counted, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return (product.astype(head.dtype),)

    return _map_blocks(columns, v, block)[0]


@jax.custom_vjp
def _token_losses(hidden: Array, head: Array, labels: Array) -> Array:
    return cross_entropy_forward(hidden, head, labels)[0]


def _token_losses_fwd(hidden: Array, head: Array, labels: Array) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    loss, lse = cross_entropy_forward(hidden, head, labels)
    return loss, (hidden, head, labels, lse)


def _token_losses_bwd(kept: tuple[Array, Array, Array, Array], dloss: Array) -> tuple[Array, Array, None]:
    hidden, head, labels, lse = kept
    dhidden = cross_entropy_dhidden(hidden, head, labels, lse, dloss)
    dhead = cross_entropy_dhead(hidden, head, labels, lse, dloss)
    return dhidden, dhead, None


_token_losses.defvjp(_token_losses_fwd, _token_losses_bwd)
