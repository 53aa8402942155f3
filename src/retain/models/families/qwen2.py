"""Qwen 2 and 2.5: Llama with biases on q, k and v, and in some a window from a certain layer on (arXiv 2407.10671)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from retain.models.decoder import Decoder, ModelSpec, get_layer_windows
from retain.models.families import llama
from retain.models.weights import Weights


def spec_from_config(c: dict[str, Any]) -> ModelSpec:
    """From config.json. A window that `use_sliding_window` does not switch on is not there."""
    first = c.get("max_window_layers", 28)
    kinds = ["full_attention" if i < first else "sliding_attention" for i in range(c["num_hidden_layers"])]
    window = c.get("sliding_window") if c.get("use_sliding_window") else None
    return replace(llama.spec_from_config(c), windows=get_layer_windows({**c, "sliding_window": window}, kinds))


def build(w: Weights) -> Decoder:
    """The decoder from weights in Hugging Face's names."""
    return llama.build(w, spec_from_config)
