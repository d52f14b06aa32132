"""The planner on public instances and on random arrays: peak beside largest-first's and the bound, nodes, seconds.

    python benchmarks/placement.py            # writes results/placement-cpu.json

Seconds are of this process' CPU time, normalising included. A row in bytes has the bound as its roofline.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import results

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxarena.planner import Interval, Solution, bound, faults, solve
from jaxarena.planner.first_fit import first_fit, ordered
from jaxarena.planner.items import FREE, normalise
from tests.planner.problems import GRAPHS, MINIMALLOC, instance, random_intervals

CAPACITY = 1_048_576
TARGETS = {"C": "at the bound", "D": "at most 1029120", "J": "at most 1035264", "pangu_2.6B": "at most 1.005 times the bound"}
KINDS = ("any", "short", "long", "geometric", "skewed")


def timed(intervals: Sequence[Interval], capacity: int | None = None) -> tuple[Solution, float]:
    """The planner's answer, checked, and its CPU seconds."""
    start = time.process_time()
    solution = solve(intervals, capacity=capacity)
    seconds = time.process_time() - start
    if wrong := faults(intervals, solution.offsets):
        raise AssertionError("; ".join(wrong))
    return solution, seconds


def largest_first(intervals: Sequence[Interval]) -> int:
    items = normalise(intervals)
    offsets = first_fit(items, ordered(items, "size"), np.full(len(items), FREE))
    return int((offsets + items.size).max()) * items.unit


def measure(case: str, intervals: Sequence[Interval], target: str, seconds_target: str) -> tuple[Solution, list[results.Row]]:
    solution, seconds = timed(intervals)
    peer = largest_first(intervals)
    return solution, [
        results.Row(case, "bytes", solution.peak, "largest first", peer, peer / solution.peak, target, bound(intervals)),
        results.Row(f"{case}: {solution.verdict}, nodes", "nodes", solution.nodes),
        results.Row(f"{case}: seconds", "s", seconds, target=seconds_target),
    ]


def main() -> None:
    rows: list[results.Row] = []
    shares, until_capacity = [], 0.0
    for name in MINIMALLOC:
        intervals = instance(name)
        case = f"place minimalloc {name} ({len(intervals)})"
        solution, found = measure(case, intervals, TARGETS.get(name, "at the bound"), "")
        fits, seconds = timed(intervals, CAPACITY)
        rows += [*found, results.Row(f"{case}: to {CAPACITY} bytes", "s", seconds, target="fits, under 5")]
        if fits.peak > CAPACITY:
            raise AssertionError(f"{case} was not found to fit in {CAPACITY} bytes: {fits.peak}")
        shares.append(bound(intervals) / solution.peak)
        until_capacity += seconds
        print(case, solution.peak, solution.verdict, solution.nodes, f"{found[-1].ours:.2f} s; to capacity {seconds:.2f} s", flush=True)
    rows.append(results.Row("place minimalloc: mean of bound over peak", "share", sum(shares) / len(shares), target="above 0.992"))
    rows.append(results.Row("place minimalloc: all to capacity", "s", until_capacity, target="under 20"))
    for name in GRAPHS:
        intervals = instance(name)
        solution, found = measure(f"place {name} ({len(intervals)})", intervals, TARGETS.get(name, "at the bound"), "under 20")
        rows += found
        print(name, solution.peak, solution.verdict, solution.nodes, f"{found[-1].ours:.2f} s", flush=True)
    for kind in KINDS:
        intervals = random_intervals(kind, 10_000)
        solution, found = measure(f"place random {kind} (10000)", intervals, "at most 1.02 times the bound", "under 10")
        rows += found
        print(kind, solution.peak / solution.bound, solution.verdict, f"{found[-1].ours:.2f} s", flush=True)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows.append(results.Row("place: most memory of all of these in one process, JAX imported", "MiB", memory, target="under 500"))
    print(results.write("placement", "cpu", rows, results.device_name()))


if __name__ == "__main__":
    main()
