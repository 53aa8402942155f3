"""EAGLE-3 heads for any target: a layer of Llama's whose q, k and v read two rows, a norm more, and `d2t`."""

from __future__ import annotations

from typing import Any

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig, read_rope_scaling

GLOBAL_TENSORS = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head", "fc": "fc", "d2t": "d2t"}


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of a head. The file says whose layers' inputs it reads."""
    heads = meta.get_positive("attention.head_count")
    hidden = meta.get_positive("embedding_length")
    layers: Any = meta.entries.get(f"{meta.arch}.extract_layers")
    if not hasattr(layers, "tolist"):
        raise ValueError(f"{meta.arch}.extract_layers is missing")
    return {
        "model_type": "eagle3",
        "num_hidden_layers": meta.count_blocks(),
        "num_nextn_predict_layers": 0,
        "hidden_size": hidden,
        "intermediate_size": meta.get_positive("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get_positive("attention.head_count_kv", heads),
        "head_dim": meta.get_positive("attention.key_length", max(1, hidden // heads)),
        "rms_norm_eps": meta.require("attention.layer_norm_rms_epsilon", float),
        "rope_theta": meta.get("rope.freq_base", 10000.0),
        "rope_scaling": read_rope_scaling(meta),
        "max_position_embeddings": meta.get_positive("context_length"),
        "hidden_act": "silu",
        "eagle_aux_hidden_state_layer_ids": layers.tolist(),
        "norm_before_residual": meta.get("norm_before_residual", False),
    }


ARCHITECTURE = Architecture(
    make_config,
    GLOBAL_TENSORS,
    "midlayer",
    llama.LAYER_TENSORS | {"attn_norm_2": "hidden_norm"},
    biases=frozenset(),
    row_order=llama.pair_halves,
)
