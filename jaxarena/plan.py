"""A step's memory plan: what users look at before anything is compiled."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxarena.arena import ROW_BYTES, Arena, Placed, PlacedScratch
from jaxarena.kernels import CAPABILITY
from jaxarena.lifetime import Form, Launch
from jaxarena.planner import Interval, bound, validate
from jaxarena.report.data import from_plain, to_plain
from jaxarena.report.picture import save
from jaxarena.report.questions import difference, explanation
from jaxarena.report.text import text
from jaxarena.storage import arena_element

__all__ = ["ArenaBuffer", "Plan", "Temporary"]

VERSION = 1
"""Of the plan's JSON."""


@dataclasses.dataclass(frozen=True)
class Temporary:
    """A value that stays with XLA between launches: its estimated ``bytes``, live from launch ``first`` to ``last``."""

    name: str
    bytes: int
    first: int
    last: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ArenaBuffer:
    """The memory of one arena: ``data``, int8 [rows, 128], and which plans it was allocated for. A pytree, to be donated.

    Attributes:
      data: the buffer; on the CPU the same bytes as uint32 [rows, 32] (:mod:`jaxarena.storage` says why).
      plans: the fingerprints of the plans that may run in it (static).
    """

    data: jax.Array
    plans: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where every array of a step lies in its arena. A pure function of the trace: every host computes the same.

    Attributes:
      form: the step's launches and arrays.
      arena: the placement, offsets and sizes in bytes.
      temporaries: the values that stay XLA arrays between launches, with estimated bytes.
      fallbacks: of each launch, why it runs as its XLA reference also on a GPU that kernels are made for; None: it runs as a kernel.
    """

    form: Form
    arena: Arena
    temporaries: tuple[Temporary, ...] = ()
    fallbacks: tuple[str | None, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of the arena."""
        return self.arena.bytes

    @property
    def bound(self) -> int:
        """Bytes that no plan can go below: the largest sum of bytes live at one launch."""
        scratch = (Interval(f"{p.tag} of {p.launch}", p.bytes, p.launch, p.launch) for p in self.arena.scratch)
        return bound([*(Interval(p.name, p.bytes, p.first, p.last) for p in self.arena.placed), *scratch])

    @property
    def ratio(self) -> float:
        """``bytes`` over ``bound``; 1.0 is optimal."""
        return self.bytes / self.bound if self.bound else 1.0

    @property
    def verdict(self) -> str:
        """``optimal``, or how far above the bound the plan is at most."""
        return "optimal" if self.bytes == self.bound else f"within {100 * (self.ratio - 1):.1f} % of the bound"

    @property
    def kept_bytes(self) -> dict[str, int]:
        """Bytes of the arrays stored otherwise for the backward pass (``jit``'s ``storage``), by storage."""
        found: dict[str, int] = {}
        for tensor in self.form.tensors:
            if tensor.saved:
                found[tensor.layout.storage] = found.get(tensor.layout.storage, 0) + tensor.bytes
        return found

    @property
    def saved_bytes(self) -> int:
        """How many bytes less those take than in their own storage, all together (they need not all live at once)."""
        return sum(tensor.saved for tensor in self.form.tensors)

    @property
    def launches(self) -> tuple[Launch, ...]:
        return self.form.launches

    @property
    def peak_launch(self) -> int:
        """The launch (its number) at which the most bytes of the arena live."""
        return max(range(len(self.launches)), key=self.arena.live_bytes, default=0)

    @property
    def peak(self) -> int:
        """The most bytes of the arena that live at one launch."""
        return self.arena.live_bytes(self.peak_launch)

    @property
    def xla_bytes(self) -> int:
        """Estimated bytes of XLA's temporaries where they are most: values between launches, not what lies inside one region."""
        return max((self.xla_bytes_at(i) for i in range(len(self.launches))), default=0)

    @property
    def fingerprint(self) -> str:
        """Names this plan: the same trace gives the same fingerprint on every host."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def xla_bytes_at(self, launch: int) -> int:
        """Estimated bytes of the XLA temporaries that live while launch number ``launch`` runs."""
        return sum(t.bytes for t in self.temporaries if t.first <= launch <= t.last)

    def live_at(self, launch: int) -> tuple[Placed | PlacedScratch, ...]:
        """The arrays and scratch of the arena that live while launch number ``launch`` runs.

        Raises:
          IndexError: when there is no such launch.
        """
        if not 0 <= launch < len(self.launches):
            raise IndexError(f"Plan.live_at: launch must be 0 to {len(self.launches) - 1}, got {launch}")
        return self.arena.live_at(launch)

    def fits(self, bytes: int) -> bool:
        """Whether the arena and the estimated XLA temporaries fit in ``bytes`` (parameters and inputs not counted)."""
        return self.bytes + self.xla_bytes <= bytes

    def kernels(self, capability: str = CAPABILITY) -> dict[str, str | None]:
        """Of each launch by name, why it does not run as a kernel on a GPU of this compute capability; None: it does.

        Empty for a plan that was not made of a traced step.

        Args:
          capability: such as ``"9.0"`` (H100, H200), which kernels are made for.
        """
        other = None if capability == CAPABILITY else f"kernels are made for compute capability {CAPABILITY}, not {capability}"
        return {launch.name: other or why for launch, why in zip(self.launches, self.fallbacks, strict=False)}

    def verify(self) -> None:
        """Checks the plan by means independent of the planner.

        Raises:
          jaxarena.planner.PlanError: names the fault, such as two arrays that overlap while both live.
        """
        validate(self.form, self.arena)

    def allocate(self, fill: int = 0) -> ArenaBuffer:
        """A new arena, every byte ``fill`` (0 to 255). Nothing a step computes depends on ``fill``.

        Raises:
          ValueError: for a ``fill`` that is no byte.
        """
        if not 0 <= fill <= 255:
            raise ValueError(f"Plan.allocate: fill must be a byte, 0 to 255, got {fill}")
        element = arena_element(jax.default_backend())
        row = np.full(ROW_BYTES, fill, np.uint8).view(element)
        return ArenaBuffer(jnp.tile(row, (self.arena.rows, 1)), (self.fingerprint,))

    def explain(self) -> str:
        """Why the arena is as large as it is, in words: where most lives, what that is, who made it and who still needs it."""
        return explanation(self)

    def diff(self, other: Plan) -> str:
        """What is larger, smaller, new or gone in ``other``, largest change first; empty when nothing changed its size."""
        return difference(self, other)

    def __str__(self) -> str:
        return text(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as a picture (``.html``, or ``.png`` with matplotlib installed) or as data (``.json``), by the suffix.

        Raises:
          ValueError: for another suffix.
          ImportError: for ``.png`` without matplotlib.
        """
        save(self, path)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data, for ``json.dump``."""
        return {"jaxarena_plan": VERSION, **to_plain(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """The plan that :meth:`to_json` gave.

        Raises:
          ValueError: when ``data`` is no plan, or one of another version.
        """
        if data.get("jaxarena_plan") != VERSION:
            raise ValueError(f"Plan.from_json: key 'jaxarena_plan' must be {VERSION}, got {data.get('jaxarena_plan')!r}")
        return from_plain(cls, {k: v for k, v in data.items() if k != "jaxarena_plan"})
