"""GLM-4. Both sides rotate neighbouring pairs, so rows stay in their order."""

from __future__ import annotations

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig, refuse_mrope

LAYER_TENSORS = {
    "ffn_up": "mlp.gate_up_proj",  # llama.cpp keeps the gates above
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of GLM-4. Files of vision models have rows in another order."""
    refuse_mrope(meta)
    return llama.make_partial_rope_config(meta, "glm4")


ARCHITECTURE = Architecture(
    make_config,
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    llama.ATTENTION | LAYER_TENSORS,
    biases=llama.QKV_BIASES,
)
