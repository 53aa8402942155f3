"""GLM-4: norms before and after both branches, the first half of a head rotated by neighbouring pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.kernels.rope import Rope
from retain.models.decoder import Decoder, ModelSpec
from retain.models.families import llama
from retain.models.families.gemma3_text import SandwichNormLayer
from retain.models.family_config import add_defaults
from retain.models.layers import GatedMLP, RMSNorm, load_linear
from retain.models.rope import get_partial_rope
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    "vocab_size": 151552,
    "hidden_size": 4096,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "tie_word_embeddings": False,
    "attention_bias": True,
}
ROPE_DEFAULTS: Mapping[str, Any] = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. All layers have full attention."""
    return llama.make_spec(add_defaults(c, DEFAULTS))


def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope, tensors: llama.OptionalTensors) -> SandwichNormLayer:
    """Build one layer from the weights in layers.<i>, whose gates are stacked over the up projection."""
    attention = llama.build_attention(w.scope("self_attn."), i, s, rope, tensors)
    gate_up, down = (load_linear(w, f"mlp.{name}", bias=False) for name in ("gate_up_proj", "down_proj"))
    mlp = GatedMLP(gate_up, down, w.config["hidden_act"])
    norm1, norm2, norm3, norm4 = (RMSNorm(w[f"{name}.weight"], w.config["rms_norm_eps"]) for name in NORMS)
    return SandwichNormLayer(norm1, attention, norm2, norm3, mlp, norm4)


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS)
    s = spec_from_config(w.config)
    rope = get_partial_rope(s.kv_cache.attention(0).k_dim, w.config, ROPE_DEFAULTS, interleaved=True)
    tensors = llama.OptionalTensors(qkv_bias=w.config["attention_bias"])
    return llama.build_decoder(w, s, tensors, build_layer, rope)
