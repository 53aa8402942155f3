"""GLM-4.7-Flash: DeepSeek-V3 with fewer and larger heads, and a list of the layers that have experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.models import llama_like
from retain.models.decoder import Decoder, ModelSpec
from retain.models.experts import load_shared_mixture, load_sigmoid_router
from retain.models.family_config import (
    MTPLayer,
    add_defaults,
    check_supported,
    get_layer_types,
    one_more_layer,
)
from retain.models.latent_attention import build_decoder, make_spec
from retain.models.layers import Layer
from retain.models.rope import get_rope_parameters
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    "vocab_size": 154880,
    "hidden_size": 2048,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.8,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "qk_nope_head_dim": 192,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "mlp_layer_types": None,  # experts in all layers but the first
    "attention_bias": False,
}
OTHER_NAMES: Mapping[str, str] = {"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"}
MLP_TYPES = ("dense", "sparse")


def read_mlp_types(c: Mapping[str, Any]) -> list[str]:
    """Return which layers have experts."""
    default = ["dense"] + ["sparse"] * (c["num_hidden_layers"] - 1)
    return get_layer_types(c, default, MLP_TYPES, key="mlp_layer_types")


def add_mtp_layer(c: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a config says with the MTP layer as its last: it has experts."""
    c = add_defaults(c, DEFAULTS)
    return one_more_layer(c, mlp_layer_types=[*read_mlp_types(c), "sparse"])


MTP_LAYER = MTPLayer(add_mtp_layer)


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. All layers have full attention."""
    return make_spec(add_defaults(c, DEFAULTS, OTHER_NAMES))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS, OTHER_NAMES)
    c = w.config
    check_supported(get_rope_parameters(c), partial_rotary_factor=1.0)
    types = read_mlp_types(c)

    def load_mlp(w: Weights, i: int) -> Layer:
        return load_shared_mixture(w, load_sigmoid_router(w)) if types[i] == "sparse" else llama_like.load_mlp(w)

    return build_decoder(w, spec_from_config(c), load_mlp, c["rope_interleave"])
