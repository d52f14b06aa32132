"""Trains a small hybrid language model, byte by byte, on the text of Python's own standard library, through a planned arena, and lets it
write some more.

    python examples/train_text.py                    # train, evaluate, write the plan's picture and a checkpoint, sample
    python examples/train_text.py --resume           # go on from the checkpoint: the same losses, bit for bit

Everything but the step is what a JAX user writes anyway: a loss, optax, a loop.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import text
from tqdm import tqdm

import jaxarena as ja
from jaxarena.models import hybrid

WINDOW = 1024
"""Bytes of a held-out window; the first is given."""

PROMPT = b"def __init__(self"
"""What sampling goes on from."""


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Runs the demo; returns what it printed (losses in nats a byte, bits a byte held out, the baselines, what it wrote), and the plan."""
    args = parse(argv)
    out = Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    config = hybrid.HybridConfig(layers=args.layers, width=args.width, dtype=args.dtype)
    optimizer, train_step = training(config, args.steps, args.learning_rate)
    data = text.load_standard_library()
    windows = text.held_out_windows(data.held_out, args.windows, WINDOW)
    baselines = text.baselines(data.train, windows)
    batch_of = text.batches(data.train, seed=args.seed, batch=args.batch, length=args.length + 1)

    params = jax.jit(hybrid.init, static_argnums=1)(jax.random.key(args.seed), config)
    opt_state = jax.jit(optimizer.init)(params)
    print(f"{hybrid.parameter_count(params):,} parameters; {len(data.train):,} bytes to train on, {len(data.held_out):,} held out")

    def generate(params: Any, cache: hybrid.Cache, tokens: jax.Array, key: jax.Array) -> tuple[jax.Array, hybrid.Cache]:
        logits, cache = hybrid.extend(params, cache, tokens, config)
        return ja.ops.sample(logits, jax.random.fold_in(key, cache.lengths[0]), temperature=0.7, top_k=40)[:, None], cache

    # Sampling runs in the arena that training used: one form is active at a time.
    program = ja.Program(
        train=ja.jit(train_step, donate_argnums=(0, 1), storage=args.storage),
        prefill=ja.jit(generate, donate_argnums=1),
        decode=ja.jit(generate, donate_argnums=1),
    )
    prompt = np.frombuffer(PROMPT, np.uint8)[None]
    cache, key = hybrid.create_cache(config, 1, len(PROMPT) + args.sample), jax.random.key(args.seed)
    plans = program.plan(
        train=(params, opt_state, tokens_of(batch_of(0))),
        prefill=(params, cache, tokens_of(prompt), key),
        decode=(params, cache, tokens_of(prompt[:, :1]), key),
    )
    print(plans)
    plan = plans["train"]
    print_plan(plan, out)

    first, losses = 0, []
    if args.resume:
        params, opt_state, first = load(out, params, opt_state)
        print(f"resumed at step {first}")
    last = args.steps if args.stop is None else min(args.stop, args.steps)
    arena = plans.allocate()
    started = time.perf_counter()
    with tqdm(range(first, last), initial=first, total=args.steps, desc="training", disable=args.quiet) as bar:
        for n in bar:
            (params, opt_state, loss), arena = program.train(arena, params, opt_state, tokens_of(batch_of(n)))
            losses.append(float(loss))
            bar.set_postfix_str(f"{losses[-1] / math.log(2):.3f} bits/byte")
    save(out, params, opt_state, last)
    print(f"steps {first} to {last} in {time.perf_counter() - started:.0f} s; checkpoint in {out / 'checkpoint'}")

    held_out = evaluate(params, windows, config)
    print(f"bits per byte on the same {windows.size - len(windows):,} held-out bytes, given the first of each {WINDOW}-byte window:")
    for name, bits in (
        ("this model", held_out),
        ("zlib -9 on each window", baselines.zlib),
        ("bigram, smoothed", baselines.bigram),
        ("unigram", baselines.unigram),
    ):
        print(f"  {name:24}{bits:6.3f}")
    written = []
    (token, cache), arena = program.prefill(arena, params, cache, tokens_of(prompt), key)
    for _ in range(args.sample):
        written.append(int(token[0, 0]))
        (token, cache), arena = program.decode(arena, params, cache, token, key)
    if written:
        print(f"after {PROMPT.decode()!r} it writes:\n{PROMPT.decode()}{bytes(written).decode(errors='replace')}")
    return {
        "losses": losses,
        "held_out": held_out,
        "baselines": baselines._asdict(),
        "written": bytes(written),
        "params": params,
        "plan": plan,
    }


def training(config: hybrid.HybridConfig, steps: int, learning_rate: float) -> tuple[Any, Callable[..., Any]]:
    """The optimizer and the train step, of a run of ``steps``."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, learning_rate, steps // 10, steps), b2=0.95, weight_decay=0.01),
    )

    def train_step(params: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        (_, parts), gradients = jax.value_and_grad(hybrid.loss, has_aux=True)(params, tokens[:, :-1], tokens[:, 1:], config)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, parts["cross_entropy"]

    return optimizer, train_step


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="demo", help="folder for the checkpoint and the plan's picture (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--steps", type=int, default=150, help="length of the whole run, which sets the learning rate's schedule")
    parser.add_argument("--stop", type=int, help="stop after this step, to be resumed")
    parser.add_argument("--batch", type=int, default=4, help="sequences a step")
    parser.add_argument("--length", type=int, default=512, help="bytes a sequence")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--storage", choices=("bf16", "int8", "int8x2"), help="of arrays kept for the backward pass (default: as they are)")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--windows", type=int, default=64, help="held-out windows to evaluate on")
    parser.add_argument("--sample", type=int, default=256, help="bytes to write at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args(argv)


def tokens_of(batch: np.ndarray) -> jax.Array:
    return jnp.asarray(batch, jnp.int32)


def print_plan(plan: ja.Plan, out: Path) -> None:
    """The plan's first lines; all of it, and the pictures, go to ``out``."""
    lines = str(plan).splitlines()
    (out / "plan.txt").write_text("\n".join(lines) + "\n")
    plan.save(out / "plan.html")
    with contextlib.suppress(ImportError):  # without matplotlib there is the HTML picture
        plan.save(out / "plan.png")
    print("\n".join(lines[:20]))
    print(f"... the whole plan: {out / 'plan.txt'}; its picture: {out / 'plan.html'}")


def evaluate(params: Any, windows: np.ndarray, config: hybrid.HybridConfig) -> float:
    """Bits a byte over ``windows``, uint8 [count, length], a few at a time."""
    few = math.gcd(len(windows), 8)

    def nats(params: Any, tokens: jax.Array) -> jax.Array:
        return hybrid.loss(params, tokens[:, :-1], tokens[:, 1:], config)[1]["cross_entropy"]

    step = ja.jit(nats)
    arena = step.plan(params, tokens_of(windows[:few])).allocate()
    total = 0.0
    for start in range(0, len(windows), few):
        loss, arena = step(arena, params, tokens_of(windows[start : start + few]))
        total += float(loss) * few
    return total / len(windows) / math.log(2)


def save(out: Path, params: Any, opt_state: Any, step: int) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(out / "checkpoint", {"params": params, "opt_state": opt_state, "step": step}, force=True)


def load(out: Path, params: Any, opt_state: Any) -> tuple[Any, Any, int]:
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(out / "checkpoint", {"params": params, "opt_state": opt_state, "step": 0})
    return state["params"], state["opt_state"], int(state["step"])


if __name__ == "__main__":
    main()
