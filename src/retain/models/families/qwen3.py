"""Qwen 3: Qwen 2 with biases only where the config says so, and norms of the q and k heads (arXiv 2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.models.decoder import Decoder, ModelSpec
from retain.models.families import llama, qwen2
from retain.models.family_config import add_defaults
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {**qwen2.DEFAULTS, "head_dim": 128, "attention_bias": False}  # of transformers


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    return qwen2.make_spec(add_defaults(c, DEFAULTS))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS)
    has_bias = w.config["attention_bias"]
    tensors = llama.OptionalTensors.of_attention(has_bias, qk_norm=True)
    return llama.build_decoder(w, qwen2.make_spec(w.config), tensors)
