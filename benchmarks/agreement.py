"""The hybrid model beside transformers' Qwen3-Next, on a small checkpoint with random weights, in float32.

    python benchmarks/agreement.py            # writes results/agreement-<device>.json

The checkpoint and what transformers 5.24.0 (torch 2.13.0, CPU) computes from it are in tests/data/qwen3_next_tiny. A difference of
logits is the largest one over the largest magnitude; of gradient norms, the largest relative one over all tensors.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import results

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxarena.models import hybrid, qwen3_next

TINY = Path(__file__).parents[1] / "tests" / "data" / "qwen3_next_tiny"
PREFILL = 66


def main() -> None:
    params, config = qwen3_next.load(TINY)
    with np.load(TINY / "expected.npz") as data:
        expected = dict(data)
    tokens = jnp.asarray(expected["input_ids"])

    def row(case: str, difference: float, target: str) -> results.Row:
        print(f"{case}: {difference:.2e}", flush=True)
        return results.Row(f"Qwen3-Next beside transformers: {case}", "difference", difference, target=target)

    def off(actual: Any, wanted: Any) -> float:
        return float(np.abs(np.asarray(actual) - wanted).max() / np.abs(wanted).max())

    full = jax.jit(functools.partial(hybrid.logits, config=config))(params, tokens)
    extend = jax.jit(functools.partial(hybrid.extend, config=config), donate_argnums=1)
    last, cache = extend(params, hybrid.create_cache(config, *tokens.shape), tokens[:, :PREFILL])
    decoded = [last]
    for n in range(PREFILL, tokens.shape[1]):
        last, cache = extend(params, cache, tokens[:, n : n + 1])
        decoded.append(last)

    def loss_of(params: Any) -> jax.Array:
        return hybrid.loss(params, tokens[:, :-1], tokens[:, 1:], config)[0]

    loss, gradients = jax.jit(jax.value_and_grad(loss_of))(params)
    ours = qwen3_next.tensors_of(gradients, config)
    norms = json.loads((TINY / "grad_norms.json").read_text())
    wrong = max((abs(float(jnp.linalg.norm(ours[name].ravel())) / norm - 1), name) for name, norm in norms.items())
    rows = [
        row("logits of a full pass", off(full, expected["logits"]), "2e-5"),
        row("logits of a prefill and four decoded tokens", off(jnp.stack(decoded, axis=1), expected["decode_logits"]), "2e-5"),
        row("loss", abs(float(loss) / float(expected["loss"]) - 1), "1e-5"),
        row(f"gradient norms, the furthest of {len(norms)} ({wrong[1]})", wrong[0], "1e-4"),
    ]
    device = "cpu" if jax.default_backend() == "cpu" else "gpu"
    print(results.write("agreement", device, rows, results.device_name()))


if __name__ == "__main__":
    main()
