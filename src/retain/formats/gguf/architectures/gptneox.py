"""GPT-NeoX and Pythia."""

from __future__ import annotations

import torch
from torch import Tensor

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig, common_config, get_share, read_rope_scaling


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of GPT-NeoX and Pythia."""
    c = common_config(meta)
    dim = max(1, c["hidden_size"] // c["num_attention_heads"])
    return c | {
        "model_type": "gpt_neox",
        "layer_norm_eps": meta.require("attention.layer_norm_epsilon", float),
        "rotary_pct": get_share(meta.get_positive("rope.dimension_count", dim), dim),
        "rotary_emb_base": meta.get("rope.freq_base", 10000.0),
        "rope_scaling": read_rope_scaling(meta),
        "use_parallel_residual": meta.require("use_parallel_residual", bool),
        "hidden_act": "gelu",
        "attention_bias": "blk.0.attn_qkv.bias" in meta.tensor_shapes,
    }


def split_heads(stem: str, num_rows: int, c: HFConfig) -> Tensor | None:
    """Return the place in the file of each row, int64 [rows]; None where they are equal.

    GPT-NeoX has q, k and v of each head in turn; llama.cpp all q, then all k, then all v.
    """
    if stem != "attn_qkv":
        return None
    return torch.arange(num_rows).reshape(3, c["num_attention_heads"], -1).transpose(0, 1).flatten()


ARCHITECTURE = Architecture(
    make_config,
    {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "lm_head"},
    "gpt_neox.layers.{}",
    {
        "attn_norm": "input_layernorm",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    row_order=split_heads,
)
