"""GPT-NeoX, Pythia: attention and MLP in parallel, each with a norm; rope on part of each head (arXiv 2204.06745)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from retain.kernels.rope import Rope
from retain.models.decoder import Attention, Decoder, ModelSpec, ParallelLayer, PreNormLayer, load_ends, multi_head_spec
from retain.models.family_config import add_defaults
from retain.models.layers import MLP, Embedding, Linear, load_layer_norm, load_linear
from retain.models.rope import get_rope, get_rope_parameters
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    "vocab_size": 50432,
    "hidden_size": 6144,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "use_parallel_residual": True,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
ROPE_DEFAULTS: Mapping[str, Any] = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
IGNORED_TENSORS = (r"attention\.bias", r"attention\.masked_bias")  # causal masks


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    return multi_head_spec(add_defaults(c, DEFAULTS))


def regroup_qkv(qkv: Linear, s: ModelSpec) -> Linear:
    """Reorder rows: the file has q, k and v of each head in turn; Attention wants all q, then all k, then all v."""
    order = torch.arange(qkv.weight.shape[0]).view(s.num_heads, 3, -1).transpose(0, 1).flatten()  # [3 H D]
    return qkv.select(order)


def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope) -> ParallelLayer | PreNormLayer:
    """Build one layer from the weights in layers.<i>."""
    c = w.config
    has_bias = w.config["attention_bias"]
    qkv = regroup_qkv(load_linear(w, "attention.query_key_value", bias=has_bias), s)
    attention = Attention(i, s, qkv, load_linear(w, "attention.dense", bias=has_bias), rope)
    norm1, norm2 = (load_layer_norm(w, n, c["layer_norm_eps"]) for n in ("input_layernorm", "post_attention_layernorm"))
    up, down = (load_linear(w, f"mlp.{n}", bias=True) for n in ("dense_h_to_4h", "dense_4h_to_h"))
    layer = ParallelLayer if c["use_parallel_residual"] else PreNormLayer
    return layer(norm1, attention, norm2, MLP(up, down, c["hidden_act"]))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names. Old configs name rope's options in their own way."""
    w = w.with_defaults(DEFAULTS)
    c = w.config
    s = spec_from_config(w.config)
    p = get_rope_parameters(c, "rotary_emb_base", "rotary_pct", ROPE_DEFAULTS)
    rope = get_rope(int(s.kv_cache.attention(0).k_dim * p["partial_rotary_factor"]), p)
    name = "embed_out" if "embed_out.weight" in w else "lm_head"
    m, table, head = load_ends(w, "gpt_neox.", "", embedding="embed_in", head=name)
    norm = load_layer_norm(m, "final_layer_norm", c["layer_norm_eps"])
    return Decoder(s, Embedding(table), lambda i: build_layer(m.scope(f"layers.{i}."), i, s, rope), norm, head, [rope])
