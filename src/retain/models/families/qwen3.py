"""Qwen 3: Qwen 2 with biases only where the config says so, and norms of the q and k heads (arXiv 2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.models import llama_like
from retain.models.decoder import Decoder, ModelSpec
from retain.models.family_config import add_defaults, get_late_windows
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    **llama_like.DEFAULTS,
    "vocab_size": 151936,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    c = add_defaults(c, DEFAULTS)
    return llama_like.make_spec(c, get_late_windows(c))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS)
    has_bias = w.config["attention_bias"]
    tensors = llama_like.OptionalTensors.of_attention(has_bias, qk_norm=True)
    return llama_like.build_decoder(w, spec_from_config(w.config), tensors)
