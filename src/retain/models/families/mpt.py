"""MPT: ALiBi, a bias on q.k that falls with distance, in place of position embeddings (arXiv 2108.12409); no biases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from retain.kernels.attention_params import AttentionParams
from retain.models.decoder import Attention, Decoder, ModelSpec, PreNormLayer, load_ends, multi_head_spec
from retain.models.family_config import FamilyConfig, add_defaults, check_supported
from retain.models.layers import MLP, ClippedLinear, Embedding, load_layer_norm, load_linear
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    "vocab_size": 50368,
    "d_model": 2048,
    "n_heads": 16,
    "n_layers": 24,
    "max_seq_len": 2048,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
ATTENTION_DEFAULTS: Mapping[str, Any] = {"clip_qkv": None, "softmax_scale": None, "alibi_bias_max": 8}
OTHER_NAMES: Mapping[str, str] = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
}


def get_attention_config(c: Mapping[str, Any]) -> FamilyConfig:
    """Return the config of attention, an object of its own."""
    return add_defaults(c.get("attn_config") or {}, ATTENTION_DEFAULTS)


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    c = add_defaults(c, DEFAULTS, OTHER_NAMES)
    s = multi_head_spec(c, "d_model", "n_heads", "n_layers", "max_seq_len")
    a = get_attention_config(c)
    slopes = get_alibi_slopes(s.num_heads, a["alibi_bias_max"])
    scale = a["softmax_scale"] or s.attention.scale
    return replace(s, attention=AttentionParams(scale, alibi_slopes=torch.tensor(slopes)))


def get_alibi_slopes(num_heads: int, alibi_bias_max: float) -> tuple[float, ...]:
    """Return 2^-(max / H), 2^-(2 max / H), ... for the H heads.

    If H is not a power of 2, the slopes are those of the next power of 2: every second one first, then the others.
    """
    n = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2 ** (-alibi_bias_max * i / n) for i in range(1, n + 1)]
    return tuple(slopes if n == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])


def build_layer(w: Weights, i: int, s: ModelSpec) -> PreNormLayer:
    """Build one layer from the weights in blocks.<i>."""
    qkv = load_linear(w, "attn.Wqkv", bias=False)
    limit = get_attention_config(w.config)["clip_qkv"]
    out = load_linear(w, "attn.out_proj", bias=False)
    attention = Attention(i, s, ClippedLinear(qkv, limit) if limit else qkv, out)
    eps = w.config["layer_norm_epsilon"]
    norm1, norm2 = (load_layer_norm(w, n, eps, bias=False) for n in ("norm_1", "norm_2"))
    up, down = (load_linear(w, f"ffn.{n}", bias=False) for n in ("up_proj", "down_proj"))
    return PreNormLayer(norm1, attention, norm2, MLP(up, down, "gelu"))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS, OTHER_NAMES)
    c = w.config
    s = spec_from_config(w.config)
    a = get_attention_config(w.config)
    check_supported(c, no_bias=True, logit_scale=None)
    check_supported(a, alibi=True, qk_ln=False, prefix_lm=False)
    check_supported(a, attn_type="multihead_attention", kv_n_heads=s.num_heads)
    m, table, head = load_ends(w, "transformer.", "", embedding="wte")
    norm = load_layer_norm(m, "norm_f", c["layer_norm_epsilon"], bias=False)
    return Decoder(s, Embedding(table), lambda i: build_layer(m.scope(f"blocks.{i}."), i, s), norm, head)
