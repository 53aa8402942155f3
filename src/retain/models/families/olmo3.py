"""Olmo 3: Olmo 2 with three sliding layers to a full one; YaRN, for long texts, in full layers only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from retain.kernels.rope import Rope
from retain.models import llama_like
from retain.models.decoder import Decoder, ModelSpec
from retain.models.family_config import ATTENTION_TYPES, add_defaults, get_alternating_types, get_windows
from retain.models.rope import get_whole_head_rope
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    **llama_like.DEFAULTS,
    "vocab_size": 50304,
    "num_key_value_heads": None,  # num_attention_heads
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "sliding_window": 4096,
}
ROPE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    layer_type: {"rope_type": "default", "rope_theta": 500000.0} for layer_type in ATTENTION_TYPES
}
PATTERN = 4  # a full layer in so many


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    c = add_defaults(c, DEFAULTS)
    return llama_like.make_spec(c, get_windows(get_alternating_types(c, PATTERN), c["sliding_window"]))


def get_ropes(c: Mapping[str, Any], dim: int) -> dict[str, Rope]:
    """Return the Rope of each type of layers.

    `rope_theta` and `rope_scaling` of an old config are of the full layers alone, as in transformers 5. Raises
    ValueError for parameters that name no type: versions of transformers disagree on the layers that take them.
    """
    given = c.get("rope_parameters") or {}
    if given and not any(layer_type in given for layer_type in ATTENTION_TYPES):
        raise ValueError("rope parameters without a type of layers are not supported in this family")
    theta = c.get("rope_theta")
    first = {} if theta is None else {"rope_theta": theta}
    last = c.get("rope_scaling") or {}
    full = {**first, **(given.get("full_attention") or {}), **last}
    by_type = {"full_attention": full, "sliding_attention": given.get("sliding_attention") or {}}
    context = c["max_position_embeddings"]

    def get_own_rope(layer_type: str) -> Rope:
        params = {**ROPE_DEFAULTS[layer_type], **by_type[layer_type]}
        return get_whole_head_rope(dim, {"rope_parameters": params, "max_position_embeddings": context})

    return {layer_type: get_own_rope(layer_type) for layer_type in ATTENTION_TYPES}


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS)
    c = w.config
    s = spec_from_config(c)
    ropes = get_ropes(c, s.kv_cache.attention(0).k_dim)
    of_layers = [ropes[layer_type] for layer_type in get_alternating_types(c, PATTERN)]
    tensors = llama_like.OptionalTensors.of_attention(c["attention_bias"])
    decoder = llama_like.build_decoder(w, s, tensors, llama_like.build_output_norm_layer, of_layers)
    return replace(decoder, ropes=list(ropes.values()))
