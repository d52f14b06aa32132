"""Questions to a plan: why so large, what changed, how large a batch may be."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxarena as ja
from jaxarena.ops import launch
from tests.programs import twice
from tests.report.plans import bare
from tests.report.plans import chain as chain_of


@launch("wide")
def wide(x: jax.Array) -> jax.Array:
    return jnp.concatenate([x, x, x], axis=-1)


def chain(x: jax.Array) -> jax.Array:
    kept = twice(x)
    return twice(wide(twice(kept))[..., :32]) + kept


def shape(rows: int) -> tuple[Any]:
    return (jax.ShapeDtypeStruct((rows, 32), jnp.float32),)


def test_explain_names_the_peak_and_what_is_kept_across_it() -> None:
    plan = ja.jit(chain).plan(*shape(64))
    text = plan.explain()
    assert plan.peak == plan.bound == plan.arena.live_bytes(plan.peak_launch)
    assert f"Most lives at launch {plan.peak_launch}, wide.1:" in text
    assert "as little as any placement could" in text
    assert "24.0 KiB  wide.1: made here" in text
    assert "8.00 KiB of this is neither made nor read there, only kept across" in text
    assert "twice.1: made by twice.1, last read by" in text


def test_explain_says_how_far_above_the_bound_a_plan_is() -> None:
    plan = ja.jit(chain, reuse=False).plan(*shape(64))
    assert "more than the bound" in plan.explain()


def test_explain_of_plans_with_next_to_nothing_in_them() -> None:
    assert bare()["no launches"].explain() == "step: no launches, so the arena is empty."
    assert "0 B in 0 arrays" in bare()["no arrays"].explain()
    assert "scratch 'work' of this launch" in chain_of(["x"], scratch=8192).explain()


def test_diff() -> None:
    small, large = (ja.jit(chain).plan(*shape(rows)) for rows in (64, 128))
    assert small.diff(small) == ""
    lines = small.diff(large).splitlines()
    assert lines[0].startswith("arena 40.0 KiB -> 80.0 KiB (+40.0 KiB)")
    assert lines[1] == "    +24.0 KiB  wide.1 (24.0 KiB -> 48.0 KiB)"
    assert large.diff(small).splitlines()[1] == "    -24.0 KiB  wide.1 (48.0 KiB -> 24.0 KiB)"
    other = ja.jit(lambda x: twice(twice(x)) + 1).plan(*shape(64))
    assert "wide.1 (gone)" in small.diff(other)
    assert "wide.1 (new)" in other.diff(small)


def test_max_batch() -> None:
    budget = ja.jit(chain).plan(*shape(8 * 37)).bytes + 2**20
    largest = ja.max_batch(chain, budget, lambda n: shape(8 * n))
    step = ja.jit(chain)
    assert step.plan(*shape(8 * largest)).fits(budget)
    assert not step.plan(*shape(8 * (largest + 1))).fits(budget)
    assert ja.max_batch(step, 10, shape) == 0
    assert ja.max_batch(step, budget, shape, limit=5) == 5
    with pytest.raises(TypeError, match="arguments must return a tuple, got ShapeDtypeStruct"):
        ja.max_batch(step, budget, lambda n: shape(n)[0])
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        ja.max_batch(step, budget, shape, limit=0)
