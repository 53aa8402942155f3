"""Granite: Llama with multipliers of the embedding, of attention, of both branches and of the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.models import granite_like
from retain.models.decoder import Decoder, ModelSpec
from retain.models.families import llama
from retain.models.family_config import add_defaults
from retain.models.llama_like import OptionalTensors
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {**llama.DEFAULTS, **granite_like.MULTIPLIERS}  # of transformers


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. All layers have full attention."""
    return granite_like.make_spec(add_defaults(c, DEFAULTS))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS)
    tensors = OptionalTensors.of_attention(w.config["attention_bias"], mlp_bias=w.config["mlp_bias"])
    return granite_like.build_decoder(w, spec_from_config(w.config), tensors)
