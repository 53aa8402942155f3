"""Llama: RMS norms, rotary positions by halves, grouped queries, a gated MLP (arXiv 2302.13971, 2307.09288).

Much is built like it. Biases, and norms of the heads of q and k, are there where the file has them; a window where the
config has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from retain.models.decoder import Attention, Decoder, ModelSpec, PreNormLayer, check_supported, scope_base_model
from retain.models.layers import Embedding, GatedMLP, RMSNorm, load_linear, load_lm_head
from retain.models.rope import Rope, get_rope, get_rope_parameters
from retain.models.weights import Weights


def spec_from_config(c: dict[str, Any]) -> ModelSpec:
    """From config.json. All layers see as far as `sliding_window` says, if anything."""
    heads = c["num_attention_heads"]
    head_dim = c.get("head_dim") or c["hidden_size"] // heads
    return ModelSpec(
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        num_heads=heads,
        num_kv_heads=c.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_position_embeddings=c["max_position_embeddings"],
        windows=(c.get("sliding_window"),) * c["num_hidden_layers"],
        scale=head_dim**-0.5,
    )


def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope) -> PreNormLayer:
    """One layer, of the weights below layers.<i>."""
    eps, act = w.config["rms_norm_eps"], w.config.get("hidden_act", "silu")
    norm1, norm2 = (RMSNorm(w[f"{n}.weight"], eps) for n in ("input_layernorm", "post_attention_layernorm"))
    mlp = GatedMLP(load_linear(w, "mlp.gate_proj", "mlp.up_proj"), load_linear(w, "mlp.down_proj"), act)
    return PreNormLayer(norm1, build_attention(w.scope("self_attn."), i, s, rope, eps), norm2, mlp)


def build_attention(w: Weights, i: int, s: ModelSpec, rope: Rope, eps: float, norm_offset: float = 0.0) -> Attention:
    """The attention of one layer. Norms of the heads of q and k, where there are such, multiply by w + `plus`."""
    norm = None
    if "q_norm.weight" in w:
        q, k = (
            w[f"{n}_norm.weight"].float().expand(heads, -1) for n, heads in (("q", s.num_heads), ("k", s.num_kv_heads))
        )
        norm = RMSNorm(torch.cat((q, k)) + norm_offset, eps)  # [H + G, D]
    return Attention(i, s, load_linear(w, "q_proj", "k_proj", "v_proj"), load_linear(w, "o_proj"), rope, norm)


def build(w: Weights, get_spec: Callable[[dict[str, Any]], ModelSpec] = spec_from_config) -> Decoder:
    """The decoder from weights in Hugging Face's names; `spec` is that of the family."""
    c, s = w.config, get_spec(w.config)
    p = get_rope_parameters(c)
    check_supported(p, partial_rotary_factor=1.0)
    turn = get_rope(s.head_dim, p)
    m = scope_base_model(w, "embed_tokens.weight", "model.", "")
    embed = Embedding(m.load_matrix("embed_tokens.weight", embedding=True), dtype=m.dtype)
    norm = RMSNorm(m["norm.weight"], c["rms_norm_eps"])
    output = load_lm_head(w, "lm_head", embed.table, c.get("tie_word_embeddings", False))
    return Decoder(s, embed, lambda i: build_layer(m.scope(f"layers.{i}."), i, s, turn), norm, output, [turn])
