"""MPT."""

from __future__ import annotations

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig, common_config


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of MPT, which has a separate dict for attention."""
    c = common_config(meta)
    alibi = meta.get("attention.max_alibi_bias", 0.0)
    clip = meta.get("attention.clamp_kqv", 0.0)
    return c | {
        "model_type": "mpt",
        "d_model": c["hidden_size"],
        "n_heads": c["num_attention_heads"],
        "n_layers": c["num_hidden_layers"],
        "expansion_ratio": c["intermediate_size"] // c["hidden_size"],
        "max_seq_len": c["max_position_embeddings"],
        "layer_norm_epsilon": meta.require("attention.layer_norm_epsilon", float),
        "no_bias": "blk.0.attn_norm.bias" not in meta.tensor_shapes,
        "attn_config": {
            "alibi": alibi > 0,
            "alibi_bias_max": alibi,
            "softmax_scale": None,
            "clip_qkv": clip or None,
            "kv_n_heads": meta.get_positive("attention.head_count_kv", c["num_attention_heads"]),
        },
    }


ARCHITECTURE = Architecture(
    make_config,
    {"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"},
    "transformer.blocks.{}",
    {
        "attn_norm": "norm_1",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "ffn_norm": "norm_2",
        "ffn_up": "ffn.up_proj",
        "ffn_down": "ffn.down_proj",
    },
)
