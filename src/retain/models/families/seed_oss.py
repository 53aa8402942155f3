"""Seed-OSS: Llama with biases on q, k and v, and heads of their own size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.models import llama_like
from retain.models.decoder import Decoder, ModelSpec
from retain.models.family_config import add_defaults
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    **llama_like.DEFAULTS,
    "vocab_size": 155136,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
    "attention_out_bias": False,
    "mlp_bias": False,
}


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. All layers have full attention."""
    return llama_like.make_spec(add_defaults(c, DEFAULTS))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS)
    c = w.config
    tensors = llama_like.OptionalTensors(c["attention_bias"], c["attention_out_bias"], c["mlp_bias"])
    return llama_like.build_decoder(w, spec_from_config(c), tensors)
