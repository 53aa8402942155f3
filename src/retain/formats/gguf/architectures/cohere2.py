"""Command R7B and Command A. Both sides rotate neighbouring pairs, so rows stay in their order."""

from __future__ import annotations

from retain.formats.errors import UnsupportedError
from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig, read_layer_types


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of Cohere 2. Logits are multiplied by their scale; heads share the hidden size."""
    eps = meta.require("attention.layer_norm_epsilon", float)
    c = llama.make_config(meta.with_values({"attention.layer_norm_rms_epsilon": eps}), "cohere2")
    if c["head_dim"] * c["num_attention_heads"] != c["hidden_size"]:
        raise UnsupportedError("heads that do not share the hidden size are not supported in the architecture cohere2")
    window = meta.get_positive("attention.sliding_window")
    return c | {
        "layer_norm_eps": eps,
        "rope_theta": meta.get("rope.freq_base_swa", c["rope_theta"]),  # full layers do not rotate
        "logit_scale": meta.require("logit_scale", float) or 1.0,
        "sliding_window": window,
        "layer_types": read_layer_types(meta, window, every=4),
    }


ARCHITECTURE = Architecture(
    make_config,
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    llama.PROJECTIONS | {"attn_norm": "input_layernorm"},
    biases=frozenset(),
)
