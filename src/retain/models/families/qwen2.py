"""Qwen 2, 2.5: Llama with biases on q, k, v, and optionally a sliding window from some layer on (arXiv 2407.10671)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.models.decoder import Decoder, ModelSpec
from retain.models.families import llama
from retain.models.family_config import add_defaults, get_layer_types, get_windows
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    **llama.SHARED_DEFAULTS,
    "vocab_size": 151936,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    return make_spec(add_defaults(c, DEFAULTS))


def make_spec(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from a config with its family's defaults. `sliding_window` needs `use_sliding_window`."""
    first = c["max_window_layers"]
    layers = range(c["num_hidden_layers"])
    layer_types = get_layer_types(c, ["full_attention" if i < first else "sliding_attention" for i in layers])
    return llama.make_spec(c, get_windows(layer_types, c["sliding_window"] if c["use_sliding_window"] else None))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS)
    return llama.build_decoder(w, make_spec(w.config), llama.OptionalTensors(qkv_bias=True))
