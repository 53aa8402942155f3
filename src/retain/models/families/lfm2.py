"""LFM2: short convolutions, and attention in some layers (arXiv 2511.23404)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from retain.files import quote
from retain.kernels.kv_cache_spec import ConvolutionSpec, convolution_spec
from retain.kernels.rope import Rope
from retain.models.decoder import Attention, Decoder, DecoderLayer, ModelSpec, PreNormLayer, scope_base_model
from retain.models.families import llama
from retain.models.family_config import add_defaults, get_layer_types
from retain.models.layers import Embedding, GatedMLP, Layer, RMSNorm, load_linear, load_lm_head
from retain.models.linear_attention import (
    ShortConvolution,
    StateLayer,
    load_convolution_weight,
    split_short_convolution,
)
from retain.models.rope import get_whole_head_rope
from retain.models.weights import Weights

SHARED_DEFAULTS: Mapping[str, Any] = {  # of lfm2_moe, too
    "vocab_size": 65536,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,  # hidden_size / num_attention_heads
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
}
DEFAULTS: Mapping[str, Any] = {**SHARED_DEFAULTS, "hidden_size": 2560, "full_attn_idxs": None}  # of transformers
OTHER_NAMES: Mapping[str, str] = {"tie_embedding": "tie_word_embeddings"}
ROPE_DEFAULTS: Mapping[str, Any] = {"rope_theta": 1000000.0}
LAYER_TYPES = ("conv", "full_attention")

LoadMLP = Callable[[Weights, int], Layer]


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    c = add_defaults(c, DEFAULTS, OTHER_NAMES)
    n = c["num_hidden_layers"]
    indices = range(n) if c["full_attn_idxs"] is None else c["full_attn_idxs"]
    if not isinstance(indices, list | range) or any(type(i) is not int for i in indices):
        raise ValueError(f"full_attn_idxs is {quote(indices)}, not a list of layers")
    attending = frozenset(indices)
    return make_spec(c, [LAYER_TYPES[i in attending] for i in range(n)])


def make_spec(c: Mapping[str, Any], default_types: list[str] | None) -> ModelSpec:
    """Read the spec from a config with its family's defaults. `default_types` are those of a config without any."""
    layer_types = get_layer_types(c, default_types or (), LAYER_TYPES)
    spec = llama.make_spec(c)
    convolution: ConvolutionSpec | None = None
    if "conv" in layer_types:
        head_dim = c["head_dim"] or c["hidden_size"] // c["num_attention_heads"]
        convolution = convolution_spec(c["hidden_size"], c["conv_L_cache"], head_dim // 2)
    kinds = zip(layer_types, spec.caches, strict=True)
    return replace(spec, caches=tuple(convolution if convolution and t == "conv" else layer for t, layer in kinds))


def load_mlp(w: Weights, i: int) -> GatedMLP:
    """Load the gated MLP of a layer."""
    return GatedMLP(load_linear(w, "w1", "w3", bias=False), load_linear(w, "w2", bias=False), "silu")


def load_convolution(w: Weights, i: int) -> ShortConvolution:
    """Load the convolution of layer i."""
    c = w.config
    has_bias = c["conv_bias"]
    weight = load_convolution_weight(w, "conv.weight", c["hidden_size"], c["conv_L_cache"])
    gates, inputs = split_short_convolution(load_linear(w, "in_proj", bias=has_bias))
    bias = w["conv.bias"] if has_bias else None
    return ShortConvolution(i, gates, inputs, weight, bias, load_linear(w, "out_proj", bias=has_bias))


def load_attention(w: Weights, i: int, s: ModelSpec, rope: Rope) -> Attention:
    """Load the attention of layer i."""
    norm = llama.load_qk_norm(w, i, s, w.config["norm_eps"], names=("q_layernorm", "k_layernorm"))
    qkv = load_linear(w, "q_proj", "k_proj", "v_proj", bias=False)
    return Attention(i, s, qkv, load_linear(w, "out_proj", bias=False), rope, norm)


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS, OTHER_NAMES)
    return build_decoder(w, spec_from_config(w.config), load_mlp)


def build_decoder(w: Weights, s: ModelSpec, load_mlp: LoadMLP) -> Decoder:
    """Build a decoder from weights whose config has its family's defaults."""
    c = w.config
    eps = c["norm_eps"]
    rope = get_whole_head_rope(c["head_dim"] or s.hidden_size // s.num_heads, c, ROPE_DEFAULTS)
    m = scope_base_model(w, "embed_tokens.weight", "model.", "")
    table = m.load_matrix("embed_tokens.weight", embedding=True)
    tied_to = m.full_name("embed_tokens.weight") if c["tie_word_embeddings"] else None

    def load_layer(i: int) -> DecoderLayer:
        layer = m.scope(f"layers.{i}.")
        norm1, norm2 = (RMSNorm(layer[f"{name}.weight"], eps) for name in ("operator_norm", "ffn_norm"))
        mlp = load_mlp(layer.scope("feed_forward."), i)
        if isinstance(s.caches[i], ConvolutionSpec):
            return StateLayer(s.hidden_size, norm1, load_convolution(layer.scope("conv."), i), norm2, mlp)
        return PreNormLayer(norm1, load_attention(layer.scope("self_attn."), i, s, rope), norm2, mlp)

    norm = RMSNorm(m["embedding_norm.weight"], eps)
    return Decoder(s, Embedding(table), load_layer, norm, load_lm_head(w, "lm_head", table, tied_to), [rope])
