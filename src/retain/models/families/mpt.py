"""MPT: no positions but ALiBi, a bias on q.k that falls with distance (arXiv 2108.12409); no biases anywhere else."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from retain.models.decoder import Attention, Decoder, PreNorm, Spec, below, multi_head, need
from retain.models.parts import MLP, Clip, Embedding, head, layer_norm, linear
from retain.models.weights import Weights


def spec(c: dict[str, Any]) -> Spec:
    """From config.json."""
    s = multi_head(c["vocab_size"], c["d_model"], c["n_heads"], c["n_layers"], c["max_seq_len"])
    a = c.get("attn_config") or {}
    return replace(s, scale=a.get("softmax_scale") or s.scale, slopes=slopes(s.heads, a.get("alibi_bias_max", 8)))


def slopes(heads: int, largest: float) -> tuple[float, ...]:
    """2^-(largest / H), 2^-(2 largest / H), ... Where H is no power of 2: of the next one's, every second first."""
    n = 2 ** math.ceil(math.log2(heads))
    s = [2 ** (-largest * i / n) for i in range(1, n + 1)]
    return tuple(s if n == heads else (s[1::2] + s[::2])[:heads])


def layer(w: Weights, i: int, s: Spec) -> PreNorm:
    """One layer, of the weights below blocks.<i>."""
    qkv, at = linear(w, "attn.Wqkv"), (w.config.get("attn_config") or {}).get("clip_qkv")
    attention = Attention(i, s, Clip(qkv, at) if at else qkv, linear(w, "attn.out_proj"))
    norm1, norm2 = (layer_norm(w, n, w.config.get("layer_norm_epsilon", 1e-5)) for n in ("norm_1", "norm_2"))
    return PreNorm(norm1, attention, norm2, MLP(linear(w, "ffn.up_proj"), linear(w, "ffn.down_proj"), "gelu"))


def build(w: Weights) -> Decoder:
    """The decoder from weights in Hugging Face's names."""
    c, s = w.config, spec(w.config)
    need(c, no_bias=True, logit_scale=None)
    need(a := c.get("attn_config") or {}, alibi=True, qk_ln=False, prefix_lm=False)
    need(a, attn_type="multihead_attention", kv_n_heads=s.heads)
    m = below(w, "wte.weight", "transformer.", "")
    embed = Embedding(m.matrix("wte.weight", embedding=True), dtype=m.dtype)
    norm = layer_norm(m, "norm_f", c.get("layer_norm_epsilon", 1e-5))
    output = head(w, "lm_head", embed.table, c.get("tie_word_embeddings", True))
    return Decoder(s, embed, lambda i: layer(m.at(f"blocks.{i}."), i, s), norm, output)
