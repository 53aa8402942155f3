"""Llama: RMS norms, rope, grouped query heads, a gated MLP (arXiv 2302.13971, 2307.09288). Many families reuse it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from retain.kernels.attention_params import AttentionParams
from retain.kernels.kv_cache_spec import uniform_layers
from retain.kernels.rope import Rope
from retain.models.decoder import Attention, Decoder, DecoderLayer, ModelSpec, PreNormLayer, scope_base_model
from retain.models.family_config import add_defaults
from retain.models.layers import Embedding, GatedMLP, Layer, RMSNorm, load_linear, load_lm_head
from retain.models.rope import get_whole_head_rope
from retain.models.weights import Weights

SHARED_DEFAULTS: Mapping[str, Any] = {  # of the families that are built here; each has more
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "head_dim": None,  # hidden_size / num_attention_heads
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
DEFAULTS: Mapping[str, Any] = {  # of transformers
    **SHARED_DEFAULTS,
    "vocab_size": 32000,
    "num_key_value_heads": None,  # num_attention_heads
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
}


@dataclass(frozen=True)
class OptionalTensors:
    """The tensors that only some families have, or some models of a family."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def of_attention(cls, bias: bool, mlp_bias: bool = False, qk_norm: bool = False) -> OptionalTensors:
        """Return those where all linear layers of attention have biases, or none."""
        return cls(bias, bias, mlp_bias, qk_norm)


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. All layers have full attention."""
    c = add_defaults(c, DEFAULTS)
    return make_spec(c)


def make_spec(c: Mapping[str, Any], windows: tuple[int | None, ...] | None = None) -> ModelSpec:
    """Read the spec from a config with its family's defaults. Without `windows` all layers have full attention."""
    heads = c["num_attention_heads"]
    head_dim = c["head_dim"] or c["hidden_size"] // heads
    return ModelSpec(
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        num_heads=heads,
        max_position_embeddings=c["max_position_embeddings"],
        caches=uniform_layers(c["num_key_value_heads"] or heads, head_dim, windows or (None,) * c["num_hidden_layers"]),
        attention=AttentionParams(head_dim**-0.5),
    )


def load_mlp(w: Weights, bias: bool = False) -> GatedMLP:
    """Load a gated MLP from gate_proj, up_proj and down_proj."""
    gate_up = load_linear(w, "gate_proj", "up_proj", bias=bias)
    return GatedMLP(gate_up, load_linear(w, "down_proj", bias=bias), w.config["hidden_act"])


def build_layer(
    w: Weights, i: int, s: ModelSpec, rope: Rope | None, tensors: OptionalTensors, mlp: Layer | None = None
) -> PreNormLayer:
    """Build one layer from the weights in layers.<i>, with this MLP or its own."""
    eps = w.config["rms_norm_eps"]
    norm1, norm2 = (RMSNorm(w[f"{n}.weight"], eps) for n in ("input_layernorm", "post_attention_layernorm"))
    attention = build_attention(w.scope("self_attn."), i, s, rope, tensors)
    return PreNormLayer(norm1, attention, norm2, mlp or load_mlp(w.scope("mlp."), tensors.mlp_bias))


def build_attention(
    w: Weights, i: int, s: ModelSpec, rope: Rope | None, tensors: OptionalTensors, norm_offset: float = 0.0
) -> Attention:
    """Build the attention of one layer. Norms of q and k heads, if any, multiply by w + `norm_offset`."""
    norm = load_qk_norm(w, i, s, w.config["rms_norm_eps"], norm_offset) if tensors.qk_norm else None
    qkv = load_linear(w, "q_proj", "k_proj", "v_proj", bias=tensors.qkv_bias)
    return Attention(i, s, qkv, load_linear(w, "o_proj", bias=tensors.o_bias), rope, norm)


def load_qk_norm(
    w: Weights, i: int, s: ModelSpec, eps: float, offset: float = 0.0, names: tuple[str, str] = ("q_norm", "k_norm")
) -> RMSNorm:
    """Load the norm of the q and k heads of a layer, which multiplies by w + `offset`; `i` is its cache."""
    q, k = (w[f"{name}.weight"].float() for name in names)
    num_kv_heads = s.kv_cache.attention(i).num_kv_heads
    return RMSNorm(torch.cat((q.expand(s.num_heads, -1), k.expand(num_kv_heads, -1))) + offset, eps)  # [H + G, D]


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS)
    tensors = OptionalTensors.of_attention(w.config["attention_bias"], mlp_bias=w.config["mlp_bias"])
    return build_decoder(w, spec_from_config(w.config), tensors)


def build_decoder(
    w: Weights,
    s: ModelSpec,
    tensors: OptionalTensors,
    build: Callable[..., DecoderLayer] = build_layer,
    rope: Rope | None = None,
) -> Decoder:
    """Build a decoder from weights whose config has its family's defaults.

    `build` builds a layer, as build_layer. Without `rope` layers rotate whole heads as the config says.
    """
    rope = rope or get_whole_head_rope(s.kv_cache.attention(0).k_dim, w.config)
    m = scope_base_model(w, "embed_tokens.weight", "model.", "")
    table = m.load_matrix("embed_tokens.weight", embedding=True)
    tied_to = m.full_name("embed_tokens.weight") if w.config["tie_word_embeddings"] else None
    return Decoder(
        s,
        Embedding(table),
        lambda i: build(m.scope(f"layers.{i}."), i, s, rope, tensors),
        RMSNorm(m["norm.weight"], w.config["rms_norm_eps"]),
        load_lm_head(w, "lm_head", table, tied_to),
        [rope],
    )
