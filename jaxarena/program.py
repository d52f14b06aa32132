"""Several forms of one model over one arena: train, prefill, decode.

One form runs at a time, so they can share their memory: the arena of a program is as large as its largest form needs, never the sum.
What two forms both use (parameters, caches, states) is an input and output of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxarena.plan import ArenaBuffer, Plan
from jaxarena.report.units import human
from jaxarena.step import Step, jit

__all__ = ["Program", "ProgramPlan"]


@dataclasses.dataclass(frozen=True)
class ProgramPlan:
    """The plans of a program's forms, by name, over one arena.

    Attributes:
      forms: the plan of each form.
    """

    forms: Mapping[str, Plan]

    @property
    def bytes(self) -> int:
        """Bytes of the arena: what the largest form needs."""
        return max(plan.bytes for plan in self.forms.values())

    @property
    def bound(self) -> int:
        """Bytes that no arena for these forms can go below."""
        return max(plan.bound for plan in self.forms.values())

    @property
    def xla_bytes(self) -> int:
        """Estimated bytes of XLA's temporaries in the form that has the most."""
        return max(plan.xla_bytes for plan in self.forms.values())

    def fits(self, bytes: int) -> bool:
        """Whether every form's arena and estimated XLA temporaries fit in ``bytes`` (parameters and inputs not counted)."""
        return self.bytes + self.xla_bytes <= bytes

    def allocate(self, fill: int = 0) -> ArenaBuffer:
        """A new arena for all the forms, every byte ``fill`` (0 to 255). Nothing a step computes depends on ``fill``.

        Raises:
          ValueError: for a ``fill`` that is no byte.
        """
        largest = max(self.forms.values(), key=lambda plan: plan.bytes)
        fingerprints = sorted({plan.fingerprint for plan in self.forms.values()})
        return dataclasses.replace(largest.allocate(fill), plans=tuple(fingerprints))

    def __getitem__(self, form: str) -> Plan:
        return self.forms[form]

    def __str__(self) -> str:
        lines = [f"program: arena {human(self.bytes)} ({self.bytes:,} bytes), bound {human(self.bound)}, shared by {len(self.forms)} forms"]
        width = max(map(len, self.forms))
        for name, plan in self.forms.items():
            counts = f"{len(plan.launches):>5} launches, XLA temporaries at most {human(plan.xla_bytes)} (estimated)"
            lines.append(f"  {name:<{width}}  {human(plan.bytes):>9}, {plan.verdict}, {counts}")
        return "\n".join(lines)


class Program:
    """Forms that share an arena::

        program = jaxarena.Program(train=jaxarena.jit(train_step, donate_argnums=(0, 1)), decode=decode)
        plan = program.plan(train=(params, opt_state, batch), decode=(params, caches, token))
        arena = plan.allocate()
        (params, opt_state, loss), arena = program.train(arena, params, opt_state, batch)
        (caches, token), arena = program.decode(arena, params, caches, token)

    Each form is a function, or a step that :func:`jaxarena.jit` made with options of its own (donation, storage), and becomes an
    attribute of the program.

    Raises:
      TypeError: for a form that is not callable.
      ValueError: without forms, or for a name that a program has for something else.
    """

    def __init__(self, **forms: Callable[..., Any] | Step):
        if not forms:
            raise ValueError("jaxarena.Program: at least one form must be given, as in Program(train=train_step)")
        for name, form in forms.items():
            if name in ("plan", "forms") or name.startswith("_"):
                raise ValueError(f"jaxarena.Program: a form cannot be called {name!r}")
            if not callable(form):
                raise TypeError(f"jaxarena.Program: form {name!r} must be a function or a step, got {form!r}")
        self.forms: dict[str, Step] = {name: form if isinstance(form, Step) else jit(form) for name, form in forms.items()}

    def __getattr__(self, name: str) -> Step:
        forms = self.__dict__.get("forms", {})
        if name not in forms:
            raise AttributeError(f"jaxarena.Program: there is no form {name!r}; there are {', '.join(forms)}")
        step: Step = forms[name]
        return step

    def plan(self, **arguments: tuple[Any, ...]) -> ProgramPlan:
        """The memory plan of the forms, for the positional arguments of each: arrays or ``jax.ShapeDtypeStruct``.

        Raises:
          TypeError: when a form's arguments are no tuple.
          ValueError: when arguments are missing for a form, or given for one that does not exist.
        """
        if arguments.keys() != self.forms.keys():
            raise ValueError(f"Program.plan: arguments must be given for {', '.join(self.forms)}, got {', '.join(arguments) or 'none'}")
        for name, args in arguments.items():
            if not isinstance(args, tuple):
                raise TypeError(f"Program.plan: the arguments of form {name!r} must be a tuple, got {type(args).__name__}")
        return ProgramPlan({name: step.plan(*arguments[name]) for name, step in self.forms.items()})
