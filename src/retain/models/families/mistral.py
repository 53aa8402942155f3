"""Mistral: Llama with a sliding window in every layer, and without biases (arXiv 2310.06825)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.models import llama_like
from retain.models.decoder import Decoder, ModelSpec
from retain.models.family_config import add_defaults
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    **llama_like.DEFAULTS,
    "vocab_size": 32000,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. Without a window it is null, as in the later versions of the 7B."""
    c = add_defaults(c, DEFAULTS)
    return llama_like.make_spec(c, (c["sliding_window"] or None,) * c["num_hidden_layers"])


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS)
    return llama_like.build_decoder(w, spec_from_config(w.config), llama_like.OptionalTensors())
