"""Cross entropy of a language-model head, without ever holding all logits.

::

    logits[i]  = hidden[i] @ head^T                     float32
    lse[i]     = log sum_v exp(logits[i, v])
    loss[i]    = lse[i] - (1 - e) logits[i, label[i]] - e mean_v logits[i, v] + z lse[i]^2       0 where the label is ignored
    result     = loss, its sum, or its sum / max(1, number of labels that are not ignored)

with ``e`` the label smoothing, whose target is ``1 - e`` on the label plus ``e`` spread evenly over the vocabulary (Szegedy et al.,
"Rethinking the Inception Architecture", 2016; PyTorch's definition), and ``z`` the weight of the z-loss, which keeps the normaliser near 1
(Chowdhery et al., "PaLM", 2022, section 5).

Gradient of the per-token losses, with ``c[i]`` the gradient of ``loss[i]``::

    dlogits[i] = c[i] ((1 + 2 z lse[i]) exp(logits[i] - lse[i]) - (1 - e) onehot(label[i]) - e / v)      0 where the label is ignored
    dhidden    = dlogits @ head,   dhead = dlogits^T @ hidden

so without a z-loss a row's dlogits sum to 0. Only ``lse`` is kept; logits are computed again. The forward pass and ``dhidden`` run over
blocks of tokens; ``dhead`` runs over blocks of the vocabulary, so each of its rows is one sum over all tokens and is written once. Blocks
of tokens are cut along time, so that a batch may be sharded over devices (along the batch where it is longer than the time). A block of
logits takes about 16 MiB whatever the number of tokens and the vocabulary (Wijmans et al., "Cut Your Losses in Large-Vocabulary Language
Models", 2024, keep the same quantities). The last block starts early enough to be a whole one, and what it computes twice is dropped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxarena.ops.checks import (
    check_axis,
    check_choice,
    check_float,
    check_int,
    check_ndim,
    check_nonnegative,
    check_same_dtype,
    check_shape,
    vary_together,
)
from jaxarena.ops.interface import launch

__all__ = ["cross_entropy"]

BLOCK_BYTES = 16 * 2**20
MIN_ROWS = 64  # The head (or the hidden rows) is read once a block: fewer rows than this would read it too often.


class Target(NamedTuple):
    """What a token's loss is besides its cross entropy."""

    smoothing: float
    z_loss: float


