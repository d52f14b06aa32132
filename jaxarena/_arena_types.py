"""The arena's units and records: bytes, rows, and what a plan says was placed where.

The arena is one ``int8[rows, 128]`` array. Every array in it starts at a multiple of :data:`ALIGN` bytes, eight arena rows: the
swizzle atom of a bulk tensor copy, and the row granule of a tiled row range. Offsets are Python integers, so they do not wrap;
what indexes the arena at run time is a row number, which must fit a signed 32-bit integer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB

ROW_BYTES = 128
"""Bytes of one arena row: a panel's width, and one scale block of int8 words."""

ALIGN = 1024
"""Every array's alignment in the arena, in bytes."""

MAX_ROWS = 2**31 - 1
"""Most rows an arena may have: row numbers are signed 32-bit integers at run time."""

ITEMSIZE = {"f32": 4, "i32": 4, "u32": 4, "bf16": 2, "f16": 2, "i16": 2, "u16": 2, "i8": 1, "u8": 1, "bool": 1}
"""Bytes of one value of each raw storage."""


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class Scratch:
    """Memory that a launch needs only while it runs.

    Attributes:
      tag: names it beside the launch's result; unique within the launch.
      dtype: a raw storage (:data:`ITEMSIZE`).
      bytes: its size, a multiple of the dtype's.
      counter: an arrival count that the launch's last block resets: zero before the launch and left zero, so it lives in a
        zeroed buffer of its own, outside the arena.

    Raises:
      ValueError: for an empty tag, an unknown dtype, a size that is negative or no multiple, a counter that is no integer.
    """

    tag: str
    dtype: str
    bytes: int
    counter: bool = False

    def __post_init__(self) -> None:
        if not self.tag:
            raise ValueError(f"Scratch: tag must be a non-empty string, got {self.tag!r}")
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"Scratch {self.tag!r}: dtype {self.dtype!r} is unknown; supported: {', '.join(ITEMSIZE)}")
        if self.bytes < 0 or self.bytes % ITEMSIZE[self.dtype]:
            size = ITEMSIZE[self.dtype]
            raise ValueError(f"Scratch {self.tag!r}: bytes must be a non-negative multiple of {size} ({self.dtype}), got {self.bytes}")
        if self.counter and self.dtype not in ("i32", "u32"):
            raise ValueError(f"Scratch {self.tag!r}: a counter's dtype must be i32 or u32, got {self.dtype!r}")


@dataclass(frozen=True)
class Placed:
    """An array in the arena: ``bytes`` from byte ``offset``, live from launch ``first`` to launch ``last``, both included."""

    name: str
    bytes: int
    offset: int
    first: int
    last: int

    @property
    def end(self) -> int:
        """The first byte past it."""
        return self.offset + self.bytes

    @property
    def row(self) -> int:
        """Its first arena row."""
        return self.offset // ROW_BYTES

    def lives_at(self, launch: int) -> bool:
        return self.first <= launch <= self.last


@dataclass(frozen=True)
class PlacedScratch:
    """A launch's scratch in the arena: ``bytes`` from byte ``offset`` while launch ``launch`` runs."""

    tag: str
    bytes: int
    offset: int
    launch: int

    @property
    def end(self) -> int:
        """The first byte past it."""
        return self.offset + self.bytes

    @property
    def row(self) -> int:
        """Its first arena row."""
        return self.offset // ROW_BYTES

    def lives_at(self, launch: int) -> bool:
        return self.launch == launch


@dataclass(frozen=True)
class Arena:
    """A form's arena.

    Attributes:
      placed: the arrays, in the form's order.
      scratch: the launches' scratch, in launch order.
      counters: bytes of the zeroed buffer of arrival counts, which is not part of the arena. Launches share it, since each
        leaves it zero: it is as large as the launch with the most asks for.
      bytes: the arena's size, a multiple of :data:`ALIGN`.

    Raises:
      ValueError: for a size that is negative, no multiple of ALIGN, or more than ``2**31 - 1`` rows.
    """

    placed: tuple[Placed, ...]
    scratch: tuple[PlacedScratch, ...]
    counters: int
    bytes: int

    def __post_init__(self) -> None:
        if self.bytes < 0 or self.bytes % ALIGN:
            raise ValueError(f"Arena: bytes must be a non-negative multiple of {ALIGN}, got {self.bytes}")
        if self.rows > MAX_ROWS:
            raise ValueError(
                f"Arena: {self.bytes} bytes are {self.rows} rows of {ROW_BYTES} bytes; at most {MAX_ROWS} rows "
                f"({MAX_ROWS * ROW_BYTES} bytes) are supported"
            )

    @property
    def rows(self) -> int:
        """Rows of the ``int8[rows, 128]`` array."""
        return self.bytes // ROW_BYTES

    @cached_property
    def _by_name(self) -> dict[str, Placed]:
        return {p.name: p for p in self.placed}

    def find(self, name: str) -> Placed:
        """The placed array of that name.

        Raises:
          KeyError: when no array of that name was placed.
        """
        if name not in self._by_name:
            raise KeyError(f"Arena.find: {name!r} is not placed (a step's input or output, an alias, or no array of this form)")
        return self._by_name[name]

    def live_at(self, launch: int) -> tuple[Placed | PlacedScratch, ...]:
        """What lives while launch ``launch`` runs: arrays first, then its scratch."""
        arrays = (p for p in self.placed if p.lives_at(launch))
        return (*arrays, *(s for s in self.scratch if s.lives_at(launch)))

    def live_bytes(self, launch: int) -> int:
        """Bytes that live while launch ``launch`` runs, each array aligned."""
        return self._loads[launch] if 0 <= launch < len(self._loads) else 0

    @cached_property
    def _loads(self) -> tuple[int, ...]:
        """The live bytes of every launch up to the last at which something lives."""
        spans = [(p.first, p.last, p.bytes) for p in self.placed] + [(s.launch, s.launch, s.bytes) for s in self.scratch]
        change = [0] * (max((last for _, last, _ in spans), default=-1) + 2)
        for first, last, size in spans:
            change[first] += round_up(size, ALIGN)
            change[last + 1] -= round_up(size, ALIGN)
        return tuple(accumulate(change))
