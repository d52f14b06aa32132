"""What keeping arrays for the backward pass in words costs and saves: the demo trained with each storage, the same steps.

    python benchmarks/storage.py            # writes results/storage-<device>.json

On a CPU, in a minute or two:

    python benchmarks/storage.py --seeds 4 --steps 40 --last 10 --layers 4 --width 64 --batch 2 --length 64

One run's loss moves by a few percent with any change of rounding, more than the storages should cost. So runs are paired: each seed
has its data and its initial weights, which every storage trains from, and what is compared is the loss of a seed beside the same
seed's loss with bf16. The mean over seeds comes with its standard error: a mean within the target says little where that is larger.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import results

import jaxarena as ja
from jaxarena.models import hybrid

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import text
import train_text

TARGETS = {"int8x2": "within 0.1 %", "int8": "within 1 %"}


class Demo:
    """The demo's train step with one storage, planned; it is compiled once for all seeds."""

    def __init__(self, args: argparse.Namespace, dtype: str, storage: str | None):
        config = hybrid.HybridConfig(layers=args.layers, width=args.width, dtype=dtype)
        optimizer, train_step = train_text.training(config, args.steps, args.learning_rate)

        def init(key: jax.Array) -> tuple[Any, Any]:
            params = hybrid.init(key, config)
            return params, optimizer.init(params)

        self.args = args
        self.init = jax.jit(init)
        self.step = ja.jit(train_step, donate_argnums=(0, 1), storage=storage)
        tokens = jax.ShapeDtypeStruct((args.batch, args.length + 1), jnp.int32)
        self.plan = self.step.plan(*jax.eval_shape(init, jax.random.key(0)), tokens)

    def losses(self, data: text.Bytes) -> list[float]:
        """The loss of each seed in bits a byte: the mean of the last steps."""
        found, arena = [], self.plan.allocate()
        for seed in range(self.args.seeds):
            batch_of = text.batches(data, seed=seed, batch=self.args.batch, length=self.args.length + 1)
            params, opt_state = self.init(jax.random.key(seed))
            losses = []
            for n in range(self.args.steps):
                (params, opt_state, loss), arena = self.step(arena, params, opt_state, train_text.tokens_of(batch_of(n)))
                losses.append(loss)
            found.append(statistics.fmean(map(float, losses[-self.args.last :])) / math.log(2))
        return found


def byte_rows(case: str, peer: str, plain: ja.Plan, storage: str, plan: ja.Plan) -> list[results.Row]:
    kept = plan.kept_bytes[storage]
    as_is = kept + plan.saved_bytes
    return [
        results.Row(f"{case}: those arrays", "bytes", kept, peer, as_is, as_is / kept),
        results.Row(f"{case}: arena", "bytes", plan.bytes, peer, plain.bytes, plain.bytes / plan.bytes),
    ]


def loss_rows(case: str, ours: list[float], bf16: list[float], target: str) -> list[results.Row]:
    percent = [100 * (mine / theirs - 1) for mine, theirs in zip(ours, bf16, strict=True)]
    mine, theirs = statistics.fmean(ours), statistics.fmean(bf16)
    error = statistics.stdev(percent) / math.sqrt(len(percent))
    return [
        results.Row(case, "bits/byte", mine, "kept in bf16", theirs, theirs / mine),
        results.Row(f"{case}: above bf16's, mean of pairs", "%", statistics.fmean(percent), target=target),
        results.Row(f"{case}: above bf16's, standard error", "%", error),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4, help="at least 2, for a standard error")
    parser.add_argument("--steps", type=int, default=80, help="of each run")
    parser.add_argument("--last", type=int, default=20, help="steps at the end whose loss is averaged")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error(f"--seeds {args.seeds}: a standard error needs at least 2")
    size = f"{args.layers} layers of {args.width} ({args.batch},{args.length})"
    data = text.load_standard_library().train
    rows = []
    for dtype, name, storages in (("float32", "f32", ("bf16", *TARGETS)), ("bfloat16", "bf16", ("int8",))):
        plain = Demo(args, dtype, None).plan
        for storage in storages:
            rows += byte_rows(f"demo {name} {size}, kept in {storage}", f"kept in {name}", plain, storage, Demo(args, dtype, storage).plan)
    losses = {}
    for storage in ("bf16", *TARGETS):
        losses[storage] = Demo(args, "float32", storage).losses(data)
        print(f"kept in {storage}, bits/byte of each seed:", *(f"{loss:.4f}" for loss in losses[storage]), flush=True)
    for storage, target in TARGETS.items():
        case = f"demo f32 {size}, kept in {storage}: loss of the last {args.last} of {args.steps} steps, {args.seeds} seeds"
        rows += loss_rows(case, losses[storage], losses["bf16"], target)
    print(results.write("storage", jax.devices()[0].platform, rows, results.device_name()))


if __name__ == "__main__":
    main()
