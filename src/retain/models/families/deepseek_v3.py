"""DeepSeek-V3: latent attention, whose cache has one head; experts in groups, and one of all tokens (arXiv 2412.19437).

glm4_moe and glm4_moe_lite have such experts, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from retain.kernels.experts import Router
from retain.kernels.rope import Rope
from retain.models.decoder import Decoder, ModelSpec, PreNormLayer
from retain.models.experts import MixtureOfExperts, SharedExpertMixture, load_experts
from retain.models.families import llama
from retain.models.family_config import add_defaults
from retain.models.latent_attention import load_attention, make_spec
from retain.models.layers import Layer, Linear, RMSNorm
from retain.models.rope import ROPE_DEFAULTS, get_whole_head_rope
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

LoadMLP = Callable[[Weights, int], Layer]


def ignored_tensors(c: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the block behind the last layer, which predicts further tokens."""
    return (rf"layers\.{add_defaults(c, DEFAULTS)['num_hidden_layers']}\..*",)


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. All layers have full attention."""
    return make_spec(add_defaults(c, DEFAULTS, OTHER_NAMES), ROPE_DEFAULTS)


def load_router(w: Weights) -> Router:
    """Load the router of a layer. The bias of scores only chooses."""
    c = w.config
    return Router(
        c["num_experts_per_tok"],
        is_sigmoid=True,
        normalize=c["norm_topk_prob"],
        scale=c["routed_scaling_factor"],
        bias=w["gate.e_score_correction_bias"].float(),
        num_groups=c["n_group"],
        top_groups=c["topk_group"],
    )


def load_mixture(w: Weights) -> Layer:
    """Load the experts of a layer, and those of all tokens, which are one MLP."""
    c = w.config
    experts = load_experts(w, c["n_routed_experts"], load_router(w), c["hidden_act"])
    mixture = MixtureOfExperts(Linear(w["gate.weight"].to(torch.float32)), experts)
    return SharedExpertMixture(mixture, llama.load_mlp(w.scope("shared_experts.")))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS, OTHER_NAMES)
    num_dense = w.config["first_k_dense_replace"]

    def load_mlp(w: Weights, i: int) -> Layer:
        return load_mixture(w) if i >= num_dense else llama.load_mlp(w)

    return build_decoder(w, spec_from_config(w.config), load_mlp, w.config["rope_interleave"])


def build_decoder(w: Weights, s: ModelSpec, load_mlp: LoadMLP, interleaved: bool) -> Decoder:
    """Build a decoder from weights whose config has its family's defaults."""
    c = w.config
    rope = get_whole_head_rope(c["qk_rope_head_dim"], c, interleaved=interleaved)

    def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope, _: llama.OptionalTensors) -> PreNormLayer:
        norms = (RMSNorm(w[f"{n}.weight"], c["rms_norm_eps"]) for n in ("input_layernorm", "post_attention_layernorm"))
        norm1, norm2 = norms
        attention = load_attention(w.scope("self_attn."), i, s, rope)
        return PreNormLayer(norm1, attention, norm2, load_mlp(w.scope("mlp."), i))

    return llama.build_decoder(w, s, llama.OptionalTensors(), build_layer, rope)
