"""Olmo 3: Olmo 2 with three sliding layers to a full one; YaRN, for long texts, in full layers only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from retain.kernels.rope import Rope
from retain.models.decoder import Decoder, ModelSpec
from retain.models.families import llama, olmo2
from retain.models.family_config import (
    ATTENTION_TYPES,
    add_defaults,
    alternate_layer_types,
    get_layer_types,
    get_windows,
)
from retain.models.rope import get_whole_head_rope
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {**olmo2.DEFAULTS, "sliding_window": 4096}  # of transformers
ROPE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    layer_type: {"rope_type": "default", "rope_theta": 500000.0} for layer_type in ATTENTION_TYPES
}
PATTERN = 4  # a full layer in so many


def read_layer_types(c: Mapping[str, Any]) -> list[str]:
    """Return the type of each layer."""
    return get_layer_types(c, alternate_layer_types(c["num_hidden_layers"], PATTERN))


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    c = add_defaults(c, DEFAULTS)
    return llama.make_spec(c, get_windows(read_layer_types(c), c["sliding_window"]))


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
    layer_types = read_layer_types(c)
    ropes = get_ropes(c, s.kv_cache.attention(0).k_dim)

    def build_layer(w: Weights, i: int, s: ModelSpec, _: Rope, tensors: llama.OptionalTensors) -> olmo2.OutputNormLayer:
        return olmo2.build_layer(w, i, s, ropes[layer_types[i]], tensors)

    tensors = llama.OptionalTensors.of_attention(c["attention_bias"])
    decoder = llama.build_decoder(w, s, tensors, build_layer, ropes["full_attention"])
    return replace(decoder, ropes=list(ropes.values()))
