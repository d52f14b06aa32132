"""Qwen3-Next checkpoints, as transformers saves them, to and from parameters of :mod:`jaxarena.models.hybrid`.

A checkpoint is a folder with ``config.json`` and the weights: ``model.safetensors``, or several such files and
``model.safetensors.index.json``, which says what is where. Its matrices are ``[out, in]``, ours ``[in, out]``; and where it has its heads
one after another, each with all that belongs to it, ours has one kind after another::

    linear_attn.in_proj_qkvz   of each key head  q | k | its value heads' v | their z      qkv [q | k | v], z
    linear_attn.in_proj_ba     of each key head  its value heads' b | their a              beta_a [b | a]
    self_attn.q_proj           of each head      q | gate                                  qgkv [q | gate | k | v]

Both are exact: what is read and written back has the same bits. Experts come stacked (``experts.gate_up_proj``) or one by one
(``experts.0.gate_proj.weight``), as older versions of transformers saved them; they are written stacked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxarena.models.hybrid import PERIOD, HybridConfig, Params

__all__ = ["config_from", "load", "save", "tensors_of"]

Tensors = dict[str, Any]

_SHARD_BYTES = 5 * 10**9
_INDEX = "model.safetensors.index.json"

_SIZES = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "delta_key_heads": "linear_num_key_heads",
    "delta_value_heads": "linear_num_value_heads",
    "delta_key_size": "linear_key_head_dim",
    "delta_value_size": "linear_value_head_dim",
    "conv_taps": "linear_conv_kernel_dim",
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_width": "moe_intermediate_size",
    "shared_width": "shared_expert_intermediate_size",
    "balance_weight": "router_aux_loss_coef",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
"""Our names and theirs, of what is the same number."""

_ASKED = {
    "model_type": "qwen3_next",
    "hidden_act": "silu",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
"""What the model computes whatever a configuration says."""


def load(folder: str | Path, *, dtype: str = "float32", parameter_dtype: DTypeLike = jnp.float32) -> tuple[Params, HybridConfig]:
    """Reads a checkpoint.

    Args:
      folder: holds ``config.json`` and the weights.
      dtype: of activations, as in :class:`~jaxarena.models.hybrid.HybridConfig`.
      parameter_dtype: of the parameters; float32 holds those of a bfloat16 checkpoint exactly.

    Raises:
      ImportError: safetensors is not installed.
      FileNotFoundError: a file is missing.
      ValueError: the configuration asks for what the model does not do, or a tensor is missing or has another shape than it says.
    """
    folder = Path(folder)
    config = config_from(json.loads((folder / "config.json").read_text()), dtype=dtype)
    read = _reader(folder)

    def get(name: str, *shape: int) -> Any:
        try:
            found = read(name)
        except KeyError:
            raise ValueError(f"load: {folder} has no tensor {name}, which config.json asks for") from None
        if found.shape != shape:
            raise ValueError(f"load: {name} must have shape {shape} by config.json, got {found.shape}")
        return jnp.asarray(found, parameter_dtype)

    c = config
    layers = [_layer(lambda name, *shape, i=i: get(f"model.layers.{i}.{name}", *shape), read, i, c) for i in range(c.layers)]
    periods = [{f"layer{k}": layers[PERIOD * p + k] for k in range(PERIOD)} for p in range(c.periods)]
    params: Params = {
        "embedding": get("model.embed_tokens.weight", c.vocabulary, c.width),
        "periods": jax.tree.map(lambda *leaves: jnp.stack(leaves), *periods),
        "norm": get("model.norm.weight", c.width),
    }
    if not c.tied:
        params["head"] = get("lm_head.weight", c.vocabulary, c.width)
    return params, config


def save(folder: str | Path, params: Params, config: HybridConfig, *, max_shard_bytes: int = _SHARD_BYTES) -> None:
    """Writes a checkpoint that transformers, and :func:`load`, read: ``config.json`` and the weights in the dtype of ``params``, in several
    files when they take more than ``max_shard_bytes``.

    Raises:
      ImportError: safetensors is not installed.
    """
    save_file = _safetensors().flax.save_file
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tensors_of(params, config)
    (folder / "config.json").write_text(json.dumps(_config_of(config, str(next(iter(tensors.values())).dtype)), indent=2) + "\n")
    shards: list[Tensors] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > max_shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    if len(shards) > 1:
        where = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def config_from(data: Mapping[str, Any], *, dtype: str = "float32") -> HybridConfig:
    """The model's configuration from what ``config.json`` holds.

    Raises:
      ValueError: it asks for something that the model does not do.
    """
    rope = data.get("rope_parameters") or {"rope_type": "default", **data}
    kinds = ["full_attention" if (i + 1) % PERIOD == 0 else "linear_attention" for i in range(data["num_hidden_layers"])]
    asked = _ASKED | {"layer_types": kinds}
    given = {"layer_types": kinds, "attention_bias": False, "mlp_only_layers": [], **data}
    for name, supported in asked.items():
        if given.get(name) != supported:
            raise ValueError(f"load: config.json's {name} must be {supported!r}, got {given.get(name)!r}")
    if rope.get("rope_type", "default") != "default" or data.get("rope_scaling"):
        raise ValueError(f"load: config.json's rope_type must be 'default', got {data.get('rope_scaling') or rope['rope_type']!r}")
    return HybridConfig(
        **{ours: data[theirs] for ours, theirs in _SIZES.items()},
        rotary_size=int(data["head_dim"] * rope["partial_rotary_factor"]),
        rotary_base=float(rope["rope_theta"]),
        dtype=dtype,
    )


def _config_of(config: HybridConfig, dtype: str) -> dict[str, Any]:
    kinds = ["full_attention" if (i + 1) % PERIOD == 0 else "linear_attention" for i in range(config.layers)]
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        **_ASKED,
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        "layer_types": kinds,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rotary_base,
            "partial_rotary_factor": config.rotary_size / config.head_size,
        },
        "dtype": dtype,
    }


def tensors_of(params: Params, config: HybridConfig) -> Tensors:
    """The checkpoint's tensors, by name, of parameters, or of a pytree like them, such as their gradients."""
    tensors: Tensors = {"model.embed_tokens.weight": params["embedding"]}
    for i in range(config.layers):
        layer = jax.tree.map(lambda a, i=i: a[i // PERIOD], params["periods"][f"layer{i % PERIOD}"])
        tensors |= {f"model.layers.{i}.{name}": tensor for name, tensor in _layer_tensors(layer, config).items()}
    tensors["model.norm.weight"] = params["norm"]
    if not config.tied:
        tensors["lm_head.weight"] = params["head"]
    return tensors


def _layer(get: Callable[..., Any], read: Callable[[str], Any], number: int, c: HybridConfig) -> Params:
    is_attention = (number + 1) % PERIOD == 0
    mixer = _attention(get, c) if is_attention else _delta(get, c)
    mixer["norm"] = get("input_layernorm.weight", c.width)
    moe = {
        "norm": get("post_attention_layernorm.weight", c.width),
        "router": get("mlp.gate.weight", c.experts, c.width).T,
    }
    try:
        read(f"model.layers.{number}.mlp.experts.gate_up_proj")
    except KeyError:
        one = [[get(f"mlp.experts.{e}.{kind}_proj.weight", c.expert_width, c.width).T for kind in ("gate", "up")] for e in range(c.experts)]
        moe["gate_up"] = jnp.stack([jnp.concatenate(pair, axis=1) for pair in one])
        down = [get(f"mlp.experts.{e}.down_proj.weight", c.width, c.expert_width).T for e in range(c.experts)]
        moe["down"] = jnp.stack(down)
    else:
        moe["gate_up"] = get("mlp.experts.gate_up_proj", c.experts, 2 * c.expert_width, c.width).swapaxes(1, 2)
        moe["down"] = get("mlp.experts.down_proj", c.experts, c.width, c.expert_width).swapaxes(1, 2)
    if c.shared_width:
        pair = [get(f"mlp.shared_expert.{kind}_proj.weight", c.shared_width, c.width).T for kind in ("gate", "up")]
        moe["shared_gate_up"] = jnp.concatenate(pair, axis=1)
        moe["shared_down"] = get("mlp.shared_expert.down_proj.weight", c.width, c.shared_width).T
        moe["shared_gate"] = get("mlp.shared_expert_gate.weight", 1, c.width).T
    return {"mixer": mixer, "moe": moe}


def _layer_tensors(layer: Params, c: HybridConfig) -> Tensors:
    w, moe = layer["mixer"], layer["moe"]
    mixer = _attention_tensors(w, c) if "q_norm" in w else _delta_tensors(w, c)
    tensors = {
        "input_layernorm.weight": w["norm"],
        **mixer,
        "post_attention_layernorm.weight": moe["norm"],
        "mlp.gate.weight": moe["router"].T,
        "mlp.experts.gate_up_proj": moe["gate_up"].swapaxes(1, 2),
        "mlp.experts.down_proj": moe["down"].swapaxes(1, 2),
    }
    if c.shared_width:
        gate, up = jnp.split(moe["shared_gate_up"], 2, axis=1)
        tensors |= {
            "mlp.shared_expert.gate_proj.weight": gate.T,
            "mlp.shared_expert.up_proj.weight": up.T,
            "mlp.shared_expert.down_proj.weight": moe["shared_down"].T,
            "mlp.shared_expert_gate.weight": moe["shared_gate"].T,
        }
    return tensors


def _delta_parts(c: HybridConfig) -> list[int]:
    """Columns of q, k, v and z that belong to one key head."""
    values = c.delta_value_heads // c.delta_key_heads * c.delta_value_size
    return [c.delta_key_size, c.delta_key_size, values, values]


def _delta(get: Callable[..., Any], c: HybridConfig) -> Params:
    parts = _delta_parts(c)
    channels = sum(parts[:3]) * c.delta_key_heads
    q, k, v, z = _by_kind(get("linear_attn.in_proj_qkvz.weight", c.delta_key_heads * sum(parts), c.width), c.delta_key_heads, parts)
    ratio = c.delta_value_heads // c.delta_key_heads
    return {
        "qkv": jnp.concatenate([q, k, v], axis=1),
        "z": z,
        "beta_a": jnp.concatenate(
            _by_kind(get("linear_attn.in_proj_ba.weight", 2 * c.delta_value_heads, c.width), c.delta_key_heads, [ratio, ratio]), axis=1
        ),
        "conv": get("linear_attn.conv1d.weight", channels, 1, c.conv_taps)[:, 0].T,
        "a_log": get("linear_attn.A_log", c.delta_value_heads),
        "dt_bias": get("linear_attn.dt_bias", c.delta_value_heads),
        "out_norm": get("linear_attn.norm.weight", c.delta_value_size),
        "out": get("linear_attn.out_proj.weight", c.width, c.delta_value_heads * c.delta_value_size).T,
    }


def _delta_tensors(w: Params, c: HybridConfig) -> Tensors:
    heads = c.delta_key_heads
    keys = heads * c.delta_key_size
    q, k, v = jnp.split(w["qkv"], [keys, 2 * keys], axis=1)
    return {
        "linear_attn.A_log": w["a_log"],
        "linear_attn.conv1d.weight": w["conv"].T[:, None],
        "linear_attn.dt_bias": w["dt_bias"],
        "linear_attn.in_proj_ba.weight": _by_head(jnp.split(w["beta_a"], 2, axis=1), heads),
        "linear_attn.in_proj_qkvz.weight": _by_head([q, k, v, w["z"]], heads),
        "linear_attn.norm.weight": w["out_norm"],
        "linear_attn.out_proj.weight": w["out"].T,
    }


def _attention(get: Callable[..., Any], c: HybridConfig) -> Params:
    columns, kv_columns = c.heads * c.head_size, c.kv_heads * c.head_size
    q, gate = _by_kind(get("self_attn.q_proj.weight", 2 * columns, c.width), c.heads, [c.head_size] * 2)
    k, v = (get(f"self_attn.{kind}_proj.weight", kv_columns, c.width).T for kind in "kv")
    return {
        "qgkv": jnp.concatenate([q, gate, k, v], axis=1),
        "q_norm": get("self_attn.q_norm.weight", c.head_size),
        "k_norm": get("self_attn.k_norm.weight", c.head_size),
        "out": get("self_attn.o_proj.weight", c.width, columns).T,
    }


def _attention_tensors(w: Params, c: HybridConfig) -> Tensors:
    columns, kv_columns = c.heads * c.head_size, c.kv_heads * c.head_size
    q, gate, k, v = jnp.split(w["qgkv"], [columns, 2 * columns, 2 * columns + kv_columns], axis=1)
    return {
        "self_attn.q_proj.weight": _by_head([q, gate], c.heads),
        "self_attn.k_proj.weight": k.T,
        "self_attn.v_proj.weight": v.T,
        "self_attn.q_norm.weight": w["q_norm"],
        "self_attn.k_norm.weight": w["k_norm"],
        "self_attn.o_proj.weight": w["out"].T,
    }


def _by_kind(weight: Any, heads: int, parts: list[int]) -> list[Any]:
    """From ``[out, in]``, where each head has its parts one after another, to ``[in, columns]`` of each part."""
    columns = weight.T.reshape(weight.shape[1], heads, -1)
    return [part.reshape(weight.shape[1], -1) for part in jnp.split(columns, np.cumsum(parts)[:-1], axis=2)]


def _by_head(parts: list[Any], heads: int) -> Any:
    """The inverse of :func:`_by_kind`."""
    width = parts[0].shape[0]
    return jnp.concatenate([part.reshape(width, heads, -1) for part in parts], axis=2).reshape(width, -1).T


def _safetensors() -> Any:
    try:
        import safetensors.flax  # optional, in the extra "weights"
    except ImportError:
        raise ImportError("Qwen3-Next checkpoints need safetensors: pip install 'jaxarena[weights]'") from None
    return safetensors


def _reader(folder: Path) -> Callable[[str], Any]:
    """Gives a tensor by name, read from its file when asked for.

    The function raises KeyError for a name that the checkpoint lacks.
    """
    library = _safetensors()
    index = folder / _INDEX
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
    files = [library.safe_open(folder / name, framework="flax") for name in names]
    where = {name: file for file in files for name in file.keys()}  # noqa: SIM118  (a file is no mapping)

    def read(name: str) -> Any:
        return where[name].get_tensor(name)

    return read
