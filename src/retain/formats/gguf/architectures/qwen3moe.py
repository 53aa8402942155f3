"""Qwen 3 with experts."""

from __future__ import annotations

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama
from retain.formats.gguf.architectures.qwen2 import NO_WINDOW
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig, expert_config, read_expert_width

ALL_LAYERS = {"decoder_sparse_step": 1, "mlp_only_layers": None}  # have experts


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of Qwen 3 with experts. All layers have experts, and llama.cpp normalizes their weights."""
    width = read_expert_width(meta)
    changes = {"feed_forward_length": meta.get("feed_forward_length", width)}
    c = llama.make_config(meta.with_values(changes), "qwen3_moe") | expert_config(meta) | ALL_LAYERS | NO_WINDOW
    return c | {"norm_topk_prob": True, "moe_intermediate_size": width}


ARCHITECTURE = Architecture(
    make_config,
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    llama.LAYER_TENSORS | llama.QK_NORM_TENSORS | {"ffn_gate_inp": "mlp.gate"},
    biases=llama.ATTENTION_BIASES,
    expert_tensors=llama.EXPERT_TENSORS,
)
