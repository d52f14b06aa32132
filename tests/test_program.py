"""Programs: several forms in one arena."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxarena as ja
from tests.programs import integers, sum_forward, times, twice


def train(w, x):
    value, gradient = jax.value_and_grad(lambda w: jnp.sum(times(twice(times(w, x)), w)))(w)
    return w - gradient, value


def decode(w, token, cache):
    return times(twice(w[:1]), token), sum_forward(twice(cache), cache)


def arguments():
    w, x = integers(0, 24, 160), integers(1, 24, 160)
    return {"train": (w, x), "decode": (w, integers(2, 1, 160), integers(3, 8, 160))}


def test_forms_share_one_arena_of_the_largest_forms_size():
    program, args = ja.Program(train=train, decode=decode), arguments()
    plan = program.plan(**args)
    assert plan.bytes == plan["train"].bytes > plan["decode"].bytes
    assert plan.bound == plan["train"].bound
    arena = plan.allocate(255)
    assert arena.nbytes == plan.bytes
    for name in ("train", "decode", "train", "decode", "decode"):
        result, arena = getattr(program, name)(arena, *args[name])
        chex.assert_trees_all_equal(result, jax.jit({"train": train, "decode": decode}[name])(*args[name]))


def test_a_form_may_be_a_step_with_options_of_its_own():
    args = arguments()
    program = ja.Program(train=ja.jit(train, donate_argnums=0), decode=decode)
    w = args["train"][0] + 0
    _, arena = program.train(program.plan(**args).allocate(), w, args["train"][1])
    assert w.is_deleted()
    program.decode(arena, *args["decode"])


def test_forms_are_compiled_once():
    args = arguments()
    traced = chex.assert_max_traces(decode, n=2)  # once for the plan, and once more where jax.jit inspects the function
    program = ja.Program(train=train, decode=traced)
    arena = program.plan(**args).allocate()
    for _ in range(3):
        _, arena = program.decode(arena, *args["decode"])


def test_a_plan_prints_its_forms_and_answers_whether_it_fits():
    plan = ja.Program(train=train, decode=decode).plan(**arguments())
    lines = str(plan).splitlines()
    assert f"({plan.bytes:,} bytes)" in lines[0] and "2 forms" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["train", "decode"]
    assert plan.fits(plan.bytes + plan.xla_bytes)
    assert not plan.fits(plan.bytes + plan.xla_bytes - 1)


def test_an_arena_of_other_forms_is_refused():
    args = arguments()
    alone = ja.Program(decode=decode).plan(decode=args["decode"]).allocate()
    program = ja.Program(train=train, decode=decode)
    program.decode(alone, *args["decode"])
    with pytest.raises(ValueError, match="arena was allocated for plan"):
        program.train(ja.Program(decode=decode).plan(decode=args["decode"]).allocate(), *args["train"])


def test_errors_name_the_form():
    args = arguments()
    program = ja.Program(train=train, decode=decode)
    with pytest.raises(ValueError, match="arguments must be given for train, decode, got train"):
        program.plan(train=args["train"])
    with pytest.raises(TypeError, match="the arguments of form 'decode' must be a tuple, got list"):
        program.plan(train=args["train"], decode=list(args["decode"]))
    with pytest.raises(AttributeError, match="there is no form 'prefill'; there are train, decode"):
        _ = program.prefill
    with pytest.raises(ValueError, match="a form cannot be called 'plan'"):
        ja.Program(plan=train)
    with pytest.raises(TypeError, match="form 'train' must be a function or a step, got 3"):
        ja.Program(train=3)
    with pytest.raises(ValueError, match="at least one form"):
        ja.Program()
