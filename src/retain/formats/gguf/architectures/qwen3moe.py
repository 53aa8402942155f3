"""Qwen 3 with experts."""

from __future__ import annotations

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig, expert_config


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of Qwen 3 with experts. All layers have experts, and llama.cpp normalizes their weights."""
    c = llama.make_config(meta, "qwen3_moe") | expert_config(meta)
    return c | {"norm_topk_prob": True, "moe_intermediate_size": meta.get_positive("expert_feed_forward_length")}


ARCHITECTURE = Architecture(
    make_config,
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    llama.LAYER_TENSORS | llama.QK_NORM_TENSORS | {"ffn_gate_inp": "mlp.gate"},
    biases=llama.ATTENTION_BIASES,
    expert_tensors=llama.EXPERT_TENSORS,
)
