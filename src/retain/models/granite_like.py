"""Decoders like Granite's: Llama's with multipliers of the embedding, of attention, of both branches and of the logits.

In place of an MLP a layer may have experts, or experts beside an MLP of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from retain.kernels.attention_params import AttentionParams
from retain.kernels.experts import Experts, Router
from retain.kernels.rope import Rope
from retain.kernels.weights.weight import scale_rows
from retain.models import llama_like
from retain.models.decoder import Decoder, ModelSpec, PreNormLayer
from retain.models.experts import MixtureOfExperts, SharedExpertMixture, load_experts, load_gate
from retain.models.layers import GatedMLP, Layer, Linear, RMSNorm, load_linear, resolve_activation
from retain.models.weights import Weights

MULTIPLIERS: Mapping[str, Any] = {  # defaults of transformers
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
EXPERT_DEFAULTS: Mapping[str, Any] = {  # of transformers, in families with experts
    **llama_like.DEFAULTS,
    **MULTIPLIERS,
    "vocab_size": 32000,
    "num_key_value_heads": None,  # num_attention_heads
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def make_spec(c: Mapping[str, Any], windows: tuple[int | None, ...] | None = None) -> ModelSpec:
    """Read the spec from a config with its family's defaults. See llama_like.make_spec."""
    return replace(llama_like.make_spec(c, windows), attention=AttentionParams(float(c["attention_multiplier"])))


def multiply(linear: Linear, factor: float) -> Linear:
    """Return a linear layer whose output is multiplied by a factor."""
    if factor == 1:
        return linear
    bias = linear.bias
    weight = scale_rows(linear.weight, torch.full((linear.weight.shape[0],), factor))
    return Linear(weight, None if bias is None else bias * factor)


def load_mlp(w: Weights, bias: bool) -> GatedMLP:
    """Load the MLP of a layer without experts. Its last product takes the residual's multiplier."""
    mlp = llama_like.load_mlp(w, bias)
    down = multiply(mlp.down_proj, w.config["residual_multiplier"])
    return GatedMLP(mlp.gate_up_proj, down, w.config["hidden_act"])


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
    return MixtureOfExperts(load_gate(w, "router.layer" if "router.layer.weight" in w else "router"), experts)


def load_shared_mlp(w: Weights) -> Layer:
    """Load the MLP of all tokens and, if a layer has any, the experts beside it.

    Their last products take the residual's multiplier. Gates and up projections are one matrix, and two in GGUF files.
    """
    c = w.config
    down = multiply(load_linear(w, "shared_mlp.output_linear", bias=False), c["residual_multiplier"])
    is_one = "shared_mlp.input_linear.weight" in w
    names = ("shared_mlp.input_linear",) if is_one else ("shared_mlp.gate_proj", "shared_mlp.up_proj")
    mlp = GatedMLP(load_linear(w, *names, bias=False), down, c["hidden_act"])
    return SharedExpertMixture(load_mixture(w.scope("block_sparse_moe.")), mlp) if c["num_local_experts"] else mlp


def build_layer(
    w: Weights, i: int, s: ModelSpec, rope: Rope | None, tensors: llama_like.OptionalTensors, mlp: Layer | None = None
) -> PreNormLayer:
    """Build one layer from the weights in layers.<i>, with its own MLP or this one, which has the multiplier."""
    layer = llama_like.build_layer(w, i, s, rope, tensors, mlp or load_mlp(w.scope("mlp."), tensors.mlp_bias))
    o_proj = multiply(layer.attention.o_proj, w.config["residual_multiplier"])
    return replace(layer, attention=replace(layer.attention, o_proj=o_proj))


def build_decoder(
    w: Weights,
    s: ModelSpec,
    tensors: llama_like.OptionalTensors,
    build: Callable[..., PreNormLayer] = build_layer,
    ropes: Sequence[Rope | None] = (),
) -> Decoder:
    """Build a decoder from weights whose config has its family's defaults. See llama_like.build_decoder.

    The last norm divides logits by their scaling.
    """
    c = w.config
    decoder = llama_like.build_decoder(w, s, tensors, build, ropes)
    assert isinstance(decoder.norm, RMSNorm)
    norm = RMSNorm(decoder.norm.weight / w.logits_factor(c["logits_scaling"]), decoder.norm.eps)
    return replace(decoder, norm=norm, embedding=replace(decoder.embedding, scale=float(c["embedding_multiplier"])))
