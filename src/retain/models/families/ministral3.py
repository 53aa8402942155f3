"""Ministral 3: Llama whose queries grow with their position, so that attention over long texts stays sharp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from retain.kernels.rope import Rope
from retain.models import llama_like
from retain.models.decoder import Decoder, ModelSpec, PreNormLayer
from retain.models.family_config import add_defaults
from retain.models.rope import get_original_context, get_rope, get_rope_parameters
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    **llama_like.DEFAULTS,
    "vocab_size": 131072,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
ROPE_DEFAULTS: Mapping[str, Any] = {  # where the config says nothing
    "rope_theta": 1000000.0,
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. A window is one of all layers."""
    c = add_defaults(c, DEFAULTS)
    return llama_like.make_spec(c, (c["sliding_window"] or None,) * c["num_hidden_layers"])


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS)
    c = w.config
    s = spec_from_config(c)
    is_given = c.get("rope_scaling") or c.get("rope_parameters")
    params = get_rope_parameters(c, defaults={} if is_given else ROPE_DEFAULTS)
    growth = (float(params["llama_4_scaling_beta"]), get_original_context(params))

    def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope, tensors: llama_like.OptionalTensors) -> PreNormLayer:
        layer = llama_like.build_layer(w, i, s, rope, tensors)
        return replace(layer, attention=replace(layer.attention, query_growth=growth))

    rope = get_rope(s.kv_cache.attention(0).k_dim, params)
    return llama_like.build_decoder(w, s, llama_like.OptionalTensors(), build_layer, [rope])
