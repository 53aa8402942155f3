"""GPT-2: learned positions, layer norms before each branch, q, k and v in one product (Radford et al., 2019).

Cerebras-GPT is one (arXiv 2304.03208).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from retain.kernels.matrix import scale_rows
from retain.models.decoder import Attention, Decoder, PreNorm, Spec, below, multi_head, need
from retain.models.parts import MLP, Embedding, Linear, head, layer_norm, linear
from retain.models.weights import Weights


def spec(c: dict[str, Any]) -> Spec:
    """From config.json."""
    s = multi_head(c["vocab_size"], c["n_embd"], c["n_head"], c["n_layer"], c["n_positions"])
    return s if c.get("scale_attn_weights", True) else replace(s, scale=1.0)


def layer(w: Weights, i: int, s: Spec) -> PreNorm:
    """One layer, of the weights below h.<i>. They are stored [in, out]."""
    c = w.config
    qkv = linear(w, "attn.c_attn", transposed=True)
    if c.get("scale_attn_by_inverse_layer_idx"):
        qkv = shrink_q(qkv, s, 1 / (i + 1))
    attention = Attention(i, s, qkv, linear(w, "attn.c_proj", transposed=True))
    up, down = (linear(w, f"mlp.{n}", transposed=True) for n in ("c_fc", "c_proj"))
    norm1, norm2 = (layer_norm(w, n, c["layer_norm_epsilon"]) for n in ("ln_1", "ln_2"))
    return PreNorm(norm1, attention, norm2, MLP(up, down, c.get("activation_function", "gelu_new")))


def shrink_q(qkv: Linear, s: Spec, factor: float) -> Linear:
    """A layer's own factor on q.k, moved into the rows that make q."""
    by = torch.ones(3 * s.hidden)
    by[: s.hidden] = factor
    bias = qkv.bias
    return Linear(scale_rows(qkv.weight, by), None if bias is None else (bias * by).to(bias.dtype))


def build(w: Weights) -> Decoder:
    """The decoder from weights in Hugging Face's names; the first GPT-2 files lack the prefix."""
    c, s = w.config, spec(w.config)
    need(c, add_cross_attention=False)
    m = below(w, "wte.weight", "transformer.", "")
    embed = Embedding(m.matrix("wte.weight", embedding=True), places=m["wpe.weight"], dtype=m.dtype)
    norm = layer_norm(m, "ln_f", c["layer_norm_epsilon"])
    output = head(w, "lm_head", embed.table, c.get("tie_word_embeddings", True))
    return Decoder(s, embed, lambda i: layer(m.at(f"h.{i}."), i, s), norm, output)
