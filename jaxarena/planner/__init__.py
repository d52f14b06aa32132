"""From intervals to offsets: the lower bound, placement, and validators that share no code with either.

:func:`~jaxarena.planner.solve.solve` is the planner: from :class:`~jaxarena.planner.problem.Interval` to offsets. What it is made of, one
idea a file: ``problem`` (what is to be placed), ``items`` (the same, normalised to arrays), ``bound``, ``first_fit`` and ``skyline`` (the
cheap placements), ``piece`` and ``search`` (does it fit in this many bytes?), ``solve`` (what is tried, and when). ``place`` turns a form
into intervals and the offsets into an :class:`~jaxarena.arena.Arena`; ``validate`` and ``check`` find out whether a plan, or offsets,
are right; ``minimalloc`` reads and writes instances. Nothing here imports JAX.
"""

from __future__ import annotations

from jaxarena.planner.bound import bound
from jaxarena.planner.check import faults
from jaxarena.planner.place import place
from jaxarena.planner.problem import Interval, height
from jaxarena.planner.solve import NODES, Solution, solve
from jaxarena.planner.validate import Fault, PlanError, validate

__all__ = ["NODES", "Fault", "Interval", "PlanError", "Solution", "bound", "faults", "height", "place", "solve", "validate"]
