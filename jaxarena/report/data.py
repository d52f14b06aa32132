"""Plans as plain data: frozen dataclasses and named tuples to and from what ``json`` writes, driven by their type hints."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

__all__ = ["from_plain", "to_plain"]


def to_plain(value: Any) -> Any:
    """Dataclasses as dicts of the fields that their constructor takes, tuples as lists, sets as sorted lists."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, tuple):
        return [to_plain(v) for v in value]
    if isinstance(value, frozenset):
        return sorted(to_plain(v) for v in value)
    return value


def from_plain(kind: Any, data: Any) -> Any:
    """The value of type ``kind`` that :func:`to_plain` wrote as ``data``.

    Raises:
      TypeError: when a dataclass lacks a field or has one that is unknown.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Union or origin is types.UnionType:
        inner = [a for a in args if a is not type(None)]
        return None if data is None else from_plain(inner[0], data)
    if origin is tuple:
        kinds = [args[0]] * len(data) if len(args) == 2 and args[1] is Ellipsis else args
        return tuple(from_plain(k, d) for k, d in zip(kinds, data, strict=True))
    if origin is frozenset:
        return frozenset(from_plain(args[0], d) for d in data)
    if dataclasses.is_dataclass(kind):
        hints: dict[str, Any] = typing.get_type_hints(kind)
        make: Any = kind
        if unknown := data.keys() - hints.keys():
            raise TypeError(f"{make.__name__} has no field {min(unknown)!r}")
        return make(**{name: from_plain(hints[name], d) for name, d in data.items()})
    if isinstance(kind, type) and issubclass(kind, tuple):
        hints = typing.get_type_hints(kind)
        return kind(*(from_plain(k, d) for k, d in zip(hints.values(), data, strict=True)))
    return data
