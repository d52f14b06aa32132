"""Which values are views, joins and homes of their own, seen in the plan; and that the numbers are right through them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxarena as ja
from jaxarena.ops import launch
from jaxarena.testing import check_step
from tests.programs import both_forward, integers, sum_forward, twice_forward


def regions(plan: ja.Plan) -> list[str]:
    """The launches of a plan that are XLA's."""
    return [launch.name for launch in plan.launches if launch.name.startswith(("xla", "copy"))]


@pytest.mark.parametrize(
    ("view", "is_view"),
    [
        (lambda x: x.reshape(2, 8, 4, 32), True),
        (lambda x: x.reshape(16, 128), True),
        (lambda x: x[:, None], True),
        (lambda x: x[..., 32:96], True),
        (lambda x: x[:, :8], True),
        (lambda x: x[1:], True),
        (lambda x: jnp.split(x, [32, 64], axis=-1)[1], True),
        (lambda x: lax.optimization_barrier(x), True),
        (lambda x: x[..., 16:48], False),
        (lambda x: x[..., ::2], False),
        (lambda x: x.transpose(1, 0, 2), False),
        (lambda x: x.reshape(4, 8, 64), False),
    ],
)
def test_views_cost_no_launch(view: Any, is_view: bool) -> None:
    def step(x: Any) -> Any:
        return twice_forward(view(sum_forward(x, x)))

    plan = check_step(step, integers(0, 2, 8, 128))
    assert regions(plan) == ([] if is_view else ["xla.1"])


def test_rows_with_pads_are_no_view_of_joined_rows() -> None:
    # Each sequence of 7 rows starts at a multiple of 8 arena rows, so 2 x 7 rows are not 14 in a row.
    plan = check_step(lambda x: twice_forward(sum_forward(x, x).reshape(14, 64)), integers(1, 2, 7, 64))
    assert regions(plan) == ["xla.1"]


def test_parts_are_written_straight_into_their_join() -> None:
    def step(x: Any, y: Any) -> Any:
        return twice_forward(jnp.concatenate([twice_forward(x), sum_forward(y, y)], axis=-1))

    plan = check_step(step, integers(2, 5, 32), integers(3, 5, 50))
    assert regions(plan) == []
    (home,) = plan.form.tensors
    assert home.layout.shape == (5, 82)


@pytest.mark.parametrize(
    "join",
    [
        lambda a, b: jnp.concatenate([a, a], axis=-1),  # one value twice
        lambda a, b: jnp.concatenate([b, a], axis=-1),  # the second part starts inside a panel
        lambda a, b: jnp.concatenate([a, a[..., :32]], axis=-1),  # two parts of one home
        lambda a, b: jnp.concatenate([a, jnp.ones_like(b)], axis=-1),  # one part is XLA's
    ],
)
def test_what_cannot_be_joined_in_place_is_joined_by_xla(join: Any) -> None:
    plan = check_step(lambda x, y: twice_forward(join(twice_forward(x), twice_forward(y))), integers(4, 5, 64), integers(5, 5, 50))
    assert regions(plan) == ["xla.1"]


def test_part_that_is_read_on_its_own_too() -> None:
    def step(x: Any) -> Any:
        part = twice_forward(x)
        joined = jnp.concatenate([part, sum_forward(part, x)], axis=-1)
        return twice_forward(joined).sum() + twice_forward(part).sum()

    check_step(step, integers(6, 9, 64))


def test_launch_with_several_results_and_one_unused() -> None:
    plan = check_step(lambda x: twice_forward(both_forward(x)[1]), integers(7, 9, 64))
    assert len(plan.form.tensors) == 2


def test_dtypes_that_the_arena_does_not_hold_stay_with_xla() -> None:
    @launch("spectrum")
    def spectrum(x: Any) -> Any:
        return jnp.fft.rfft(x), x > 0

    def step(x: Any) -> Any:
        waves, positive = spectrum(x)
        return jnp.abs(waves).sum(), twice_forward(jnp.where(positive, x, 0))

    plan = check_step(step, integers(8, 9, 64))
    assert [t.layout.storage for t in plan.form.tensors] == ["bool"]


def test_scratch_is_planned_while_its_launch_runs() -> None:
    @launch(
        "hungry", scratch=lambda x: (ja.arena.Scratch("partials", "f32", 4 * x.size), ja.arena.Scratch("arrivals", "i32", 64, counter=True))
    )
    def hungry(x: Any) -> Any:
        return x + 1

    plan = ja.jit(lambda x: twice_forward(hungry(hungry(x)))).plan(jax.ShapeDtypeStruct((16, 64), jnp.float32))
    plan.verify()
    assert [(s.tag, s.launch, s.bytes) for s in plan.arena.scratch] == [("partials", 0, 4096), ("partials", 1, 4096)]
    assert plan.arena.counters == ja.ALIGN
    assert plan.bytes == 3 * 4096
