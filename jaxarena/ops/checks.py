"""Argument checks shared by the ops: they run at trace time, before any launch, and say what to do next.

Every message has one form, ``<op>: <argument> must <what is supported>, got <what was passed>``. A wrong type or dtype raises
``TypeError``, a wrong rank, size or value ``ValueError``. Nothing here touches an array's values, so a check costs nothing when
a step runs.

:func:`vary_together` is the one adjustment an op makes to its arguments: it lets the op's gradient work under ``jax.shard_map``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

__all__ = [
    "check_axis",
    "check_choice",
    "check_finite",
    "check_float",
    "check_float32",
    "check_int",
    "check_ndim",
    "check_nonnegative",
    "check_positive_int",
    "check_same_dtype",
    "check_same_shape",
    "check_shape",
    "vary_together",
]


def _dtype(op: str, name: str, array: Any) -> Any:
    dtype = getattr(array, "dtype", None)
    if dtype is None or not hasattr(array, "shape"):
        raise TypeError(f"{op}: {name} must be an array, got {type(array).__name__} {array!r}: wrap it in jnp.asarray")
    return dtype


def check_float(op: str, name: str, array: Any) -> None:
    """``array`` is bfloat16 or float32."""
    dtype = _dtype(op, name, array)
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise TypeError(f"{op}: {name} must be bfloat16 or float32, got {dtype}: cast it with {name}.astype(jnp.float32)")


def check_float32(op: str, name: str, array: Any) -> None:
    """``array`` is float32: what decides how exact a state, a router or a loss is."""
    check_float(op, name, array)
    if array.dtype != jnp.float32:
        raise TypeError(f"{op}: {name} must be float32, got {array.dtype}: cast it with {name}.astype(jnp.float32)")


def check_int(op: str, name: str, array: Any) -> None:
    """``array`` is int32: 64-bit indices are refused, so that a step is the same with ``jax_enable_x64`` on and off."""
    dtype = _dtype(op, name, array)
    if dtype != jnp.int32:
        raise TypeError(f"{op}: {name} must be int32, got {dtype}: cast it with {name}.astype(jnp.int32)")


def check_same_dtype(op: str, name: str, array: Any, other_name: str, other: Any) -> None:
    """``array`` has the dtype of ``other``, as the two sides of a product must."""
    if array.dtype != other.dtype:
        raise TypeError(
            f"{op}: {name} must have the dtype of {other_name}, {other.dtype}, got {array.dtype}: "
            f"cast it with {name}.astype({other_name}.dtype)"
        )


def check_ndim(op: str, name: str, array: Any, axes: str) -> None:
    """``array`` has the axes listed in ``axes``, e.g. ``"batch time width"``; a leading ``...`` stands for any number of axes."""
    names = axes.split()
    leading = names[0] == "..."
    least = len(names) - leading
    if array.ndim < least or (array.ndim > least and not leading):
        raise ValueError(f"{op}: {name} must have shape ({', '.join(names)}), got shape {tuple(array.shape)}")


def check_axis(op: str, name: str, array: Any, axis: int, size: int, why: str) -> None:
    """Axis ``axis`` of ``array`` has ``size`` elements; ``why`` says what it has to match, e.g. ``"the last axis of x"``."""
    if array.shape[axis] != size:
        raise ValueError(f"{op}: {name} must have {size} elements along axis {axis} ({why}), got shape {tuple(array.shape)}")


def check_shape(op: str, name: str, array: Any, shape: Sequence[int], why: str) -> None:
    """``array`` has exactly ``shape``; ``why`` says where that shape comes from."""
    if tuple(array.shape) != tuple(shape):
        raise ValueError(f"{op}: {name} must have shape {tuple(shape)} ({why}), got shape {tuple(array.shape)}")


def check_same_shape(op: str, name: str, array: Any, other_name: str, other: Any) -> None:
    """``array`` has the shape of ``other``: ops do not broadcast."""
    check_shape(op, name, array, other.shape, f"the shape of {other_name}")


def check_choice(op: str, name: str, value: Any, choices: Sequence[Any]) -> None:
    """``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_positive_int(op: str, name: str, value: Any) -> None:
    """``value`` is a Python int of at least 1, known when the step is traced."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a Python int, got {type(value).__name__} {value!r}")
    if value < 1:
        raise ValueError(f"{op}: {name} must be at least 1, got {value}")


def check_finite(op: str, name: str, value: Any) -> None:
    """``value`` is a finite Python number, known when the step is traced."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a Python number, got {type(value).__name__} {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{op}: {name} must be finite, got {value}")


def check_nonnegative(op: str, name: str, value: Any) -> None:
    """``value`` is a finite Python number of at least 0, known when the step is traced."""
    check_finite(op, name, value)
    if value < 0:
        raise ValueError(f"{op}: {name} must be at least 0, got {value}")


def vary_together(*arrays: Any) -> tuple[Any, ...]:
    """Marks every array as varying over the mesh axes that any of them varies over; outside ``jax.shard_map``, nothing to do.

    Arguments may be pytrees, and None. A ``jax.custom_vjp`` must return gradients of its arguments' own types. The gradient of a weight
    which is the same on every device, from activations which are not, varies; once the weight is cast before the rule, JAX's transpose
    of that cast sums the gradient over the devices. So an op calls this on its arguments just before its ``jax.custom_vjp`` function.
    """
    leaves, tree = jax.tree.flatten(arrays)
    varying = [jax.typeof(a).manual_axis_type.varying for a in leaves]
    union = frozenset[Any]().union(*varying)
    missing = [tuple(sorted(union - own, key=str)) for own in varying]
    moved = [jax.lax.pcast(a, axes, to="varying") if axes else a for a, axes in zip(leaves, missing, strict=True)]
    together: tuple[Any, ...] = jax.tree.unflatten(tree, moved)
    return together
