"""Plans as plain data and back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from jaxarena.plan import Plan
from tests.report.plans import bare, looped, random_plans


def through_json(plan: Plan) -> Plan:
    return Plan.from_json(json.loads(json.dumps(plan.to_json())))


@given(random_plans())
def test_a_plan_survives_json(plan: Plan) -> None:
    again = through_json(plan)
    assert again == plan
    assert hash(again.form) == hash(plan.form)
    assert (again.fingerprint, again.bound, again.peak_launch) == (plan.fingerprint, plan.bound, plan.peak_launch)


def test_views_slots_and_their_absence_survive_json() -> None:
    plan = looped()
    assert {alias.view is None for alias in plan.form.aliases} == {True, False}
    again = through_json(plan)
    assert again == plan
    again.verify()
    assert str(again) == str(plan)


@pytest.mark.parametrize("name", bare())
def test_a_plan_with_next_to_nothing_in_it_survives_json(name: str) -> None:
    assert through_json(bare()[name]) == bare()[name]


def test_another_version_is_refused() -> None:
    for data in ({**looped().to_json(), "jaxarena_plan": 99}, {}):
        with pytest.raises(ValueError, match=r"'jaxarena_plan' must be 1, got (99|None)"):
            Plan.from_json(data)


def test_a_missing_field_is_refused_by_name() -> None:
    data = looped().to_json()
    with pytest.raises(TypeError, match="arena"):
        Plan.from_json({key: value for key, value in data.items() if key != "arena"})
