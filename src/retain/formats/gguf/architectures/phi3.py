"""Phi-3 and Phi-4."""

from __future__ import annotations

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig, read_original_context


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of Phi-3 and Phi-4. A window of 0 is none.

    The first files, of April 2024, lack the window of Phi-3's models of 4096 tokens; llama.cpp knew it (pull 8931).
    """
    c = llama.make_partial_rope_config(meta, "phi3")
    if "rope_factors_long.weight" in meta.tensor_shapes:
        c["rope_scaling"] = read_longrope(meta)
    is_first = c["max_position_embeddings"] == 4096 and c["num_hidden_layers"] in (32, 40)
    window = meta.get("attention.sliding_window", 2047 if is_first else 0)
    return c | {"sliding_window": window or None}


def read_longrope(meta: GGUFMetadata) -> HFConfig:
    """Return the `rope_scaling` of long contexts, less the lists of factors, which are tensors."""
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": read_original_context(meta),
        "attention_factor": meta.get("rope.scaling.attn_factor", 1.0),
    }


ARCHITECTURE = Architecture(
    make_config,
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    {
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.gate_up_proj",  # llama.cpp keeps the gates above
        "ffn_down": "mlp.down_proj",
    },
    biases=frozenset(),
)
