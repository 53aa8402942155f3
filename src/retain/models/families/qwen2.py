"""Qwen 2, 2.5: Llama with biases on q, k, v, and optionally a sliding window from some layer on (arXiv 2407.10671)."""

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
    "max_position_embeddings": 32768,
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
    return llama_like.build_decoder(w, spec_from_config(w.config), llama_like.OptionalTensors(qkv_bias=True))
