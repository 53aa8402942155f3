"""GPT-2."""

from __future__ import annotations

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig, common_config


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of GPT-2. The file lacks the activation; every model that llama.cpp converts has this one."""
    c = common_config(meta)
    return c | {
        "model_type": "gpt2",
        "n_layer": c["num_hidden_layers"],
        "n_head": c["num_attention_heads"],
        "n_embd": c["hidden_size"],
        "n_inner": c["intermediate_size"],
        "n_positions": c["max_position_embeddings"],
        "layer_norm_epsilon": meta.require("attention.layer_norm_epsilon", float),
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    }


ARCHITECTURE = Architecture(
    make_config,
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    "transformer.h.{}",
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    transposed=frozenset(("attn_qkv", "attn_output", "ffn_up", "ffn_down")),  # Conv1D in GPT-2
)
