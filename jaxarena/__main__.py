"""``python -m jaxarena COMMAND``: the command line, a subcommand a job.

A subcommand is a function that adds its arguments to its parser and gives the function to run, which returns the exit status.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxarena import plan_command, tune_command
from jaxarena.planner import NODES, faults, minimalloc, solve

__all__ = ["main"]

Run = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (of this process where None) and returns the exit status: 2 for what is wrong with the line or a file."""
    parser = argparse.ArgumentParser(prog="python -m jaxarena", description="jaxarena's tools.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (add, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        command.set_defaults(run=add(command))
    parsed = parser.parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"python -m jaxarena: {error}", file=sys.stderr)
        return 2
    return status


def add_place(parser: argparse.ArgumentParser) -> Run:
    parser.add_argument("file", type=Path, help="CSV with columns id, lower, upper, size; optionally alignment, offset (minimalloc's)")
    parser.add_argument("--capacity", type=int, metavar="BYTES", help="stop at the first placement that fits; exit status 1 without one")
    parser.add_argument("--alignment", type=int, default=1, metavar="BYTES", help="of offsets, where the file has none (1)")
    parser.add_argument("--nodes", type=int, default=NODES, metavar="N", help=f"the search's budget ({NODES})")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the CSV with offsets")
    return run_place


def run_place(arguments: argparse.Namespace) -> int:
    intervals = minimalloc.read(arguments.file, alignment=arguments.alignment)
    start = time.perf_counter()
    solution = solve(intervals, nodes=arguments.nodes, capacity=arguments.capacity)
    seconds = time.perf_counter() - start
    wrong = faults(intervals, solution.offsets)
    if wrong:
        raise AssertionError(f"the placement is wrong, which is a fault of jaxarena: {'; '.join(wrong)}")
    print(f"intervals  {len(intervals)}")
    print(f"peak       {solution.peak} bytes")
    print(f"bound      {solution.bound} bytes")
    print(f"ratio      {solution.peak / max(solution.bound, 1):.4f}")
    print(f"verdict    {solution.verdict}")
    print(f"nodes      {solution.nodes}")
    print(f"seconds    {seconds:.2f}")
    if arguments.out is not None:
        minimalloc.write(arguments.out, intervals, solution.offsets)
    return int(arguments.capacity is not None and solution.peak > arguments.capacity)


COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], Run], str]] = {
    "place": (add_place, "Gives the intervals of a file offsets in as few bytes as possible."),
    "plan": (plan_command.add, "Prints the memory plan of a step, from shapes alone."),
    "tune": (tune_command.add, "Finds the fastest configs of products on the GPU at hand."),
}


if __name__ == "__main__":
    sys.exit(main())
