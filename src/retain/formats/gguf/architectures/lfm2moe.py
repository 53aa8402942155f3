"""LFM2 with experts."""

from __future__ import annotations

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import deepseek2, lfm2, llama
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig, expert_config


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of LFM2 with experts, whose weights llama.cpp normalizes and does not scale."""
    meta.require("expert_gating_func", int)
    deepseek2.require_sigmoid(meta)
    dense = meta.get("leading_dense_block_count", 0)
    c = lfm2.make_config(meta, "lfm2_moe") | expert_config(meta)
    return c | {
        "moe_intermediate_size": meta.get_positive("expert_feed_forward_length"),
        "num_dense_layers": dense,
        "use_expert_bias": f"blk.{dense}.exp_probs_b.bias" in meta.tensor_shapes,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


ARCHITECTURE = Architecture(
    make_config,
    lfm2.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    lfm2.LAYER_TENSORS | {"ffn_gate_inp": "feed_forward.gate"},
    biases=frozenset(),
    expert_tensors={
        "ffn_gate_exps": ("feed_forward.experts.{}.w1",),
        "ffn_up_exps": ("feed_forward.experts.{}.w3",),
        "ffn_gate_up_exps": ("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
        "ffn_down_exps": ("feed_forward.experts.{}.w2",),
    },
    whole_names={"exp_probs_b.bias": "feed_forward.expert_bias"},
    values=lfm2.VALUES,
)
