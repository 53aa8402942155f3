"""Granite: Llama with multipliers of the embedding, of attention, of both branches and of the logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from retain.kernels.attention_params import AttentionParams
from retain.kernels.rope import Rope
from retain.kernels.weight import scale_rows
from retain.models.decoder import Decoder, ModelSpec, PreNormLayer
from retain.models.families import llama
from retain.models.family_config import add_defaults
from retain.models.layers import GatedMLP, Linear, RMSNorm
from retain.models.weights import Weights

MULTIPLIERS: Mapping[str, Any] = {  # of the families of Granite; defaults of transformers
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
DEFAULTS: Mapping[str, Any] = {**llama.DEFAULTS, **MULTIPLIERS}


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. All layers have full attention."""
    return make_spec(add_defaults(c, DEFAULTS))


def make_spec(c: Mapping[str, Any], windows: tuple[int | None, ...] | None = None) -> ModelSpec:
    """Read the spec from a config with its family's defaults. See llama.make_spec."""
    return replace(llama.make_spec(c, windows), attention=AttentionParams(float(c["attention_multiplier"])))


def multiply(linear: Linear, factor: float) -> Linear:
    """Return a linear layer whose output is multiplied by a factor."""
    if factor == 1:
        return linear
    bias = linear.bias
    weight = scale_rows(linear.weight, torch.full((linear.weight.shape[0],), factor))
    return Linear(weight, None if bias is None else bias * factor)


def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope | None, tensors: llama.OptionalTensors) -> PreNormLayer:
    """Build one layer from the weights in layers.<i>. The last products of both branches take their multiplier."""
    factor = w.config["residual_multiplier"]
    mlp = llama.load_mlp(w.scope("mlp."), tensors.mlp_bias)
    scaled_mlp = GatedMLP(mlp.gate_up_proj, multiply(mlp.down_proj, factor), w.config["hidden_act"])
    layer = llama.build_layer(w, i, s, rope, tensors, scaled_mlp)
    attention = replace(layer.attention, o_proj=multiply(layer.attention.o_proj, factor))
    return replace(layer, attention=attention)


def read_biases(c: Mapping[str, Any]) -> llama.OptionalTensors:
    """Return which linear layers have biases."""
    return llama.OptionalTensors.of_attention(c["attention_bias"], mlp_bias=c["mlp_bias"])


def build_decoder(
    w: Weights, s: ModelSpec, tensors: llama.OptionalTensors, build_layer: Callable[..., PreNormLayer]
) -> Decoder:
    """Build a decoder from weights whose config has its family's defaults. `build_layer` is as that of this family.

    The last norm divides logits by their scaling.
    """
    c = w.config
    decoder = llama.build_decoder(w, s, tensors, build_layer)
    assert isinstance(decoder.norm, RMSNorm)
    norm = RMSNorm(decoder.norm.weight / w.logits_factor(c["logits_scaling"]), decoder.norm.eps)
    embedding = replace(decoder.embedding, scale=float(c["embedding_multiplier"]))
    return replace(decoder, norm=norm, embedding=embedding)


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS)
    return build_decoder(w, spec_from_config(w.config), read_biases(w.config), build_layer)
