"""DeepSeek-V2: latent attention as in DeepSeek-V3; experts by their softmax, in groups or not (arXiv 2405.04434)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.files import quote
from retain.kernels.experts import Router
from retain.models import llama_like
from retain.models.decoder import Decoder, ModelSpec
from retain.models.experts import load_shared_mixture
from retain.models.family_config import MTPLayer, add_defaults, one_more_layer
from retain.models.latent_attention import build_decoder, make_spec
from retain.models.layers import Layer
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    "vocab_size": 102400,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": None,
    "n_group": None,
    "topk_group": None,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
}
OTHER_NAMES: Mapping[str, str] = {"num_experts": "n_routed_experts"}
MTP_LAYER = MTPLayer(lambda c: one_more_layer(add_defaults(c, DEFAULTS)))


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. All layers have full attention."""
    return make_spec(add_defaults(c, DEFAULTS, OTHER_NAMES))


def make_router(c: Mapping[str, Any]) -> Router:
    """Return the router of all layers. Weights are never divided by their sum, whatever `norm_topk_prob` says."""
    top_k = c["num_experts_per_tok"]
    scale = c["routed_scaling_factor"]
    if c["topk_method"] == "greedy":
        return Router(top_k, normalize=False, scale=scale)
    if c["topk_method"] != "group_limited_greedy":
        raise ValueError(f"topk_method {quote(c['topk_method'])} is not supported: greedy or group_limited_greedy")
    groups = c["n_group"], c["topk_group"]
    return Router(top_k, normalize=False, scale=scale, num_groups=groups[0], top_groups=groups[1], group_best=1)


def load_mlp(w: Weights, i: int) -> Layer:
    """Load the experts of layer i with those of all tokens, which are one MLP; or its MLP."""
    c = w.config
    if i < c["first_k_dense_replace"]:
        return llama_like.load_mlp(w, c["mlp_bias"])
    return load_shared_mixture(w, make_router(c), c["mlp_bias"])


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS, OTHER_NAMES)
    return build_decoder(w, spec_from_config(w.config), load_mlp)
