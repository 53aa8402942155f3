"""Qwen3.5 with experts, text: Qwen3-Next whose projections are stored apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.models import qwen3_next_like
from retain.models.decoder import Decoder, ModelSpec
from retain.models.family_config import add_defaults
from retain.models.layers import Layer
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    **qwen3_next_like.DEFAULTS,
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}
ROPE_DEFAULTS = qwen3_next_like.ROPE_DEFAULTS
IGNORED_TENSORS = (r"visual\..*",)
MTP_LAYER = qwen3_next_like.mtp_layer(DEFAULTS)


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    return qwen3_next_like.make_spec(add_defaults(c, DEFAULTS))


def load_mlp(w: Weights, i: int) -> Layer:
    """Load the experts of a layer."""
    return qwen3_next_like.load_mixture(w, normalize=True)


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names. A file with vision has another prefix."""
    w = w.with_defaults(DEFAULTS)
    s = spec_from_config(w.config)
    return qwen3_next_like.build_decoder(w, s, qwen3_next_like.load_split_projections, load_mlp)
