"""MPT: ALiBi, a bias on q.k that falls with distance, in place of position embeddings (arXiv 2108.12409); no biases."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from retain.models.decoder import (
    Attention,
    Decoder,
    ModelSpec,
    PreNormLayer,
    check_supported,
    multi_head_spec,
    scope_base_model,
)
from retain.models.layers import MLP, ClippedLinear, Embedding, load_layer_norm, load_linear, load_lm_head
from retain.models.weights import Weights


def spec_from_config(c: dict[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    s = multi_head_spec(c["vocab_size"], c["d_model"], c["n_heads"], c["n_layers"], c["max_seq_len"])
    a = c.get("attn_config") or {}
    return replace(
        s,
        scale=a.get("softmax_scale") or s.scale,
        alibi_slopes=get_alibi_slopes(s.num_heads, a.get("alibi_bias_max", 8)),
    )


def get_alibi_slopes(num_heads: int, alibi_bias_max: float) -> tuple[float, ...]:
    """Return 2^-(max / H), 2^-(2 max / H), ... for the H heads.

    If H is not a power of 2, the slopes are those of the next power of 2: every second one first, then the others.
    """
    n = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2 ** (-alibi_bias_max * i / n) for i in range(1, n + 1)]
    return tuple(slopes if n == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])


def build_layer(w: Weights, i: int, s: ModelSpec) -> PreNormLayer:
    """Build one layer from the weights in blocks.<i>."""
    qkv, limit = load_linear(w, "attn.Wqkv"), (w.config.get("attn_config") or {}).get("clip_qkv")
    attention = Attention(i, s, ClippedLinear(qkv, limit) if limit else qkv, load_linear(w, "attn.out_proj"))
    norm1, norm2 = (load_layer_norm(w, n, w.config.get("layer_norm_epsilon", 1e-5)) for n in ("norm_1", "norm_2"))
    mlp = MLP(load_linear(w, "ffn.up_proj"), load_linear(w, "ffn.down_proj"), "gelu")
    return PreNormLayer(norm1, attention, norm2, mlp)


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    c, s = w.config, spec_from_config(w.config)
    check_supported(c, no_bias=True, logit_scale=None)
    check_supported(a := c.get("attn_config") or {}, alibi=True, qk_ln=False, prefix_lm=False)
    check_supported(a, attn_type="multihead_attention", kv_n_heads=s.num_heads)
    m = scope_base_model(w, "wte.weight", "transformer.", "")
    embed = Embedding(m.load_matrix("wte.weight", embedding=True), dtype=m.dtype)
    norm = load_layer_norm(m, "norm_f", c.get("layer_norm_epsilon", 1e-5))
    output = load_lm_head(w, "lm_head", embed.table, c.get("tie_word_embeddings", True))
    return Decoder(s, embed, lambda i: build_layer(m.scope(f"blocks.{i}."), i, s), norm, output)
