"""Seed-OSS: Llama with biases on q, k and v, and heads of their own size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.models.decoder import Decoder, ModelSpec
from retain.models.families import llama
from retain.models.family_config import add_defaults
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    "vocab_size": 155136,
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 524288,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "attention_out_bias": False,
    "mlp_bias": False,
}


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. All layers have full attention."""
    return llama.make_spec(add_defaults(c, DEFAULTS))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS)
    c = w.config
    tensors = llama.OptionalTensors(c["attention_bias"], c["attention_out_bias"], c["mlp_bias"])
    return llama.build_decoder(w, spec_from_config(c), tensors)
