"""Qwen3-Next: three layers of linear attention (arXiv 2412.06464) to one of attention with an output gate; experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from retain.kernels.linear_attention import LinearAttention
from retain.models import llama_like, qwen3_next_like
from retain.models.decoder import Decoder, ModelSpec
from retain.models.experts import has_experts
from retain.models.family_config import add_defaults
from retain.models.layers import Layer, Linear, load_linear
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    **qwen3_next_like.DEFAULTS,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
}
ROPE_DEFAULTS = qwen3_next_like.ROPE_DEFAULTS
MTP_LAYER = qwen3_next_like.mtp_layer(DEFAULTS)


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    return qwen3_next_like.make_spec(add_defaults(c, DEFAULTS))


def load_projections(w: Weights, p: LinearAttention) -> tuple[Linear, Linear, Linear]:
    """Load what gives [q | k | v], the gates and z. A file may have rows of all of them for each key head in turn."""
    K = p.num_key_heads
    D = p.k_dim
    H = p.num_value_heads // K  # value heads of a key head
    ba = load_linear(w, "in_proj_ba", bias=False)
    b, a = (part.flatten() for part in torch.arange(ba.weight.shape[0]).view(K, 2, -1).unbind(1))
    gates = ba.select(torch.cat((a, b)))
    if "in_proj_qkv.weight" in w:  # of a GGUF file
        return load_linear(w, "in_proj_qkv", bias=False), gates, load_linear(w, "in_proj_z", bias=False)
    qkvz = load_linear(w, "in_proj_qkvz", bias=False)
    rows = torch.arange(qkvz.weight.shape[0]).view(K, -1)
    q, k, v, z = (part.flatten() for part in torch.split(rows, [D, D, H * p.v_dim, H * p.v_dim], dim=1))
    return qkvz.select(torch.cat((q, k, v))), gates, qkvz.select(z)


def load_mlp(w: Weights, i: int) -> Layer:
    """Load the experts of layer i, or its MLP."""
    if not has_experts(w.config, i):
        return llama_like.load_mlp(w)
    return qwen3_next_like.load_mixture(w, w.config["norm_topk_prob"])


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS)
    return qwen3_next_like.build_decoder(w, spec_from_config(w.config), load_projections, load_mlp)
