"""GPT-2: learned positions, layer norms before each branch, q, k and v in one matrix (Radford et al., 2019).

Cerebras-GPT has the same architecture (arXiv 2304.03208).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from retain.kernels.attention_params import AttentionParams
from retain.kernels.weights.weight import scale_rows
from retain.models.decoder import Attention, Decoder, ModelSpec, PreNormLayer, load_ends, multi_head_spec
from retain.models.family_config import GPT2_NAMES, add_defaults, check_supported
from retain.models.layers import MLP, Embedding, Linear, load_layer_norm, load_linear
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}
IGNORED_TENSORS = (r"attn\.bias", r"attn\.masked_bias")  # causal masks


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    c = add_defaults(c, DEFAULTS, GPT2_NAMES)
    s = multi_head_spec(c, "n_embd", "n_head", "n_layer", "n_positions")
    return s if c["scale_attn_weights"] else replace(s, attention=AttentionParams(scale=1.0))


def build_layer(w: Weights, i: int, s: ModelSpec) -> PreNormLayer:
    """Build one layer from the weights in h.<i>, whose matrices are stored [in, out]."""
    c = w.config
    qkv = load_linear(w, "attn.c_attn", bias=True, transposed=True)
    if c["scale_attn_by_inverse_layer_idx"]:
        qkv = scale_q(qkv, s, 1 / (i + 1))
    attention = Attention(i, s, qkv, load_linear(w, "attn.c_proj", bias=True, transposed=True))
    up, down = (load_linear(w, f"mlp.{n}", bias=True, transposed=True) for n in ("c_fc", "c_proj"))
    norm1, norm2 = (load_layer_norm(w, n, c["layer_norm_epsilon"]) for n in ("ln_1", "ln_2"))
    return PreNormLayer(norm1, attention, norm2, MLP(up, down, c["activation_function"]))


def scale_q(qkv: Linear, s: ModelSpec, factor: float) -> Linear:
    """Multiply the rows that compute q by a factor on q.k."""
    factors = torch.ones(3 * s.hidden_size)
    factors[: s.hidden_size] = factor
    bias = qkv.bias
    return Linear(scale_rows(qkv.weight, factors), None if bias is None else (bias * factors).to(bias.dtype))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names. The first GPT-2 files lack the prefix."""
    w = w.with_defaults(DEFAULTS, GPT2_NAMES)
    c = w.config
    s = spec_from_config(w.config)
    check_supported(c, add_cross_attention=False)
    m, table, head = load_ends(w, "transformer.", "", embedding="wte")
    embed = Embedding(table, position_table=m["wpe.weight"])
    norm = load_layer_norm(m, "ln_f", c["layer_norm_epsilon"])
    return Decoder(s, embed, lambda i: build_layer(m.scope(f"h.{i}."), i, s), norm, head)
