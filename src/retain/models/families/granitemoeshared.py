"""Granite with experts and, beside them, an MLP that all tokens pass, if the config has a size for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.kernels.rope import Rope
from retain.models.decoder import Decoder, ModelSpec, PreNormLayer
from retain.models.families import granitemoe, llama
from retain.models.families.granitemoehybrid import load_mlp
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {**granitemoe.DEFAULTS, "shared_intermediate_size": 0}  # of transformers
spec_from_config = granitemoe.spec_from_config


def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope | None, tensors: llama.OptionalTensors) -> PreNormLayer:
    """Build one layer from the weights in layers.<i>."""
    mlp = load_mlp(w) if w.config["shared_intermediate_size"] else None
    return granitemoe.build_layer(w, i, s, rope, tensors, mlp)


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    return granitemoe.build_decoder(w.with_defaults(DEFAULTS), build_layer)
