"""Granite with a sink logit for each head, a window in three of four layers, and a rope base for each layer, if any."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from retain.files import quote
from retain.kernels.rope import Rope
from retain.models import granite_like
from retain.models.decoder import Decoder, ModelSpec, PreNormLayer
from retain.models.families import llama
from retain.models.family_config import add_defaults, get_layer_types, get_windows
from retain.models.llama_like import OptionalTensors
from retain.models.rope import get_whole_head_rope
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    **llama.DEFAULTS,
    **granite_like.MULTIPLIERS,
    "vocab_size": 100352,
    "hidden_size": 2560,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "sliding_window": 128,
    "layer_rope_theta": None,  # the base of the config in every layer
}


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. Every fourth layer is full by default, from the first on."""
    c = add_defaults(c, DEFAULTS)
    default = ["sliding_attention" if i % 4 else "full_attention" for i in range(c["num_hidden_layers"])]
    return granite_like.make_spec(c, get_windows(get_layer_types(c, default), c["sliding_window"]))


def read_ropes(c: Mapping[str, Any], dim: int) -> list[Rope | None]:
    """Return the Rope of each layer; None where its base is 0. Raises ValueError for a list of another length."""
    n = c["num_hidden_layers"]
    thetas = c["layer_rope_theta"]
    if thetas is None:
        return [get_whole_head_rope(dim, c)] * n
    is_list = isinstance(thetas, list) and len(thetas) == n
    if not is_list or not all(type(theta) in (int, float) and 0 <= theta < math.inf for theta in thetas):
        raise ValueError(f"layer_rope_theta is {quote(thetas)}, not a number of at least 0 for each of {n} layers")
    ropes = {theta: get_whole_head_rope(dim, c, theta=theta) for theta in thetas if theta}
    return [ropes.get(theta) for theta in thetas]


def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope | None, tensors: OptionalTensors) -> PreNormLayer:
    """Build one layer from the weights in layers.<i>."""
    layer = granite_like.build_layer(w, i, s, rope, tensors)
    params = replace(s.attention, sink_logits=w["self_attn.sinks"].float())
    return replace(layer, attention=replace(layer.attention, own_params=params))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS)
    s = spec_from_config(w.config)
    ropes = read_ropes(w.config, s.kv_cache.attention(0).k_dim)
    tensors = OptionalTensors.of_attention(w.config["attention_bias"], mlp_bias=w.config["mlp_bias"])
    return granite_like.build_decoder(w, s, tensors, build_layer, ropes)
