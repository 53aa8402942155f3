"""Llama: RMS norms, rotary positions by halves, grouped queries, a gated MLP (arXiv 2302.13971, 2307.09288).

Much is built like it. Biases, and norms of the heads of q and k, are there where the file has them; a window where the
config has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from retain.models.decoder import Attention, Decoder, PreNorm, Spec, below, need
from retain.models.parts import Embedding, GatedMLP, RMSNorm, head, linear
from retain.models.rope import Rope, parameters, rope
from retain.models.weights import Weights


def spec(c: dict[str, Any]) -> Spec:
    """From config.json. All layers see as far as `sliding_window` says, if anything."""
    heads = c["num_attention_heads"]
    head_dim = c.get("head_dim") or c["hidden_size"] // heads
    return Spec(
        vocab=c["vocab_size"],
        hidden=c["hidden_size"],
        heads=heads,
        kv_heads=c.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        context=c["max_position_embeddings"],
        windows=(c.get("sliding_window"),) * c["num_hidden_layers"],
        scale=head_dim**-0.5,
    )


def layer(w: Weights, i: int, s: Spec, turn: Rope) -> PreNorm:
    """One layer, of the weights below layers.<i>."""
    eps, act = w.config["rms_norm_eps"], w.config.get("hidden_act", "silu")
    norm1, norm2 = (RMSNorm(w[f"{n}.weight"], eps) for n in ("input_layernorm", "post_attention_layernorm"))
    mlp = GatedMLP(linear(w, "mlp.gate_proj", "mlp.up_proj"), linear(w, "mlp.down_proj"), act)
    return PreNorm(norm1, attention(w.at("self_attn."), i, s, turn, eps), norm2, mlp)


def attention(w: Weights, i: int, s: Spec, turn: Rope, eps: float, plus: float = 0.0) -> Attention:
    """The attention of one layer. Norms of the heads of q and k, where there are such, multiply by w + `plus`."""
    norm = None
    if "q_norm.weight" in w:
        q, k = (w[f"{n}_norm.weight"].float().expand(heads, -1) for n, heads in (("q", s.heads), ("k", s.kv_heads)))
        norm = RMSNorm(torch.cat((q, k)) + plus, eps)  # [H + G, D]
    return Attention(i, s, linear(w, "q_proj", "k_proj", "v_proj"), linear(w, "o_proj"), turn, norm)


def build(w: Weights, spec: Callable[[dict[str, Any]], Spec] = spec) -> Decoder:
    """The decoder from weights in Hugging Face's names; `spec` is that of the family."""
    c, s = w.config, spec(w.config)
    p = parameters(c)
    need(p, partial_rotary_factor=1.0)
    turn = rope(s.head_dim, p)
    m = below(w, "embed_tokens.weight", "model.", "")
    embed = Embedding(m.matrix("embed_tokens.weight", embedding=True), dtype=m.dtype)
    norm = RMSNorm(m["norm.weight"], c["rms_norm_eps"])
    output = head(w, "lm_head", embed.table, c.get("tie_word_embeddings", False))
    return Decoder(s, embed, lambda i: layer(m.at(f"layers.{i}."), i, s, turn), norm, output, [turn])
