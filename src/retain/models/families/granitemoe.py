"""Granite 3 with experts: Granite with a mixture of them in place of each MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from retain.kernels.attention_params import AttentionParams
from retain.kernels.rope import Rope
from retain.models.decoder import Decoder, ModelSpec, PreNormLayer
from retain.models.families import granite, llama
from retain.models.families.granitemoehybrid import load_mixture
from retain.models.family_config import add_defaults
from retain.models.layers import Layer
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    **llama.SHARED_DEFAULTS,
    "vocab_size": 32000,
    "num_key_value_heads": None,  # num_attention_heads
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. All layers have full attention."""
    c = add_defaults(c, DEFAULTS)
    return replace(llama.make_spec(c), attention=AttentionParams(float(c["attention_multiplier"])))


def build_layer(
    w: Weights, i: int, s: ModelSpec, rope: Rope | None, tensors: llama.OptionalTensors, mlp: Layer | None = None
) -> PreNormLayer:
    """Build one layer from the weights in layers.<i>. What is in place of its MLP has the residual's multiplier."""
    layer = llama.build_layer(w, i, s, rope, tensors, mlp or load_mixture(w.scope("block_sparse_moe.")))
    o_proj = granite.multiply(layer.attention.o_proj, w.config["residual_multiplier"])
    return replace(layer, attention=replace(layer.attention, o_proj=o_proj))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS)
    bias = w.config["attention_bias"]
    tensors = llama.OptionalTensors(qkv_bias=bias, o_bias=bias)
    return granite.build_decoder(w, spec_from_config(w.config), tensors, build_layer)
