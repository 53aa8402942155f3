"""Gemma 3."""

from __future__ import annotations

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig, read_layer_types

NORM_TENSORS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of Gemma 3's text model. Every sixth layer is full by default; without a window all are."""
    c = llama.make_config(meta, "gemma3_text")
    window = meta.get("attention.sliding_window", 0) or None
    layers = c["num_hidden_layers"]
    heads = c["num_attention_heads"]
    dim = c["head_dim"]
    del c["hidden_act"]
    return c | {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": meta.get("rope.freq_base_swa", 10000.0),
        "sliding_window": window,
        "sliding_window_pattern": 6,  # less than layer_types, which say it all
        "layer_types": read_layer_types(meta, window, every=6),
        # Not in the file. Gemma scales by the head dim, except in the 27B model, the only one with 62 layers.
        "query_pre_attn_scalar": c["hidden_size"] // heads if layers == 62 else dim,
        "attn_logit_softcapping": meta.get("attn_logit_softcapping", 0.0) or None,
        "final_logit_softcapping": meta.get("final_logit_softcapping", 0.0) or None,
    }


ARCHITECTURE = Architecture(
    make_config,
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    llama.LAYER_TENSORS | llama.QK_NORM_TENSORS | NORM_TENSORS,
    biases=llama.ATTENTION_BIASES,
    norm_offset=1.0,
)
