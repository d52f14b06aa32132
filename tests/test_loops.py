"""Scans planned once: what gets slots, in which order they are walked, and that the numbers are right."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxarena as ja
from jaxarena.testing import check_step
from tests.programs import both_forward, integers, sum_forward, times, twice, twice_forward


def slots(plan: ja.Plan) -> dict[str, int]:
    """The stacks of a plan: slots by name."""
    return {t.name: t.slots for t in plan.form.tensors if t.slots > 1}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_stacked_results_of_launches_lie_in_slots(length: int, reverse: bool) -> None:
    def step(xs: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            return carry, twice_forward(x)

        _, ys = lax.scan(body, 0, xs, reverse=reverse)
        return ys + 1

    plan = check_step(step, integers(1, length, 9, 130))
    (stack,) = plan.form.tensors
    assert (stack.slots, stack.layout.shape) == (length, (9, 130))


@pytest.mark.parametrize("reverse", [False, True])
def test_a_stack_is_read_slot_by_slot_in_either_direction(reverse: bool) -> None:
    def step(xs: Any) -> Any:
        _, ys = lax.scan(lambda c, x: (c, twice_forward(x)), 0, xs)
        first, again = lax.scan(lambda c, y: (sum_forward(c, y), c - y), jnp.zeros_like(xs[0]), ys, reverse=reverse)
        return first + 0, again

    check_step(step, integers(2, 4, 3, 64))


@pytest.mark.parametrize("reverse", [False, True])
def test_a_kept_carry_has_one_more_slot_and_is_not_copied(reverse: bool) -> None:
    def step(x: Any, weights: Any) -> Any:
        def loss(x: Any) -> Any:
            h, _ = lax.scan(lambda h, w: (times(twice(h), w), None), x, weights, reverse=reverse)
            return h.sum()

        def kept(h: Any, w: Any) -> Any:
            return sum_forward(h, w), h

        last, hs = lax.scan(kept, x, weights, reverse=reverse)
        # A second loop reads what the first kept, backwards.
        total, _ = lax.scan(lambda c, h: (sum_forward(c, h), None), jnp.zeros_like(x), hs, reverse=not reverse)
        return last * 1, total * 1, jax.grad(loss)(x)

    plan = check_step(step, integers(3, 2, 40), integers(4, 3, 2, 40))
    assert 4 in slots(plan).values()
    assert not any(launch.name.startswith("copy") and launch.reads for launch in plan.launches)


def test_carry_of_launches_takes_turns_between_two_slots_when_read_late() -> None:
    def step(x: Any) -> Any:
        def body(h: Any, _: Any) -> Any:
            new = twice_forward(h)
            late = both_forward(h)[0]  # the old carry is read after the new one is written
            return new, late.sum()

        return lax.scan(body, x, None, length=3)

    plan = check_step(lambda x: jax.tree.map(lambda a: a + 0, step(x)), integers(5, 8, 32))
    assert list(slots(plan).values()) == [2]


def test_carry_that_is_done_with_is_overwritten_in_place() -> None:
    def step(x: Any) -> Any:
        h, _ = lax.scan(lambda h, _: (twice_forward(twice_forward(h) - 1), None), x, None, length=3)
        return h + 0

    plan = check_step(step, integers(6, 8, 32))
    assert slots(plan) == {}


def test_start_value_that_is_read_after_the_loop_keeps_its_own_memory() -> None:
    def step(x: Any) -> Any:
        start = twice_forward(x)
        h, _ = lax.scan(lambda h, _: (twice_forward(h), None), start, None, length=3)
        return h + start

    check_step(step, integers(7, 8, 32))


def test_start_value_that_the_body_reads_keeps_its_own_memory() -> None:
    def step(x: Any) -> Any:
        start = twice_forward(x)
        h, _ = lax.scan(lambda h, _: (sum_forward(h, start), None), start, None, length=3)
        return h + 0

    check_step(step, integers(8, 8, 32))


def test_two_carries_that_start_from_one_value_and_swap() -> None:
    def step(x: Any) -> Any:
        start = twice_forward(x)

        def body(c: Any, _: Any) -> Any:
            a, b = c
            return (sum_forward(b, a), a), None

        (a, b), _ = lax.scan(body, (start, start), None, length=4)
        return a - b

    check_step(step, integers(9, 8, 32))


def test_parts_that_are_all_kept_make_their_home_a_slot() -> None:
    def step(x: Any, weights: Any) -> Any:
        def loss(x: Any) -> Any:
            def body(h: Any, w: Any) -> Any:
                u, v = jnp.split(times(jnp.concatenate([h, h], -1), w), 2, axis=-1)
                return times(u, v), None

            return lax.scan(body, x, weights)[0].sum()

        return jax.grad(loss)(x)

    plan = check_step(step, integers(10, 3, 32), integers(11, 2, 3, 64))
    kept = [t for t in plan.form.tensors if t.name.startswith("kept") and t.layout.shape == (3, 64)]
    assert len(kept) == 1


def test_values_that_xla_makes_are_kept_in_slots_too() -> None:
    def step(x: Any, weights: Any) -> Any:
        def loss(x: Any) -> Any:
            h, _ = lax.scan(lambda h, w: (times(h + w, h - w), None), x, weights)
            return h.sum()

        return jax.grad(loss)(x)

    plan = check_step(step, integers(12, 8, 64) % 2, integers(13, 3, 8, 64) % 2)
    assert sum(n == 3 for n in slots(plan).values()) == 2
    assert all(t.bytes < 8 * 64 * 4 * 3 for t in plan.temporaries if t.name.startswith("scan"))


def test_outputs_of_the_step_are_not_placed() -> None:
    def step(x: Any) -> Any:
        return lax.scan(lambda h, _: (twice_forward(h), both_forward(h)), x, None, length=3)

    plan = check_step(step, integers(14, 8, 32))
    assert plan.form.tensors == ()
    assert plan.bytes == 0


def test_loop_without_turns_and_loop_over_nothing_kept() -> None:
    def step(x: Any, xs: Any) -> Any:
        h, ys = lax.scan(lambda h, w: (twice_forward(h), sum_forward(h, w)), x, xs)
        return h + 0, ys + 1

    check_step(step, integers(15, 3, 16), integers(16, 0, 3, 16))


def test_nested_loops() -> None:
    def step(x: Any, weights: Any) -> Any:
        def loss(x: Any) -> Any:
            def outer(h: Any, ws: Any) -> Any:
                inner, kept = lax.scan(lambda h, w: (times(h, w), h), h, ws)
                return twice(inner), kept.sum()

            h, sums = lax.scan(outer, x, weights)
            return h.sum() + sums.sum()

        return jax.value_and_grad(loss)(x)

    plan = check_step(step, integers(17, 3, 300), integers(18, 2, 2, 3, 300))
    assert len(plan.form.loops) >= 3


def test_P3_conds_scan_and_late_readers() -> None:
    def step(x: Any, flag: Any) -> Any:
        first = twice_forward(x)
        a = lax.cond(flag, twice_forward, lambda v: v - 1, first)
        b = lax.cond(flag, lambda v: lax.cond(v[0, 0] > 0, twice_forward, lambda w: w, v), lambda v: v + 1, a)
        c, ys = lax.scan(lambda c, y: (sum_forward(c, y), twice_forward(c)), b, jnp.stack([a, b]))
        d = lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, twice_forward(s[1])), (0, c))[1]
        return first + d, ys.sum(0) + a

    for flag in (True, False):
        check_step(step, integers(19, 5, 48), jnp.asarray(flag))


def test_checkpoint_in_a_loop_recomputes_and_agrees() -> None:
    def gradient(checkpointed: bool) -> Any:
        def step(x: Any, weights: Any) -> Any:
            def layer(h: Any, w: Any) -> Any:
                return times(twice(h), times(h, w))

            recomputed = jax.checkpoint(layer) if checkpointed else layer

            def loss(x: Any) -> Any:
                return lax.scan(lambda h, w: (recomputed(h, w), None), x, weights)[0].sum()

            return jax.grad(loss)(x)

        return step

    x, weights = integers(20, 4, 32) % 2, integers(21, 2, 4, 32) % 2
    without, recomputing = check_step(gradient(False), x, weights), check_step(gradient(True), x, weights)
    assert recomputing.bytes < without.bytes
    chex.assert_trees_all_equal(jax.jit(gradient(False))(x, weights), jax.jit(gradient(True))(x, weights))
