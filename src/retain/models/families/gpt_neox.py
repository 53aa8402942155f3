"""GPT-NeoX, Pythia: attention beside MLP, each behind its norm; a part of each head is turned (arXiv 2204.06745)."""

from __future__ import annotations

from typing import Any

import torch

from retain.kernels.matrix import rows
from retain.models.decoder import Attention, Decoder, Parallel, PreNorm, Spec, below, multi_head
from retain.models.parts import MLP, Embedding, Linear, head, layer_norm, linear
from retain.models.rope import Rope, parameters, rope
from retain.models.weights import Weights


def spec(c: dict[str, Any]) -> Spec:
    """From config.json."""
    layers, context = c["num_hidden_layers"], c["max_position_embeddings"]
    return multi_head(c["vocab_size"], c["hidden_size"], c["num_attention_heads"], layers, context)


def regroup(qkv: Linear, s: Spec) -> Linear:
    """The file has q, k, v of the first head, then of the second, ...: all of q, then all of k, then all of v."""

    order = torch.arange(qkv.weight.shape[0]).view(s.heads, 3, s.head_dim).transpose(0, 1).flatten()  # [3 H D]
    return Linear(rows(qkv.weight, order), None if qkv.bias is None else qkv.bias[order])


def layer(w: Weights, i: int, s: Spec, turn: Rope) -> Parallel | PreNorm:
    """One layer, of the weights below layers.<i>."""
    c = w.config
    qkv = regroup(linear(w, "attention.query_key_value"), s)
    norm1, norm2 = (layer_norm(w, n, c["layer_norm_eps"]) for n in ("input_layernorm", "post_attention_layernorm"))
    mlp = MLP(linear(w, "mlp.dense_h_to_4h"), linear(w, "mlp.dense_4h_to_h"), c["hidden_act"])
    kind = Parallel if c.get("use_parallel_residual", True) else PreNorm
    return kind(norm1, Attention(i, s, qkv, linear(w, "attention.dense"), turn), norm2, mlp)


def build(w: Weights) -> Decoder:
    """The decoder from weights in Hugging Face's names. They name rope's base and part in their own way, too."""
    c, s = w.config, spec(w.config)
    p = {"partial_rotary_factor": c.get("rotary_pct", 0.25), **parameters(c, theta=c.get("rotary_emb_base", 10000.0))}
    turn = rope(int(s.head_dim * p["partial_rotary_factor"]), p)
    m = below(w, "embed_in.weight", "gpt_neox.", "")
    embed = Embedding(m.matrix("embed_in.weight", embedding=True), dtype=m.dtype)
    name = "embed_out" if "embed_out.weight" in w else "lm_head"
    norm = layer_norm(m, "final_layer_norm", c["layer_norm_eps"])
    output = head(w, name, embed.table, c.get("tie_word_embeddings", False))
    return Decoder(s, embed, lambda i: layer(m.at(f"layers.{i}."), i, s, turn), norm, output, [turn])
