"""Fine-tunes a Qwen3-Next checkpoint with optax, byte by byte on the text of Python's own standard library, and writes it back.

    python examples/finetune.py --checkpoint FOLDER --out FOLDER

Only the matrices that read the residual stream into a layer are trained (``--train`` is a regular expression over parameter paths);
frozen ones take no gradient: the launches that would compute it are not in the plan. The folder is one that transformers saved
(``tests/data/qwen3_next_tiny`` is one with random weights and a vocabulary of the 256 bytes).
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import text

import jaxarena as ja
from jaxarena.models import hybrid, qwen3_next


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Trains; returns the losses, the plan, and how many parameters were trained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="folder with config.json and safetensors")
    parser.add_argument("--out", help="folder to write the tuned checkpoint to")
    parser.add_argument("--train", default="qkv|qgkv|gate_up", help="which parameters to train (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    args = parser.parse_args(argv)

    params, config = qwen3_next.load(args.checkpoint)
    if config.vocabulary < 256:
        raise ValueError(f"--checkpoint: the vocabulary must have the 256 bytes, got {config.vocabulary} tokens")
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    is_trained = [re.search(args.train, jax.tree_util.keystr(path)) is not None for path, _ in leaves]
    if not any(is_trained):
        raise ValueError(f"--train: {args.train!r} must match some parameter, such as {jax.tree_util.keystr(leaves[0][0])}")
    trained = [leaf for (_, leaf), is_one in zip(leaves, is_trained, strict=True) if is_one]
    frozen = [leaf for (_, leaf), is_one in zip(leaves, is_trained, strict=True) if not is_one]

    def joined(trained: list[Any], frozen: list[Any]) -> Any:
        one, other = iter(trained), iter(frozen)
        return jax.tree.unflatten(tree, [next(one) if is_one else next(other) for is_one in is_trained])

    optimizer = optax.adamw(args.learning_rate)
    opt_state = optimizer.init(trained)

    def train_step(trained: list[Any], opt_state: Any, frozen: list[Any], tokens: jax.Array) -> Any:
        def loss_of(trained: list[Any]) -> jax.Array:
            return hybrid.loss(joined(trained, frozen), tokens[:, :-1], tokens[:, 1:], config)[0]

        loss, gradients = jax.value_and_grad(loss_of)(trained)
        updates, opt_state = optimizer.update(gradients, opt_state, trained)
        return optax.apply_updates(trained, updates), opt_state, loss

    batch_of = text.batches(text.load_standard_library().train, seed=0, batch=args.batch, length=args.length + 1)
    step = ja.jit(train_step, donate_argnums=(0, 1))
    plan = step.plan(trained, opt_state, frozen, jnp.asarray(batch_of(0), jnp.int32))
    print(str(plan).splitlines()[0])
    arena, losses = plan.allocate(), []
    for n in range(args.steps):
        (trained, opt_state, loss), arena = step(arena, trained, opt_state, frozen, jnp.asarray(batch_of(n), jnp.int32))
        losses.append(float(loss))
    count = sum(leaf.size for leaf in trained)
    print(f"{count:,} of {hybrid.parameter_count(params):,} parameters trained; loss {losses[0]:.4f} at first, {losses[-1]:.4f} at the end")
    if args.out:
        qwen3_next.save(args.out, joined(trained, frozen), config)
        print(f"written to {args.out}")
    return {"losses": losses, "plan": plan, "trained": count}


if __name__ == "__main__":
    main()
