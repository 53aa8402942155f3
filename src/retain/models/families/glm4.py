"""GLM-4: norms before and after both branches, the first half of a head rotated by neighbouring pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.kernels.rope import Rope
from retain.models import llama_like
from retain.models.decoder import Decoder, ModelSpec, SandwichNormLayer
from retain.models.family_config import add_defaults
from retain.models.layers import load_norm
from retain.models.rope import get_partial_rope
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    **llama_like.DEFAULTS,
    "vocab_size": 151552,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
}
ROPE_DEFAULTS: Mapping[str, Any] = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. All layers have full attention."""
    return llama_like.make_spec(add_defaults(c, DEFAULTS))


def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope, tensors: llama_like.OptionalTensors) -> SandwichNormLayer:
    """Build one layer from the weights in layers.<i>."""
    attention = llama_like.build_attention(w.scope("self_attn."), i, s, rope, tensors)
    norm1, norm2, norm3, norm4 = (load_norm(w, name, w.config["rms_norm_eps"]) for name in NORMS)
    return SandwichNormLayer(norm1, attention, norm2, norm3, llama_like.load_stacked_mlp(w.scope("mlp.")), norm4)


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS)
    s = spec_from_config(w.config)
    rope = get_partial_rope(s.kv_cache.attention(0).k_dim, w.config, ROPE_DEFAULTS, interleaved=True)
    tensors = llama_like.OptionalTensors(qkv_bias=w.config["attention_bias"])
    return llama_like.build_decoder(w, s, tensors, build_layer, [rope])
