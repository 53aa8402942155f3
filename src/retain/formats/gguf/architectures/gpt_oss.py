"""gpt-oss."""

from __future__ import annotations

from retain.formats.errors import UnsupportedError
from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig, expert_config, read_layer_types


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of gpt-oss. Every second layer is full; YaRN's bounds are no whole numbers, as published.

    A file without scaling has none: the YaRN of transformers' config class belongs to config.json.
    """
    width = meta.get_positive("expert_feed_forward_length")
    c = llama.make_config(meta.with_values({"feed_forward_length": width}), "gpt_oss") | expert_config(meta)
    if meta.get("rope.freq_base_swa", c["rope_theta"]) != c["rope_theta"]:
        raise UnsupportedError("gpt-oss with another base of rope in sliding layers is not supported")
    scaling = c["rope_scaling"] or {"rope_type": "default"}
    window = meta.get_positive("attention.sliding_window")
    return c | {
        "rope_scaling": scaling | ({"truncate": False} if scaling["rope_type"] == "yarn" else {}),
        "num_local_experts": c["num_experts"],
        "sliding_window": window,
        "layer_types": read_layer_types(meta, window, every=2),
        "swiglu_alpha": 1.702,  # constants of llama.cpp, as the next
        "swiglu_limit": 7.0,
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
