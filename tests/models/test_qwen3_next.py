"""Qwen3-Next checkpoints: a small one with what transformers computes from it (tests/data/qwen3_next_tiny), read, run and written back.

Made with transformers 5.24.0 and torch 2.13.0 on a CPU in float32, with random weights: ``expected.npz`` has input_ids, the logits of a
full pass and of a prefill of 66 tokens with four decoded after it, and the loss; ``grad_norms.json`` the 2-norm of the loss's gradient for
every tensor.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file, save_file

import jaxarena as ja
from jaxarena.models import hybrid, qwen3_next

TINY = Path(__file__).parents[1] / "data" / "qwen3_next_tiny"


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, hybrid.HybridConfig, dict[str, np.ndarray]]:
    params, config = qwen3_next.load(TINY)
    with np.load(TINY / "expected.npz") as data:
        return params, config, dict(data)


def off(actual: Any, expected: Any) -> float:
    """The largest difference, of the expected values' largest magnitude."""
    return float(np.abs(np.asarray(actual) - expected).max() / np.abs(expected).max())


def test_a_full_pass(tiny: Any) -> None:
    params, config, expected = tiny
    step = ja.jit(functools.partial(hybrid.logits, config=config))
    tokens = jnp.asarray(expected["input_ids"])
    logits, _ = step(step.plan(params, tokens).allocate(255), params, tokens)
    assert off(logits, expected["logits"]) < 2e-5


def test_prefill_then_decode(tiny: Any) -> None:
    params, config, expected = tiny
    tokens = jnp.asarray(expected["input_ids"])
    extend = jax.jit(functools.partial(hybrid.extend, config=config), donate_argnums=1)
    logits, cache = extend(params, hybrid.create_cache(config, 2, 70), tokens[:, :66])
    out = [logits]
    for n in range(66, 70):
        logits, cache = extend(params, cache, tokens[:, n : n + 1])
        out.append(logits)
    assert off(jnp.stack(out, axis=1), expected["decode_logits"]) < 2e-5


@pytest.mark.slow
def test_loss_and_gradient_norms(tiny: Any) -> None:
    params, config, expected = tiny
    tokens = jnp.asarray(expected["input_ids"])

    def loss_of(params: Any) -> jax.Array:
        return hybrid.loss(params, tokens[:, :-1], tokens[:, 1:], config)[0]

    # Some of these gradients are what is left of larger terms: XLA's optimizations, which only the slow tests have, round them less often.
    loss, gradients = jax.jit(jax.value_and_grad(loss_of))(params)
    chex.assert_trees_all_close(loss, jnp.float32(expected["loss"]), rtol=1e-5)
    norms = json.loads((TINY / "grad_norms.json").read_text())
    ours = qwen3_next.tensors_of(gradients, config)
    assert ours.keys() == norms.keys()
    for name, norm in norms.items():
        assert abs(float(jnp.linalg.norm(ours[name].ravel())) - norm) < 1e-4 * norm, name


@pytest.mark.parametrize("max_shard_bytes", [10**9, 300_000])
def test_written_back_bit_for_bit(tiny: Any, tmp_path: Path, max_shard_bytes: int) -> None:
    params, config, _ = tiny
    qwen3_next.save(tmp_path, params, config, max_shard_bytes=max_shard_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 3) == (max_shard_bytes == 300_000) == (tmp_path / "model.safetensors.index.json").exists()
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    original = load_file(TINY / "model.safetensors")
    chex.assert_trees_all_equal(dict(sorted(written.items())), dict(sorted(original.items())), strict=True)
    again, config_again = qwen3_next.load(tmp_path)
    assert config_again == config
    chex.assert_trees_all_equal(again, params, strict=True)
    theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in (TINY, tmp_path))
    assert {k: theirs[k] for k in ours if k not in ("architectures", "dtype")} == {
        k: v for k, v in ours.items() if k not in ("architectures", "dtype")
    }


def test_experts_one_by_one(tiny: Any, tmp_path: Path) -> None:
    """As the published checkpoint has them, in bfloat16."""
    params, config, _ = tiny
    tensors = {name: t.astype(jnp.bfloat16) for name, t in load_file(TINY / "model.safetensors").items()}
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up = jnp.split(tensors.pop(f"{prefix}.gate_up_proj"), 2, axis=1)
        down = tensors.pop(f"{prefix}.down_proj")
        for e in range(config.experts):
            for kind, stacked in (("gate", gate), ("up", up), ("down", down)):
                tensors[f"{prefix}.{e}.{kind}_proj.weight"] = stacked[e]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((TINY / "config.json").read_text())
    loaded, _ = qwen3_next.load(tmp_path, dtype="bfloat16")
    chex.assert_trees_all_equal(loaded, jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32), params), strict=True)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    config = json.loads((TINY / "config.json").read_text())

    def written(**changes: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        return tmp_path

    for changes, message in (
        ({"model_type": "qwen3"}, "config.json's model_type must be 'qwen3_next', got 'qwen3'"),
        ({"norm_topk_prob": False}, "norm_topk_prob must be True, got False"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types must be"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "must be 'default', got 'yarn'"),
        ({"num_hidden_layers": 6, "layer_types": None}, "layer_types must be"),
    ):
        with pytest.raises(ValueError, match=message):
            qwen3_next.load(written(**changes))
    with pytest.raises(FileNotFoundError):
        qwen3_next.load(written())
    save_file({"lm_head.weight": jnp.zeros((256, 64))}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no tensor model\.layers\.0\."):
        qwen3_next.load(written())
    tensors = load_file(TINY / "model.safetensors")
    save_file(tensors | {"model.layers.0.mlp.gate.weight": jnp.zeros((7, 64))}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.gate\.weight must have shape \(8, 64\) by config\.json, got \(7, 64\)"):
        qwen3_next.load(written())
