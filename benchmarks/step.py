"""The demo's train step, planned and under plain ``jax.jit``: time, memory, and the cost of tracing and planning.

    python benchmarks/step.py            # writes results/step-<device>.json

Both run the same function on the same inputs, call by call in turn, and the median is taken over calls. On a CPU both run the same
XLA references, so the ratio of times is what the arena itself costs: the panels that every array is written to and read from.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
import results

import jaxarena as ja
from jaxarena.models import hybrid


def train_step_of(config: hybrid.HybridConfig) -> tuple[Any, Any]:
    optimizer = optax.adamw(1e-3)

    def train_step(params: Any, opt_state: Any, tokens: jax.Array) -> Any:
        (_, parts), gradients = jax.value_and_grad(hybrid.loss, has_aux=True)(params, tokens[:, :-1], tokens[:, 1:], config)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, parts["cross_entropy"]

    return optimizer, train_step


def step_rows(dtype: str, batch: int, length: int, calls: int) -> list[results.Row]:
    config = hybrid.HybridConfig(dtype=dtype)
    optimizer, train_step = train_step_of(config)
    params = hybrid.init(jax.random.key(0), config)
    opt_state = optimizer.init(params)
    tokens = jax.random.randint(jax.random.key(1), (batch, length + 1), 0, config.vocabulary)
    step = ja.jit(train_step)
    plan = step.plan(params, opt_state, tokens)
    planned = step.lower(plan.allocate(), params, opt_state, tokens).compile()
    plain = jax.jit(train_step).lower(params, opt_state, tokens).compile()
    arena = plan.allocate()
    ours, theirs = [], []
    for _ in range(calls):
        start = time.perf_counter()
        _, arena = jax.block_until_ready(planned(arena, params, opt_state, tokens))
        middle = time.perf_counter()
        jax.block_until_ready(plain(params, opt_state, tokens))
        ours.append(1e3 * (middle - start))
        theirs.append(1e3 * (time.perf_counter() - middle))
    (mine, spread), (plain_ms, _) = results.median_and_spread(ours[1:]), results.median_and_spread(theirs[1:])
    case = f"step train {'f32' if dtype == 'float32' else 'bf16'} demo ({batch},{length})"
    temporaries, plain_temporaries = planned.memory_analysis().temp_size_in_bytes, plain.memory_analysis().temp_size_in_bytes
    return [
        results.Row(case, "ms", mine, "xla", plain_ms, plain_ms / mine, "at least 1 / 1.15 = 0.87", spread=spread),
        results.Row(f"{case}: arena beside its bound", "bytes", plan.bytes, "bound", plan.bound, plan.bound / plan.bytes),
        results.Row(
            f"{case}: XLA temporaries",
            "bytes",
            temporaries,
            "xla",
            plain_temporaries,
            plain_temporaries / temporaries,
            "no copy of the arena",
        ),
    ]


def planning_rows(repeats: int) -> list[results.Row]:
    """Seconds to trace and plan, from a function never seen before, at 4 and at 48 layers."""
    seconds: dict[int, list[float]] = {4: [], 48: []}
    for _ in range(repeats):
        for layers, found in seconds.items():
            config = hybrid.HybridConfig(layers=layers)
            optimizer, train_step = train_step_of(config)
            params = jax.eval_shape(lambda config=config: hybrid.init(jax.random.key(0), config))
            opt_state = jax.eval_shape(optimizer.init, params)
            start = time.perf_counter()
            ja.jit(train_step).plan(params, opt_state, jax.ShapeDtypeStruct((8, 257), jnp.int32))
            found.append(time.perf_counter() - start)
    (few, _), (many, spread) = (results.median_and_spread(seconds[n]) for n in (4, 48))
    return [
        results.Row(
            "trace and plan, 48 layers beside 4",
            "s",
            many,
            "4 layers",
            few,
            few / many,
            "under 5 s, ratio at least 1 / 1.5 = 0.67",
            spread=spread,
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--calls", type=int, default=15)
    args = parser.parse_args()
    rows = planning_rows(3)
    for dtype in ("float32", "bfloat16"):
        rows += step_rows(dtype, args.batch, args.length, args.calls)
    for row in rows:
        print(f"{row.case:50} {row.ours:12.4g} {row.metric:6} {row.peer} {row.peer_value:12.4g}  {row.ratio:.3f} times")
    print(results.write("step", jax.devices()[0].platform, rows, results.device_name()))


if __name__ == "__main__":
    main()
