"""gpt-oss: experts with biases, a window in every other layer, a sink logit for each head (arXiv 2508.10925)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from retain.kernels.experts import Experts, Router
from retain.kernels.rope import Rope
from retain.kernels.weights.weight import select_rows
from retain.models import llama_like
from retain.models.decoder import Decoder, ModelSpec, PreNormLayer
from retain.models.experts import MixtureOfExperts, load_single_experts
from retain.models.family_config import add_defaults, check_supported, get_alternating_types, get_windows
from retain.models.layers import Linear
from retain.models.rope import get_whole_head_rope
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    "vocab_size": 201088,
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
OTHER_NAMES: Mapping[str, str] = {"num_experts": "num_local_experts"}
THETA: Mapping[str, Any] = {"rope_theta": 150000.0}
ROPE_DEFAULTS: Mapping[str, Any] = {  # where the config says nothing
    **THETA,
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    c = add_defaults(c, DEFAULTS, OTHER_NAMES)
    return llama_like.make_spec(c, get_windows(get_alternating_types(c, 2), c["sliding_window"]))


def load_experts(w: Weights, num_experts: int, router: Router) -> Experts:
    """Load the experts of a layer, from a GGUF file, or stacked, dense or in MXFP4.

    Stacked gates and up projections take turns, row by row; dense matrices are stored [n, in, out].
    """
    act = "swiglu_oai"
    if "experts.gate_up_proj_bias" not in w:
        return load_single_experts(w, num_experts, router, act, bias=True)
    rows = torch.arange(w["experts.gate_up_proj_bias"].numel())
    rows = rows.view(num_experts, -1, 2).transpose(1, 2).flatten()
    gate_up = select_rows(w.load_stack("experts.gate_up_proj", num_experts, transposed=True), rows)
    down = w.load_stack("experts.down_proj", num_experts, transposed=True)
    gate_up_bias = w["experts.gate_up_proj_bias"].flatten()[rows]
    return Experts(num_experts, gate_up, down, router, act, gate_up_bias, w["experts.down_proj_bias"].flatten())


def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope, tensors: llama_like.OptionalTensors) -> PreNormLayer:
    """Build one layer from the weights in layers.<i>."""
    c = w.config
    router = Linear(w["mlp.router.weight"], w["mlp.router.bias"])
    experts = load_experts(w.scope("mlp."), c["num_local_experts"], Router(c["num_experts_per_tok"]))
    layer = llama_like.build_layer(w, i, s, rope, tensors, MixtureOfExperts(router, experts))
    params = replace(s.attention, sink_logits=w["self_attn.sinks"].float())
    return replace(layer, attention=replace(layer.attention, own_params=params))


def get_gpt_oss_rope(c: Mapping[str, Any], dim: int) -> Rope:
    """Return the Rope of all layers."""
    is_given = c.get("rope_scaling") or c.get("rope_parameters")
    return get_whole_head_rope(dim, c, THETA if is_given else ROPE_DEFAULTS)


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS, OTHER_NAMES)
    c = w.config
    check_supported(c, swiglu_alpha=1.702, swiglu_limit=7.0)
    s = spec_from_config(c)
    tensors = llama_like.OptionalTensors.of_attention(c["attention_bias"])
    return llama_like.build_decoder(w, s, tensors, build_layer, [get_gpt_oss_rope(c, s.kv_cache.attention(0).k_dim)])