def cross_entropy(
    hidden: Float[Array, "*rows d"],
    head: Float[Array, "v d"],
    labels: Int[Array, "*rows"],
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Float[Array, ""] | Float[Array, "*rows"]:
    """The cross entropy of ``softmax(hidden @ head^T)`` against ``labels``.

    Args:
      hidden: ``[..., d]``, bfloat16 or float32.
      head: ``[v, d]``, as an embedding table is stored, in the dtype of ``hidden``; ``v`` at least 1.
      labels: int32 ``[...]``. A label that is ``ignore_index``, below 0 or from ``v`` on is ignored: it adds nothing to the loss,
        its row has gradient zero and is not counted in the mean, even where the row of ``hidden`` is NaN.
      ignore_index: a label to ignore besides those out of range.
      label_smoothing: in [0, 1]: the share of the target that is spread evenly over the vocabulary.
      z_loss: at least 0: this times the square of the logits' log-sum-exp is added to the loss of each token that is not ignored.
      reduction: ``"mean"`` over the labels that are not ignored, ``"sum"``, or ``"none"``.

    Returns:
      float32, a scalar or with ``"none"`` the losses ``[...]``, within ``tolerance(float32, v, stages=2)`` of float64 whatever the arrays'
      dtype, gradients within ``tolerance(dtype, longest sum, stages=2)`` (:func:`jaxarena.testing.tolerance`); the mean is 0 when
      every label is ignored. Under ``jax.shard_map`` mean and sum are those of one device's labels.

    Raises:
      TypeError: ``hidden`` is not bfloat16 or float32, ``head`` has another dtype, ``labels`` is not int32, or an option has another
        type than stated.
      ValueError: the shapes do not fit, or an option is out of its range.
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
    check_nonnegative("cross_entropy", "label_smoothing", label_smoothing)
    if label_smoothing > 1:
        raise ValueError(f"cross_entropy: label_smoothing must be at most 1, got {label_smoothing}")
    check_nonnegative("cross_entropy", "z_loss", z_loss)
    check_choice("cross_entropy", "reduction", reduction, ("mean", "sum", "none"))

    rows = labels.shape
    hidden, head, labels = vary_together(_two_leading(hidden, 1), head, _two_leading(labels, 0))
    counted = (labels != ignore_index) & (labels >= 0) & (labels < head.shape[0])
    losses = _token_losses(hidden, head, jnp.where(counted, labels, -1), Target(float(label_smoothing), float(z_loss)))
    if reduction == "none":
        return losses.reshape(rows)
    if reduction == "sum":
        return jnp.sum(losses)
    return jnp.sum(losses) / jnp.maximum(jnp.sum(counted, dtype=jnp.int32), 1).astype(jnp.float32)


def _two_leading(a: Array, trailing: int) -> Array:
    """``a`` with the axes before its ``trailing`` last ones made two, (batch, time)."""
    leading = a.ndim - trailing
    last = a.shape[leading - 1 :] if leading else (1, *a.shape)
    return a.reshape(math.prod(a.shape[: max(leading - 1, 0)]), *last)


def _map_blocks(f: Callable[[Array], tuple[Array, ...]], size: int, block: int, axis: int) -> tuple[Array, ...]:
    """Joins ``f(start)``, results for ``start .. start + block - 1`` along ``axis``, over the blocks that cover ``size``."""
    count = -(-size // block)
    if count == 1:
        return f(jnp.int32(0))
    starts = np.minimum(np.arange(count) * block, size - block).astype(np.int32)
    overlap = count * block - size

    def join(parts: Array) -> Array:
        parts = jnp.moveaxis(parts, 0, axis)
        before, after = parts.shape[:axis], parts.shape[axis + 2 :]
        whole = parts.reshape(*before, count * block, *after)
        if overlap == 0:
            return whole
        kept = (count - 1) * block
        first = jax.lax.slice_in_dim(whole, 0, kept, axis=axis)
        return jnp.concatenate([first, jax.lax.slice_in_dim(whole, kept + overlap, count * block, axis=axis)], axis=axis)

    return tuple(join(parts) for parts in jax.lax.map(f, jnp.asarray(starts)))


def _block(size: int, rows: int, width: int) -> int:
    """How many of ``size`` slices, each ``rows`` rows of ``width`` float32 logits, make a block; blocks as equal as they can be."""
    most = max(1, MIN_ROWS // rows, BLOCK_BYTES // (4 * rows * width))
    return -(-size // -(-size // most))


def _token_blocks(hidden: Array, head: Array) -> tuple[int, int, int]:
    """The axis of tokens that is cut, its size and the block's: time, so that a batch may be sharded, unless the batch is longer."""
    axis = 1 if hidden.shape[1] >= hidden.shape[0] else 0
    return axis, hidden.shape[axis], _block(hidden.shape[axis], hidden.shape[1 - axis], head.shape[0])


def _slice(a: Array, start: Array, size: int, axis: int = 0) -> Array:
    return jax.lax.dynamic_slice_in_dim(a, start, size, axis)


def _logits(a: Array, b: Array) -> Array:
    """The products of all rows of ``a`` with all rows of ``b``, in float32."""
    return jax.lax.dot_general(a, b, (((a.ndim - 1,), (b.ndim - 1,)), ((), ())), preferred_element_type=jnp.float32)


def _dlogits(logits: Array, lse: Array, labels: Array, dloss: Array, entries: Array, vocabulary: int, target: Target) -> Array:
    """The gradient of logits in float32. Arguments broadcast, so any axis may be the vocabulary's, whose ``entries`` are given."""
    onehot = (labels == entries).astype(jnp.float32)
    probability = jnp.exp(logits - lse)
    if target.z_loss:
        probability = (1 + 2 * target.z_loss * lse) * probability
    if target.smoothing:
        onehot = (1 - target.smoothing) * onehot + target.smoothing / vocabulary
    return jnp.where(labels >= 0, dloss * (probability - onehot), 0)


@launch("cross_entropy", row_ndim=0)
def cross_entropy_forward(
    hidden: Float[Array, "b t d"], head: Float[Array, "v d"], labels: Int[Array, "b t"], *, target: Target
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    if labels.size == 0:
        empty = jnp.zeros_like(hidden, shape=labels.shape, dtype=jnp.float32)
        return empty, empty
    axis, size, block = _token_blocks(hidden, head)

    def rows(start: Array) -> tuple[Array, Array]:
        logits = _logits(_slice(hidden, start, block, axis), head)
        row_labels = _slice(labels, start, block, axis)
        lse = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, jnp.maximum(row_labels, 0)[..., None], axis=-1)[..., 0]
        if target.smoothing:
            chosen = (1 - target.smoothing) * chosen + target.smoothing * jnp.mean(logits, axis=-1)
        loss = lse - chosen
        if target.z_loss:
            loss = loss + target.z_loss * lse * lse
        return jnp.where(row_labels >= 0, loss, 0), lse

    loss, lse = _map_blocks(rows, size, block, axis)
    return loss, lse


@launch("cross_entropy_dhidden")
def cross_entropy_dhidden(
    hidden: Float[Array, "b t d"],
    head: Float[Array, "v d"],
    labels: Int[Array, "b t"],
    lse: Float[Array, "b t"],
    dloss: Float[Array, "b t"],
    *,
    target: Target,
) -> Float[Array, "b t d"]:
    if labels.size == 0:
        return jnp.zeros_like(hidden)
    axis, size, block = _token_blocks(hidden, head)
    v = head.shape[0]
    entries = jnp.arange(v, dtype=jnp.int32)

    def rows(start: Array) -> tuple[Array]:
        row_lse, row_labels, row_dloss = (_slice(a, start, block, axis)[..., None] for a in (lse, labels, dloss))
        dlogits = _dlogits(_logits(_slice(hidden, start, block, axis), head), row_lse, row_labels, row_dloss, entries, v, target)
        return (jnp.matmul(dlogits.astype(head.dtype), head, preferred_element_type=jnp.float32).astype(hidden.dtype),)

    return _map_blocks(rows, size, block, axis)[0]


@launch("cross_entropy_dhead")
def cross_entropy_dhead(
    hidden: Float[Array, "b t d"],
    head: Float[Array, "v d"],
    labels: Int[Array, "b t"],
    lse: Float[Array, "b t"],
    dloss: Float[Array, "b t"],
    *,
    target: Target,
) -> Float[Array, "v d"]:
    if labels.size == 0:
        return jnp.zeros_like(head)
    v = head.shape[0]
    block = _block(v, 1, labels.size)
    # An ignored row may hold anything: zero times NaN would reach the whole gradient.
    counted = jnp.where((labels >= 0)[..., None], hidden, 0)

    def columns(start: Array) -> tuple[Array]:
        entries = (start + jnp.arange(block, dtype=jnp.int32))[:, None, None]
        # Transposed, one row an entry of the vocabulary, so that both products read their operands along the rows.
        dlogits = _dlogits(_logits(_slice(head, start, block), hidden), lse, labels, dloss, entries, v, target).astype(hidden.dtype)
        product = jax.lax.dot_general(dlogits, counted, (((1, 2), (0, 1)), ((), ())), preferred_element_type=jnp.float32)
        return (product.astype(head.dtype),)

    return _map_blocks(columns, v, block, 0)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _token_losses(hidden: Array, head: Array, labels: Array, target: Target) -> Array:
    return cross_entropy_forward(hidden, head, labels, target=target)[0]


def _token_losses_fwd(hidden: Array, head: Array, labels: Array, target: Target) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    loss, lse = cross_entropy_forward(hidden, head, labels, target=target)
    return loss, (hidden, head, labels, lse)


def _token_losses_bwd(target: Target, kept: tuple[Array, Array, Array, Array], dloss: Array) -> tuple[Array, Array, None]:
    hidden, head, labels, lse = kept
    dhidden = cross_entropy_dhidden(hidden, head, labels, lse, dloss, target=target)
    dhead = cross_entropy_dhead(hidden, head, labels, lse, dloss, target=target)
    return dhidden, dhead, None


_token_losses.defvjp(_token_losses_fwd, _token_losses_bwd)
