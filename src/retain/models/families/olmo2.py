"""Olmo 2: norms behind attention and the MLP, not before; norms over all heads of q and of k (arXiv 2501.00656)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.models import llama_like
from retain.models.decoder import Decoder, ModelSpec
from retain.models.family_config import add_defaults
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    **llama_like.DEFAULTS,
    "vocab_size": 50304,
    "num_key_value_heads": None,  # num_attention_heads
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
}


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. All layers have full attention."""
    return llama_like.make_spec(add_defaults(c, DEFAULTS))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS)
    tensors = llama_like.OptionalTensors.of_attention(w.config["attention_bias"])
    return llama_like.build_decoder(w, spec_from_config(w.config), tensors, llama_like.build_output_norm_layer)
