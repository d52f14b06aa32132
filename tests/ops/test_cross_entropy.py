"""cross_entropy: loss and gradients against float64, ignored labels, blocks of tokens and of the vocabulary."""

from __future__ import annotations

import functools
import importlib

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxarena.ops.cross_entropy import Target, cross_entropy, cross_entropy_dhead, cross_entropy_dhidden, cross_entropy_forward
from jaxarena.testing import (
    assert_close_to_oracle,
    check_against_oracle,
    check_modes,
    check_shard_map,
    check_step,
    check_vmap,
    gradient_launches,
    integers,
    normal,
    poison,
    value_and_gradients,
)
from tests.ops.common import DTYPES, raises
from tests.programs import twice


def naive(hidden, head, labels, *, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, reduction="mean"):
    """All logits at once, and the target as a distribution over the vocabulary."""
    v = head.shape[0]
    logits = hidden @ head.T
    counted = (labels != ignore_index) & (labels >= 0) & (labels < v)
    target = (1 - label_smoothing) * (labels[..., None] == jnp.arange(v)) + label_smoothing / v
    losses = jnp.sum(-target * jax.nn.log_softmax(logits, axis=-1), axis=-1) + z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    losses = jnp.where(counted, losses, 0)
    if reduction == "none":
        return losses
    return jnp.sum(losses) / (jnp.maximum(jnp.sum(counted), 1) if reduction == "mean" else 1)


def arguments(rows, d, vocabulary, dtype, *, low=0):
    return [
        normal(0, (*rows, d), dtype),
        normal(1, (vocabulary, d), dtype, scale=2 * d**-0.5),
        integers(2, rows, low, vocabulary),
    ]


loss_and_gradients = jax.jit(jax.value_and_grad(cross_entropy, argnums=(0, 1)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,d,vocabulary", [((1,), 1, 1), ((7,), 9, 33), ((2, 35), 17, 101), ((2, 3, 5), 33, 1009), ((), 5, 7)])
def test_matches_the_oracle(rows, d, vocabulary, dtype):
    args = arguments(rows, d, vocabulary, dtype)
    check_against_oracle(cross_entropy, naive, args, (0, 1), dtype=dtype, terms=max(d, vocabulary, int(np.prod(rows))), stages=2)


OPTIONS = (
    {"reduction": "none"},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"z_loss": 0.03, "ignore_index": 3},
    {"reduction": "none", "label_smoothing": 0.3, "z_loss": 0.01},
    {"label_smoothing": 1.0},
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_options_match_the_oracle(options, dtype):
    args = arguments((3, 11), 17, 101, dtype, low=-9)
    ours, expected = functools.partial(cross_entropy, **options), functools.partial(naive, **options)
    check_against_oracle(ours, expected, args, (0, 1), dtype=dtype, terms=101, stages=2)
    check_against_oracle(ours, expected, args, (), dtype=jnp.float32, terms=101, stages=2)


def test_token_losses_are_those_that_the_mean_is_of():
    args = arguments((2, 3, 5), 9, 33, jnp.float32, low=-9)
    losses, mean, total = (cross_entropy(*args, label_smoothing=0.2, reduction=r) for r in ("none", "mean", "sum"))
    chex.assert_shape(losses, (2, 3, 5))
    ignored = args[2] < 0
    chex.assert_trees_all_equal(losses[ignored], jnp.zeros(int(ignored.sum())))
    chex.assert_trees_all_close((total, mean), (jnp.sum(losses), jnp.sum(losses) / jnp.sum(~ignored)), rtol=1e-6)
    chex.assert_tree_all_finite(losses)


def test_options_have_exact_answers():
    """Equal logits: smoothing changes nothing, and the z-loss adds a square; a full smoothing ignores the label."""
    hidden, head, labels = jnp.zeros((3, 4)), normal(1, (8, 4)), jnp.asarray([0, 3, 7], jnp.int32)
    plain = jnp.full(3, np.log(8), jnp.float32)
    chex.assert_trees_all_close(cross_entropy(hidden, head, labels, label_smoothing=0.4, reduction="none"), plain, rtol=1e-6)
    chex.assert_trees_all_close(cross_entropy(hidden, head, labels, z_loss=0.5, reduction="none"), plain + 0.5 * plain**2, rtol=1e-6)
    hidden = normal(2, (3, 4))
    spread = functools.partial(cross_entropy, hidden, head, label_smoothing=1.0)
    chex.assert_trees_all_equal(spread(labels), spread(labels[::-1]))


def test_the_default_costs_nothing_for_its_options():
    """Weights of zero leave no trace in the forward: one sum over the vocabulary, and no mean's division."""
    hidden, head, labels = arguments((1, 4), 5, 7, jnp.float32)
    text = str(jax.make_jaxpr(functools.partial(cross_entropy_forward.reference, target=Target(0.0, 0.0)))(hidden, head, labels))
    assert text.count("reduce_sum") == 1 and " div " not in text


def test_the_loss_of_bf16_arrays_is_as_exact_as_float32():
    args = arguments((2, 35), 17, 101, jnp.bfloat16, low=-5)
    check_against_oracle(cross_entropy, naive, args, (), dtype=jnp.float32, terms=101, stages=2)


@pytest.mark.parametrize("rows,vocabulary", [(1, 32001), (65, 32001), (150, 32001)])
def test_N8_several_blocks(rows, vocabulary):
    """131 rows of 32001 logits make a block, and all columns of 65 rows make one."""
    args = arguments((rows,), 6, vocabulary, jnp.float32)
    check_against_oracle(cross_entropy, naive, args, (0, 1), dtype=jnp.float32, terms=vocabulary)
    _, (_, dhead) = loss_and_gradients(*args)
    # The gradients of a row's logits sum to zero, so those of the head's rows do too.
    chex.assert_trees_all_close(jnp.sum(dhead, axis=0), jnp.zeros(6), atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}])
