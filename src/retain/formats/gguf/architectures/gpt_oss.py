"""gpt-oss."""

from __future__ import annotations

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig, expert_config


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of gpt-oss. Every second layer is full; YaRN's bounds are no whole numbers, as published."""
    c = llama.make_config(meta, "gpt_oss") | expert_config(meta)
    if c["rope_scaling"] and c["rope_scaling"]["rope_type"] == "yarn":
        c["rope_scaling"]["truncate"] = False
    return c | {
        "intermediate_size": meta.get_positive("expert_feed_forward_length"),
        "sliding_window": meta.get_positive("attention.sliding_window", 128),
    }


ARCHITECTURE = Architecture(
    make_config,
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    llama.LAYER_TENSORS
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
    expert_tensors=llama.EXPERT_TENSORS,
    whole_names={"attn_sinks.weight": "self_attn.sinks"},
)
