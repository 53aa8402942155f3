"""Granite 3 with experts: Granite with a mixture of them in place of each MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from retain.kernels.experts import Experts, Router
from retain.kernels.rope import Rope
from retain.models.decoder import Decoder, ModelSpec, PreNormLayer
from retain.models.experts import MixtureOfExperts, load_experts
from retain.models.families import granite, llama
from retain.models.family_config import add_defaults
from retain.models.layers import Layer, Linear, resolve_activation
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    **llama.SHARED_DEFAULTS,
    **granite.MULTIPLIERS,
    "vocab_size": 32000,
    "num_key_value_heads": None,  # num_attention_heads
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. All layers have full attention."""
    return granite.make_spec(add_defaults(c, DEFAULTS))


def load_mixture(w: Weights) -> MixtureOfExperts:
    """Load the experts of a layer, by the names of published files or those of transformers."""
    c = w.config
    n = c["num_local_experts"]
    router = Router(c["num_experts_per_tok"], scale=c["residual_multiplier"])
    if "input_linear.weight" in w:
        gate_up = w.load_stack("input_linear.weight", n)
        down = w.load_stack("output_linear.weight", n)
        experts = Experts(n, gate_up, down, router, resolve_activation(c["hidden_act"]))
    else:
        experts = load_experts(w, n, router, c["hidden_act"])
    name = "router.layer.weight" if "router.layer.weight" in w else "router.weight"
    return MixtureOfExperts(Linear(w[name].to(torch.float32)), experts)


def build_layer(
    w: Weights, i: int, s: ModelSpec, rope: Rope | None, tensors: llama.OptionalTensors, mlp: Layer | None = None
) -> PreNormLayer:
    """Build one layer from the weights in layers.<i>. What is in place of its MLP has the residual's multiplier."""
    layer = llama.build_layer(w, i, s, rope, tensors, mlp or load_mixture(w.scope("block_sparse_moe.")))
    o_proj = granite.multiply(layer.attention.o_proj, w.config["residual_multiplier"])
    return replace(layer, attention=replace(layer.attention, o_proj=o_proj))


def build_decoder(w: Weights, build_layer: Callable[..., PreNormLayer]) -> Decoder:
    """Build a decoder from weights whose config has its family's defaults. See granite.build_decoder."""
    tensors = llama.OptionalTensors.of_attention(w.config["attention_bias"])
    return granite.build_decoder(w, granite.make_spec(w.config), tensors, build_layer)


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    return build_decoder(w.with_defaults(DEFAULTS), build_layer)
