"""From intervals to offsets: the lower bound, placement, and a validator that shares no code with either.

A planner is a function from :class:`~jaxarena.planner.problem.Interval` to offsets; :mod:`jaxarena.planner.place` turns a form into
intervals and the offsets into an :class:`~jaxarena.arena.Arena`.
"""

from __future__ import annotations

from jaxarena.planner.bound import bound
from jaxarena.planner.first_fit import first_fit
from jaxarena.planner.place import place
from jaxarena.planner.problem import Interval, Planner, height
from jaxarena.planner.validate import Fault, PlanError, validate

__all__ = ["Fault", "Interval", "PlanError", "Planner", "bound", "first_fit", "height", "place", "validate"]
