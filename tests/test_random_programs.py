"""Random programs, planned and plain, agree in every bit; and the programs that once did not, cut down to what mattered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

from jaxarena.testing import check_step
from tests.programs import both_forward, integers, sum_forward, twice_forward
from tests.random_programs import Program, random_program, shrink

# Between them every move, loops in loops, joins, and stacks of all lengths; from 3025 on, seeds that found a fault.
SEEDS = 0, 3, 8, 11, 3025, 3048, 3105, 3106


def check(program: Program) -> None:
    """``check_step``; what fails is made smaller and shown."""

    def fails(program: Program) -> bool:
        try:
            check_step(program.__call__, *program.inputs)
        except Exception:
            return True
        return False

    try:
        check_step(program.__call__, *program.inputs)
    except Exception as error:
        smaller = shrink(program, fails)
        raise AssertionError(f"{smaller} fails:\n{smaller.jaxpr}") from error


@pytest.mark.parametrize("seed", SEEDS)
def test_random_program(seed: int) -> None:
    check(random_program(seed))


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=False, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**31 - 1), moves=st.integers(1, 20))
def test_random_programs_of_any_seed(seed: int, moves: int) -> None:
    check(random_program(seed, moves))
    jax.clear_caches()  # thousands of compiled programs would fill the memory


def test_a_program_is_the_same_each_time_it_is_traced() -> None:
    program = random_program(11)
    first, second = (str(jax.make_jaxpr(random_program(11).__call__)(*program.inputs)) for _ in range(2))
    assert first == second
    assert first != str(jax.make_jaxpr(random_program(12).__call__)(*random_program(12).inputs))


def test_a_failing_program_is_made_smaller() -> None:
    program = random_program(8)
    assert program.jaxpr.count("scan[") > 1
    smaller = shrink(program, lambda p: "scan[" in p.jaxpr)
    assert smaller.jaxpr.count("scan[") == 1
    assert len(smaller.jaxpr) < len(program.jaxpr) / 2


# The carry of a loop may be overwritten in place only when nobody reads it late, under whatever name.


def run_turns(body: Callable[[Any], tuple[Any, Any]], start: Any, turns: int = 3) -> Any:
    """A loop of ``turns``, whose results XLA reads."""
    return jax.tree.map(lambda a: a + 0, lax.scan(lambda carry, _: body(carry), start, None, length=turns))


def by_barrier(x: Any) -> Any:
    return lax.optimization_barrier(x)


def by_reshapes(x: Any) -> Any:
    return x.reshape(1, *x.shape).reshape(x.shape)


ALIASES = pytest.mark.parametrize("alias", [by_barrier, by_reshapes, jnp.copy])


@ALIASES
def test_carry_read_late_under_another_name(alias: Callable[[Any], Any]) -> None:
    def body(h: Any) -> tuple[Any, Any]:
        name = alias(h)
        new = twice_forward(twice_forward(h))
        return new, both_forward(name)[0].sum()

    check_step(lambda x: run_turns(body, x), integers(1, 8, 32))


@ALIASES
def test_next_carry_made_before_the_old_one_is_read_and_then_renamed(alias: Callable[[Any], Any]) -> None:
    def body(h: Any) -> tuple[Any, Any]:
        new = twice_forward(h)
        late = both_forward(h)[0]
        return alias(new), late.sum()

    check_step(lambda x: run_turns(body, x), integers(2, 8, 32))


def test_next_carry_joined_of_parts_of_which_one_is_made_early() -> None:
    def body(h: Any) -> tuple[Any, Any]:
        left = twice_forward(h[:, :32])
        late = both_forward(h)[0]
        return jnp.concatenate([left, twice_forward(h[:, 32:])], -1), late.sum()

    check_step(lambda x: run_turns(body, x), integers(3, 8, 64))


@ALIASES
def test_carry_that_becomes_another_carry_under_another_name(alias: Callable[[Any], Any]) -> None:
    def body(carry: Any) -> tuple[Any, Any]:
        a, b = carry
        name = alias(a)
        return (twice_forward(twice_forward(a)), name), b.sum()

    check_step(lambda x: run_turns(body, (x, x + 1)), integers(4, 8, 32))


def test_inner_loop_that_makes_the_next_carry_reads_the_old_one_in_every_turn() -> None:
    def body(h: Any) -> tuple[Any, Any]:
        inner, _ = lax.scan(lambda g, _: (sum_forward(sum_forward(g, g), h), None), jnp.ones_like(h), None, length=2)
        return inner, None

    check_step(lambda x: run_turns(body, x), integers(5, 8, 32))


def test_start_of_the_inner_loop_that_makes_the_next_carry_is_made_early() -> None:
    def body(h: Any) -> tuple[Any, Any]:
        start = twice_forward(h)
        late = both_forward(h)[0]
        inner, _ = lax.scan(lambda g, _: (twice_forward(twice_forward(g)), None), start, None, length=2)
        return inner, late.sum()

    check_step(lambda x: run_turns(body, x), integers(6, 8, 32))


# What a loop starts from may lie in its first slot only when that memory is not read again, under whatever name.


@ALIASES
def test_start_read_after_the_loop_or_in_it_under_another_name(alias: Callable[[Any], Any]) -> None:
    def step(x: Any) -> Any:
        start, other = twice_forward(x), twice_forward(x + 1)
        name, other_name = alias(start), alias(other)
        after, _ = lax.scan(lambda h, _: (twice_forward(h), None), start, None, length=3)
        inside, _ = lax.scan(lambda h, _: (sum_forward(h, other_name), None), other, None, length=3)
        return after + name, inside + 0

    check_step(step, integers(7, 8, 32))


def test_start_joined_of_a_part_that_is_read_after_the_loop() -> None:
    def step(x: Any) -> Any:
        part = twice_forward(x)
        joined = jnp.concatenate([part, sum_forward(x, x)], -1)
        h, _ = lax.scan(lambda h, _: (twice_forward(h), None), joined, None, length=3)
        return h[:, :32] + part

    check_step(step, integers(8, 8, 32))


@pytest.mark.parametrize("handed_on", ["kept", "carried"])
def test_start_of_an_inner_loop_that_the_outer_loop_hands_on(handed_on: str) -> None:
    def body(carry: Any) -> tuple[Any, Any]:
        start = twice_forward(carry[0])
        inner, _ = lax.scan(lambda g, _: (twice_forward(g), None), start, None, length=2)
        return ((inner - 1, start), None) if handed_on == "carried" else ((inner - 1, carry[1]), start)

    check_step(lambda x: run_turns(body, (x, x)), integers(9, 8, 32))


def test_carry_of_a_launch_that_starts_from_a_literal() -> None:
    def body(carry: Any) -> tuple[Any, Any]:
        return (twice_forward(carry[0]), both_forward(carry[0][0])[1]), None

    check_step(lambda x: run_turns(body, (x, 0.0)), integers(10, 8, 32))


@pytest.mark.parametrize("shape", [(2, 7, 32), (256, 256, 2), (2, 512, 3)], ids=str)
def test_flat_results_are_cut_along_any_axis(shape: tuple[int, ...]) -> None:
    def step(x: Any) -> Any:
        totals = both_forward(x)[1]
        left, right = jnp.split(totals, [shape[1] // 2], axis=1)
        return totals[:, 3:5] + 1, totals[:1] + 1, totals[:, :128] + 1, left.sum(1), right.sum(1)

    check_step(step, integers(11, *shape))
