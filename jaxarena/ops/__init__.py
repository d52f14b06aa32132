"""Operations of language models, differentiable, whose launches a planned step runs over its arena.

Each op is a plain function of arrays: under ``jax.jit`` it runs as XLA, inside :func:`jaxarena.jit` as planned launches. How an op is
made, and how to add one: :mod:`jaxarena.ops.interface`.
"""

from jaxarena.ops.argmax import argmax
from jaxarena.ops.attention import attention
from jaxarena.ops.cross_entropy import cross_entropy
from jaxarena.ops.delta_gate import delta_gate
from jaxarena.ops.embed import embed
from jaxarena.ops.gate import gate
from jaxarena.ops.gated_delta_rule import gated_delta_rule
from jaxarena.ops.interface import Launch, launch
from jaxarena.ops.kv_cache import KVCache, append, attend
from jaxarena.ops.moe import MoeResult, SharedExpert, moe
from jaxarena.ops.project import project
from jaxarena.ops.quantized import Quantized, quantize
from jaxarena.ops.rms_norm import rms_norm
from jaxarena.ops.rotary import rotary
from jaxarena.ops.sample import sample
from jaxarena.ops.short_conv import short_conv

__all__ = [
    "KVCache",
    "Launch",
    "MoeResult",
    "Quantized",
    "SharedExpert",
    "append",
    "argmax",
    "attend",
    "attention",
    "cross_entropy",
    "delta_gate",
    "embed",
    "gate",
    "gated_delta_rule",
    "launch",
    "moe",
    "project",
    "quantize",
    "rms_norm",
    "rotary",
    "sample",
    "short_conv",
]
