"""``python -m jaxarena plan``: the memory plan of a step from the shapes of its arguments; compiles nothing and needs no GPU.

An argument is written as its dtype and shape, ``f32[8,128]`` or ``i32[]``. What is no single array (parameters, an optimizer's state) comes
from a function without arguments, named by ``--args-from``, that returns the tuple of all arguments, arrays or ``jax.ShapeDtypeStruct``.
"""

from __future__ import annotations

import argparse
import importlib
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxarena.report.units import human
from jaxarena.step import Step, jit
from jaxarena.storage import DTYPE_OF_STORAGE

__all__ = ["add"]

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def add(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Adds the command's arguments; returns what runs it."""
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="what would be given to jaxarena.jit, or a step that it made")
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--args", nargs="+", default=[], metavar="DTYPE[SHAPE]", help="the arguments, such as f32[8,128] i32[8]")
    given.add_argument("--args-from", metavar="MODULE:FUNCTION", help="a function that returns the tuple of arguments")
    parser.add_argument("--donate", nargs="+", type=int, default=[], metavar="N", help="positions of arguments that may be overwritten")
    parser.add_argument("--memory", metavar="SIZE", help="of the device, such as 80GB or 141GiB: exit status 1 if the step needs more")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the plan: .html, .png or .json")
    return run


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan, and what the step needs in all; 1 when that is more than ``--memory``."""
    function = _named(arguments.function)
    step = function if isinstance(function, Step) else jit(function, donate_argnums=arguments.donate)
    args = tuple(map(_shape, arguments.args)) if arguments.args_from is None else _named(arguments.args_from)()
    if not isinstance(args, tuple):
        raise TypeError(f"--args-from {arguments.args_from} must return a tuple of arguments, got {type(args).__name__}")
    plan = step.plan(*args)
    print(plan)
    inputs = _bytes(args)
    donated = _bytes([args[n] for n in step.donated])
    outputs = _bytes(step.result_shapes(*args))
    # What is donated can hold results.
    needs = inputs + max(outputs - donated, 0) + plan.bytes + plan.xla_bytes
    print("\nThe step needs:")
    for name, size in (
        ("arguments", inputs),
        ("of them donated", donated),
        ("results", outputs),
        ("arena", plan.bytes),
        ("XLA temporaries, estimated", plan.xla_bytes),
        ("in all", needs),
    ):
        print(f"  {name:<28}{human(size):>10}  ({size:,} bytes)")
    if arguments.out is not None:
        plan.save(arguments.out)
    if arguments.memory is None:
        return 0
    memory = _size(arguments.memory)
    fits = needs <= memory
    print(f"  {'fits' if fits else 'does not fit'} in {human(memory)}: {human(abs(memory - needs))} {'to spare' if fits else 'too much'}")
    return int(not fits)


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"a function must be named MODULE:FUNCTION, got {name!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules of the working directory, as python -c and python -m find them
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{name!r}: {found!r} has no {part!r}")
        found = getattr(found, part)
    return found


def _shape(text: str) -> jax.ShapeDtypeStruct:
    match = re.fullmatch(r"(\w+)\[([\d,]*)\]", text)
    if not match or match[1] not in DTYPE_OF_STORAGE:
        raise ValueError(f"--args: must be a dtype ({', '.join(DTYPE_OF_STORAGE)}) and a shape such as f32[8,128], got {text!r}")
    return jax.ShapeDtypeStruct(tuple(int(n) for n in match[2].split(",") if n), DTYPE_OF_STORAGE[match[1]])


def _size(text: str) -> int:
    match = re.fullmatch(r"([\d.]+) ?(\w*)", text)
    if not match or match[2] not in _UNITS:
        raise ValueError(f"--memory: must be a number of bytes, or one with a unit ({', '.join(filter(None, _UNITS))}), got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def _bytes(tree: Any) -> int:
    leaves = [jax.typeof(leaf) if not hasattr(leaf, "dtype") else leaf for leaf in jax.tree.leaves(tree)]
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves if hasattr(leaf.dtype, "itemsize"))
