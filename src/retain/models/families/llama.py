"""Llama: RMS norms, rope, grouped query heads, a gated MLP (arXiv 2302.13971, 2307.09288).

Many families reuse it. Biases and norms of q and k heads are used where the checkpoint has them, a sliding window where
the config has one.
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
    """Read the spec from config.json. A `sliding_window` applies to all layers."""
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
    """Build one layer from the weights in layers.<i>."""
    eps, act = w.config["rms_norm_eps"], w.config.get("hidden_act", "silu")
    norm1, norm2 = (RMSNorm(w[f"{n}.weight"], eps) for n in ("input_layernorm", "post_attention_layernorm"))
    mlp = GatedMLP(load_linear(w, "mlp.gate_proj", "mlp.up_proj"), load_linear(w, "mlp.down_proj"), act)
    return PreNormLayer(norm1, build_attention(w.scope("self_attn."), i, s, rope, eps), norm2, mlp)


def build_attention(w: Weights, i: int, s: ModelSpec, rope: Rope, eps: float, norm_offset: float = 0.0) -> Attention:
    """Build the attention of one layer. Norms of q and k heads, if any, multiply by w + `norm_offset`."""
    norm = None
    if "q_norm.weight" in w:
        q = w["q_norm.weight"].float().expand(s.num_heads, -1)
        k = w["k_norm.weight"].float().expand(s.num_kv_heads, -1)
        norm = RMSNorm(torch.cat((q, k)) + norm_offset, eps)  # [H + G, D]
    return Attention(i, s, load_linear(w, "q_proj", "k_proj", "v_proj"), load_linear(w, "o_proj"), rope, norm)


def build(w: Weights, get_spec: Callable[[dict[str, Any]], ModelSpec] = spec_from_config) -> Decoder:
    """Build the decoder from weights with Hugging Face's names. `get_spec` is the family's spec_from_config."""
    c, s = w.config, get_spec(w.config)
    p = get_rope_parameters(c)
    check_supported(p, partial_rotary_factor=1.0)
    rope = get_rope(s.head_dim, p)
    m = scope_base_model(w, "embed_tokens.weight", "model.", "")
    embed = Embedding(m.load_matrix("embed_tokens.weight", embedding=True), dtype=m.dtype)
    norm = RMSNorm(m["norm.weight"], c["rms_norm_eps"])
    output = load_lm_head(w, "lm_head", embed.table, c.get("tie_word_embeddings", False))
    return Decoder(s, embed, lambda i: build_layer(m.scope(f"layers.{i}."), i, s, rope), norm, output, [rope])
