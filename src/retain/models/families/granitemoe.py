"""Granite 3 with experts: Granite with a mixture of them in place of each MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.kernels.rope import Rope
from retain.models import granite_like
from retain.models.decoder import Decoder, ModelSpec, PreNormLayer
from retain.models.family_config import add_defaults
from retain.models.llama_like import OptionalTensors
from retain.models.weights import Weights

DEFAULTS = granite_like.EXPERT_DEFAULTS


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. All layers have full attention."""
    return granite_like.make_spec(add_defaults(c, DEFAULTS))


def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope | None, tensors: OptionalTensors) -> PreNormLayer:
    """Build one layer from the weights in layers.<i>."""
    mlp = granite_like.load_mixture(w.scope("block_sparse_moe."))
    return granite_like.build_layer(w, i, s, rope, tensors, mlp)


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS)
    tensors = OptionalTensors.of_attention(w.config["attention_bias"])
    return granite_like.build_decoder(w, spec_from_config(w.config), tensors, build_layer)
