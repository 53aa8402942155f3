"""Granite 3 with experts, also with an MLP beside them, and models of Granite 4 with experts but without Mamba-2."""

from __future__ import annotations

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import granite, granitehybrid, llama
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig, expert_config


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of Granite with experts."""
    c = granite.make_config(meta) | expert_config(meta)
    shared = meta.get("expert_shared_feed_forward_length", 0)
    return c | {
        "model_type": "granitemoeshared" if shared else "granitemoe",
        "num_local_experts": c["num_experts"],
        "shared_intermediate_size": shared,
    }


ARCHITECTURE = Architecture(
    make_config,
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    {
        **llama.LAYER_TENSORS,
        **{f"ffn_{part}_shexp": name for part, name in granitehybrid.GATE_UP.items()},
        "ffn_gate_inp": "block_sparse_moe.router",
    },
    biases=llama.ATTENTION_BIASES,
    expert_tensors=granitehybrid.ARCHITECTURE.expert_tensors,
    row_order=llama.pair_halves,
)