def test_N8_dlogits_of_a_row_sum_to_zero(options):
    """A column of ones in the head collects them in the row's gradient; the other column's entries have any size."""
    hidden, head, labels = arguments((70,), 2, 32001, jnp.float32)
    head = head.at[:, 0].set(1)
    _, (dhidden,) = value_and_gradients(functools.partial(cross_entropy, reduction="none", **options), [hidden, head, labels], (0,))
    chex.assert_trees_all_close(dhidden[:, 0], jnp.zeros(70), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rows,vocabulary", [(1, 102400), (1, 151936), (4097, 32001), (4097, 102400), (4097, 151936)])
def test_N8_large(rows, vocabulary):
    """Against float64 in NumPy, a block of rows at a time: all logits of the largest case would take 5 GB."""
    hidden, head, labels = arguments((rows,), 3, vocabulary, jnp.float32)
    loss, (dhidden, dhead) = loss_and_gradients(hidden, head, labels)
    wide_head, total, wanted_dhidden, wanted_dhead = np.asarray(head, np.float64), 0.0, [], 0
    for start in range(0, rows, 256):
        x, y = np.asarray(hidden[start : start + 256], np.float64), np.asarray(labels[start : start + 256])
        logits = x @ wide_head.T
        at = np.arange(len(y)), y
        p = np.exp(logits)
        z = p.sum(axis=1, keepdims=True)
        total += np.sum(np.log(z[:, 0]) - logits[at])
        p /= z * rows
        p[at] -= 1 / rows
        wanted_dhidden.append(p @ wide_head)
        wanted_dhead += p.T @ x
    terms = max(rows, vocabulary)
    assert_close_to_oracle(loss, total / rows, dtype=jnp.float32, terms=vocabulary, stages=2)
    assert_close_to_oracle((dhidden, dhead), (np.concatenate(wanted_dhidden), wanted_dhead), dtype=jnp.float32, terms=terms, stages=2)
    chex.assert_trees_all_close(jnp.sum(dhead, axis=0), jnp.zeros(3), atol=1e-5)


@pytest.mark.parametrize("block_bytes", [1, 40000])
@pytest.mark.parametrize("b,t", [(1, 131), (3, 41), (41, 3)])
def test_N8_the_block_size_does_not_matter(b, t, block_bytes, monkeypatch):
    """Blocks of other sizes, with a last one that overlaps; the references are called as they are, past any cache of shapes."""
    hidden, head, labels = arguments((b, t), 9, 203, jnp.float32, low=-3)
    labels = jnp.maximum(labels, -1)
    dloss = normal(5, (b, t))

    target = Target(0.1, 0.01)

    def run():
        loss, lse = cross_entropy_forward.reference(hidden, head, labels, target=target)
        args = (hidden, head, labels, lse, dloss)
        return loss, lse, cross_entropy_dhidden.reference(*args, target=target), cross_entropy_dhead.reference(*args, target=target)

    whole = run()
    module = importlib.import_module("jaxarena.ops.cross_entropy")
    monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(module, "MIN_ROWS", 7)
    assert module._block(max(b, t), min(b, t), 203) < max(b, t)
    chex.assert_trees_all_close(run(), whole, rtol=2e-5, atol=1e-5)


def test_N8_never_holds_all_logits():
    args = arguments((1024,), 4, 32768, jnp.float32)
    compiled = loss_and_gradients.lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 1024 * 32768 * 0.6  # all logits of the pass, once: 128 MiB


def test_uniform_logits_have_an_exact_answer():
    hidden, head = jnp.zeros((3, 4)), normal(1, (8, 4))
    loss, (dhidden, dhead) = loss_and_gradients(hidden, head, jnp.asarray([0, 3, 7], jnp.int32))
    chex.assert_trees_all_close(loss, jnp.log(8.0), rtol=1e-6)
    chex.assert_trees_all_close(dhidden[1], (jnp.mean(head, axis=0) - head[3]) / 3, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_equal(dhead, jnp.zeros((8, 4)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits_stay_finite(dtype):
    hidden = jnp.asarray([[1e4], [-1e4]], dtype)
    head = jnp.asarray([[1.0], [0.0], [-1.0]], dtype)
    loss, gradients = loss_and_gradients(hidden, head, jnp.asarray([0, 0], jnp.int32))
    chex.assert_trees_all_close(loss, float(hidden[0, 0]), rtol=1e-6)  # 0 for the first row, twice the size of a logit for the second
    chex.assert_tree_all_finite(gradients)


@pytest.mark.parametrize("dtype", DTYPES)
def test_N7_all_ignored(dtype):
    hidden, head, _ = arguments((4,), 5, 7, dtype)
    labels = jnp.asarray([-100, -1, 7, 2**31 - 1], jnp.int32)
    spoiled = hidden.at[2].set(poison((5,), dtype))
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 0.1}):
        loss, gradients = jax.value_and_grad(functools.partial(cross_entropy, **options), argnums=(0, 1))(spoiled, head, labels)
        chex.assert_trees_all_equal(loss, jnp.float32(0))
        chex.assert_trees_all_equal(gradients, (jnp.zeros_like(hidden), jnp.zeros_like(head)))


@pytest.mark.parametrize("bad", [-100, -1, 7, -(2**31)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_N7_an_ignored_row_is_as_if_it_were_not_there(bad, dtype):
    """Even a poisoned one."""
    hidden, head, labels = arguments((4,), 5, 7, dtype)
    spoiled = hidden.at[2].set(poison((5,), dtype))
    loss, (dhidden, dhead) = loss_and_gradients(spoiled, head, labels.at[2].set(bad))
    keep = jnp.array([0, 1, 3])
    wanted_loss, (wanted_dhidden, wanted_dhead) = loss_and_gradients(hidden[keep], head, labels[keep])
    chex.assert_trees_all_equal(dhidden[2], jnp.zeros((5,), dtype))
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    chex.assert_trees_all_close((loss, dhidden[keep], dhead), (wanted_loss, wanted_dhidden, wanted_dhead), rtol=tolerance, atol=tolerance)


def test_N7_ignore_index_may_be_a_token():
    hidden, head, _ = arguments((9,), 5, 4, jnp.float32)
    labels = jnp.asarray([0, 2, 1, 3, 2, 2, 0, 1, 3], jnp.int32)
    chex.assert_trees_all_equal(
        cross_entropy(hidden, head, labels, ignore_index=2), cross_entropy(hidden, head, jnp.where(labels == 2, -100, labels))
    )


@hypothesis.given(seed=st.integers(0, 99), scale=st.floats(0, 30))
def test_permuting_the_vocabulary_permutes_the_gradient(seed, scale):
    hidden, head = normal(seed, (6, 3)), normal(seed + 1, (9, 3), scale=scale)
    labels = integers(seed, (6,), -1, 9)
    order = np.random.default_rng(seed).permutation(9)
    loss, (dhidden, dhead) = loss_and_gradients(hidden, head, labels)
    renamed = jnp.where(labels < 0, labels, jnp.asarray(np.argsort(order), jnp.int32)[labels])
    chex.assert_trees_all_close(loss_and_gradients(hidden, head[order], renamed), (loss, (dhidden, dhead[order])), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_J7_no_tokens(shape):
    args = [jnp.zeros((*shape, 5)), jnp.ones((7, 5)), jnp.zeros(shape, jnp.int32)]
    loss, (dhidden, dhead) = value_and_gradients(cross_entropy, args, (0, 1))
    chex.assert_trees_all_equal((loss, dhead), (jnp.float32(0), jnp.zeros((7, 5))))
    chex.assert_shape(dhidden, (*shape, 5))
    chex.assert_shape(cross_entropy(*args, reduction="none"), shape)


def test_a_frozen_head_costs_no_launch():
    args = arguments((5,), 3, 7, jnp.float32)
    assert gradient_launches(cross_entropy, args, (0,)) == ["cross_entropy", "cross_entropy_dhidden"]
    assert gradient_launches(cross_entropy, args, (1,)) == ["cross_entropy", "cross_entropy_dhead"]


def test_vmap_is_a_loop():
    hidden, head, labels = normal(0, (3, 4, 5)), normal(1, (7, 5)), integers(2, (3, 4), -1, 7)
    check_vmap(cross_entropy, [hidden, head, labels], (0, 1), (0, None, 0))
    check_vmap(functools.partial(cross_entropy, reduction="none", z_loss=0.1), [hidden, head, labels], (0, 1), (0, None, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_J5_J8_modes(dtype):
    op = functools.partial(cross_entropy, label_smoothing=0.1, z_loss=0.01, reduction="none")
    check_modes(op, arguments((3, 11), 5, 13, dtype, low=-2), (0, 1))


def test_J7_checkpoint_changes_no_bit():
    args = arguments((3, 11), 5, 13, jnp.float32)
    chex.assert_trees_all_equal(
        jax.jit(jax.value_and_grad(jax.checkpoint(cross_entropy), argnums=(0, 1)))(*args), loss_and_gradients(*args)
    )


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.01, "reduction": "none"}])
def test_in_a_planned_step(options):
    def step(hidden, head, labels):
        def loss(hidden, head):
            return jnp.sum(cross_entropy(twice(hidden), head, labels, **options) ** 2)

        return jax.value_and_grad(loss, argnums=(0, 1))(hidden, head)

    check_step(step, *arguments((2, 67), 33, 131, jnp.float32, low=-20), rtol=1e-5, atol=1e-5)


def test_J3_shard_map():
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 0.01, "reduction": "none"}):
        op = functools.partial(cross_entropy, **options)
        check_shard_map(op, arguments((4,), 5, 7, jnp.float32), (0, 1), (True, False, True))


def test_J3_shard_map_over_several_blocks():
    check_shard_map(cross_entropy, arguments((150,), 2, 32001, jnp.float32), (0, 1), (True, False, True))


def test_errors_name_the_argument():
    hidden, head, labels = jnp.ones((2, 5)), jnp.ones((7, 5)), jnp.zeros(2, jnp.int32)
    with raises(TypeError, "cross_entropy: hidden must be bfloat16 or float32, got float16"):
        cross_entropy(hidden.astype(jnp.float16), head, labels)
    with raises(TypeError, "cross_entropy: head must have the dtype of hidden, float32, got bfloat16"):
        cross_entropy(hidden, head.astype(jnp.bfloat16), labels)
    with raises(ValueError, "cross_entropy: head must have 5 elements along axis 1 (the last axis of hidden), got shape (5, 7)"):
        cross_entropy(hidden, head.T, labels)
    with raises(ValueError, "cross_entropy: labels must have shape (2,) (the rows of hidden), got shape (3,)"):
        cross_entropy(hidden, head, jnp.zeros(3, jnp.int32))
    with raises(TypeError, "cross_entropy: labels must be int32, got int64"):
        cross_entropy(hidden, head, np.zeros(2, np.int64))
    with raises(ValueError, "cross_entropy: head must have at least one row, got shape (0, 5)"):
        cross_entropy(hidden, jnp.ones((0, 5)), labels)
    with raises(TypeError, "cross_entropy: ignore_index must be a Python int, got float 0.5"):
        cross_entropy(hidden, head, labels, ignore_index=0.5)
    with raises(ValueError, "cross_entropy: label_smoothing must be at most 1, got 1.5"):
        cross_entropy(hidden, head, labels, label_smoothing=1.5)
    with raises(ValueError, "cross_entropy: label_smoothing must be at least 0, got -0.1"):
        cross_entropy(hidden, head, labels, label_smoothing=-0.1)
    with raises(TypeError, "cross_entropy: z_loss must be a Python number"):
        cross_entropy(hidden, head, labels, z_loss=jnp.ones(()))
    with raises(ValueError, "cross_entropy: reduction must be one of 'mean', 'sum', 'none', got 'max'"):
        cross_entropy(hidden, head, labels, reduction="max")
