"""GLM-4.5, 4.6 and 4.7: half of each head rotated, DeepSeek-V3's experts (arXiv 2508.06471)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.kernels.rope import Rope
from retain.models import llama_like
from retain.models.decoder import Decoder, ModelSpec, PreNormLayer
from retain.models.experts import load_shared_mixture, load_sigmoid_router
from retain.models.family_config import MTPLayer, add_defaults, one_more_layer
from retain.models.rope import get_partial_rope
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    **llama_like.DEFAULTS,
    "vocab_size": 151552,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "use_qk_norm": False,
}
OTHER_NAMES: Mapping[str, str] = {"num_local_experts": "n_routed_experts"}
ROPE_DEFAULTS: Mapping[str, Any] = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
MTP_LAYER = MTPLayer(lambda c: one_more_layer(add_defaults(c, DEFAULTS)))


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. All layers have full attention."""
    return llama_like.make_spec(add_defaults(c, DEFAULTS, OTHER_NAMES))


def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope, tensors: llama_like.OptionalTensors) -> PreNormLayer:
    """Build one layer from the weights in layers.<i>."""
    m = w.scope("mlp.")
    has_experts = i >= w.config["first_k_dense_replace"]
    mlp = load_shared_mixture(m, load_sigmoid_router(m)) if has_experts else None
    return llama_like.build_layer(w, i, s, rope, tensors, mlp)


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS, OTHER_NAMES)
    c = w.config
    s = spec_from_config(c)
    rope = get_partial_rope(s.kv_cache.attention(0).k_dim, c, ROPE_DEFAULTS)
    tensors = llama_like.OptionalTensors(qkv_bias=c["attention_bias"], qk_norm=c["use_qk_norm"])
    return llama_like.build_decoder(w, s, tensors, build_layer, [rope])
