"""DeepSeek-V3: latent attention, whose cache has one head; experts in groups, one of all tokens (arXiv 2412.19437)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.models import llama_like
from retain.models.decoder import Decoder, ModelSpec
from retain.models.experts import load_shared_mixture, load_sigmoid_router
from retain.models.family_config import MTPLayer, add_defaults, one_more_layer
from retain.models.latent_attention import build_decoder, make_spec
from retain.models.layers import Layer
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "attention_bias": False,
}
OTHER_NAMES: Mapping[str, str] = {"num_local_experts": "n_routed_experts"}
MTP_LAYER = MTPLayer(lambda c: one_more_layer(add_defaults(c, DEFAULTS)))


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. All layers have full attention."""
    return make_spec(add_defaults(c, DEFAULTS, OTHER_NAMES))


def load_mlp(w: Weights, i: int) -> Layer:
    """Load the experts of layer i, or its MLP."""
    if i < w.config["first_k_dense_replace"]:
        return llama_like.load_mlp(w)
    return load_shared_mixture(w, load_sigmoid_router(w))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS, OTHER_NAMES)
    return build_decoder(w, spec_from_config(w.config), load_mlp, w.config["rope_interleave"])
