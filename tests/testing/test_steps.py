"""The assertions on planned steps: each fails on a step with the fault it is there to find."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxarena as ja
from jaxarena.testing import assert_arena_at_most, assert_step_repeatable, check_step, poisoned_arenas
from tests.programs import integers, times, twice


def wrong_from(run):
    """A step whose result is another from its run number ``run`` on: as many as ``check_step`` makes, planned, are 5."""
    runs = itertools.count()

    def step(x):
        fault = jax.pure_callback(lambda: np.float32(next(runs) >= run), jax.ShapeDtypeStruct((), jnp.float32))
        return twice(twice(x)) + fault

    return step


def test_a_step_that_is_the_same_every_time():
    step, x = wrong_from(run=99), integers(0, 5, 130)
    plan = check_step(step, x)
    assert plan.bytes == assert_step_repeatable(step, x).bytes > 0


@pytest.mark.parametrize("run", [1, 2, 3, 4])
def test_a_step_that_changes_is_caught(run):
    with pytest.raises(AssertionError):
        assert_step_repeatable(wrong_from(run), integers(0, 5, 130))


def test_a_step_unlike_the_plain_one_is_caught_unless_it_is_close():
    x = integers(0, 5, 130)
    with pytest.raises(AssertionError):
        check_step(wrong_from(run=5), x)
    with pytest.raises(AssertionError):
        check_step(wrong_from(run=5), x, atol=0.5)
    check_step(wrong_from(run=5), x, atol=1.5)


def test_options_are_those_of_jit():
    def step(w, x, factor):
        return w - factor * times(twice(w), x), x

    w, x = integers(0, 5, 130), integers(1, 5, 130)
    check_step(step, w, x, 2, donate_argnums=(0, 1), static_argnums=2)
    assert not w.is_deleted()
    check_step(jax.grad(lambda w, x: times(twice(times(w, x)), w).sum()), w, x, storage="bf16")


def test_poison_reaches_every_byte():
    plan = ja.jit(lambda x: twice(twice(x))).plan(integers(0, 5, 130))
    arenas = poisoned_arenas(plan)
    fills = [{*np.asarray(a.data).view(np.uint8).reshape(-1).tolist()} for a in arenas]
    assert fills == [{0xFF}, {0x7F}, {0xFF}]
    assert all(a.nbytes == plan.bytes for a in arenas)


def test_arena_at_most():
    step, x = ja.jit(lambda x: twice(twice(x))), integers(0, 24, 130)
    plan = step.plan(x)
    assert_arena_at_most(plan, plan.bytes)
    assert_arena_at_most(step, plan.bytes, jax.ShapeDtypeStruct(x.shape, x.dtype))
    limit = plan.bytes - 1
    with pytest.raises(AssertionError, match=f"arena of {plan.bytes:,} bytes, limit {limit:,}, no plan below {plan.bound:,}; .*twice"):
        assert_arena_at_most(step, limit, x)
    program = ja.Program(small=lambda x: twice(twice(x[:8])), large=step).plan(small=(x,), large=(x,))
    assert_arena_at_most(program, plan.bytes)
    with pytest.raises(AssertionError, match=f"arena of {plan.bytes:,} bytes"):
        assert_arena_at_most(program, limit)
