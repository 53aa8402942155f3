"""Olmo 2, and with a sliding window Olmo 3."""

from __future__ import annotations

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig, read_layer_types

NORM_TENSORS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of Olmo 2 or 3. In Olmo 3, the scaling of rope is of full layers alone.

    The first converters wrote the attention factor of YaRN under a key which in other architectures multiplies it.
    """
    old = meta.get("rope.scaling.attn_factor", 0.0)
    factor = meta.get("rope.scaling.yarn_attn_factor", old)
    changes = {"rope.scaling.attn_factor": None, "rope.scaling.yarn_attn_factor": factor}
    c = llama.make_config(meta.with_values(changes), "olmo2")
    window = meta.get("attention.sliding_window", 0)
    if not window:
        return c
    theta = c["rope_theta"]
    full = {"rope_type": "default", "rope_theta": theta, **(c["rope_scaling"] or {})}
    sliding = {"rope_type": "default", "rope_theta": meta.get("rope.freq_base_swa", theta)}
    return c | {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": read_layer_types(meta, window, every=4),
        "rope_scaling": None,
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
    }


ARCHITECTURE = Architecture(
    make_config,
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    llama.PROJECTIONS | llama.QK_NORM_TENSORS | NORM_TENSORS,
    biases=llama.ATTENTION_BIASES,
)
