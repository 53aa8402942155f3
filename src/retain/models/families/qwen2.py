"""Qwen 2, 2.5: Llama with biases on q, k, v, and optionally a sliding window from some layer on (arXiv 2407.10671)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from retain.models.decoder import Decoder, ModelSpec, get_layer_windows
from retain.models.families import llama
from retain.models.weights import Weights


def spec_from_config(c: dict[str, Any]) -> ModelSpec:
    """Read the spec from config.json. `sliding_window` counts only with `use_sliding_window`."""
    first, layers = c.get("max_window_layers", 28), range(c["num_hidden_layers"])
    layer_types = ["full_attention" if i < first else "sliding_attention" for i in layers]
    window = c.get("sliding_window") if c.get("use_sliding_window") else None
    return replace(llama.spec_from_config(c), windows=get_layer_windows({**c, "sliding_window": window}, layer_types))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    return llama.build(w, spec_from_config)
