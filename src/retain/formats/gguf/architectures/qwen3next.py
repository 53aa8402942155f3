"""Qwen3-Next, and what Qwen3.5 shares with it: linear attention, norms around 0."""

from __future__ import annotations

import torch
from torch import Tensor

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama, qwen3moe
from retain.formats.gguf.metadata import (
    GGUFMetadata,
    HFConfig,
    expert_config,
    get_share,
    read_expert_width,
    read_kv_heads,
    read_ssm_heads,
)

LAYER_TENSORS = {
    **llama.POST_ATTENTION_NORM_TENSORS,
    **llama.QK_NORM_TENSORS,
    **llama.NEXTN_TENSORS,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
EXPERT_LAYER_TENSORS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
WHOLE_NAMES = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
NORMS = (  # not ssm_norm
    *("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm"),
    *("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"),
)


def make_config(meta: GGUFMetadata, model_type: str) -> HFConfig:
    """Return the config of a model with linear attention. A file of experts may lack the width of an MLP."""
    width = read_expert_width(meta) if meta.get("expert_count", 0) else 0
    changes = {
        "rope.dimension_count": None,
        "attention.head_count_kv": max(read_kv_heads(meta)),
        "feed_forward_length": meta.get("feed_forward_length", 0) or width,
    }
    c = llama.make_config(meta.with_values(changes), model_type)
    values, size = read_ssm_heads(meta)
    return c | {
        "attention_bias": False,
        "partial_rotary_factor": get_share(meta.get_positive("rope.dimension_count", c["head_dim"]), c["head_dim"]),
        "layer_types": read_layer_types(meta, c["num_hidden_layers"]),
        "full_attention_interval": 4,  # less than layer_types, which say it all
        "linear_conv_kernel_dim": meta.get_positive("ssm.conv_kernel"),
        "linear_key_head_dim": meta.get_positive("ssm.state_size"),
        "linear_value_head_dim": size,
        "linear_num_key_heads": meta.get_positive("ssm.group_count"),
        "linear_num_value_heads": values,
    }


def make_expert_config(meta: GGUFMetadata) -> HFConfig:
    """Return the keys of the experts. All layers have some, and llama.cpp normalizes their weights."""
    c = expert_config(meta) | {"moe_intermediate_size": read_expert_width(meta)}
    width = meta.get_positive("expert_shared_feed_forward_length", meta.get("feed_forward_length", 0))
    return c | {"norm_topk_prob": True, "shared_expert_intermediate_size": width}


def read_layer_types(meta: GGUFMetadata, layers: int) -> list[str]:
    """Return the type of each layer: a list says which ones are linear, or each n-th is not."""
    period = meta.get_positive("full_attention_interval", 4)
    is_linear = [(i + 1) % period != 0 for i in range(layers)]
    if f"{meta.arch}.attention.recurrent_layers" in meta.entries:
        is_linear = meta.get_per_layer("attention.recurrent_layers", layers, False)
    return ["linear_attention" if x else "full_attention" for x in is_linear]


def read_decay(x: Tensor) -> Tensor:
    """Return the logarithm of the decay, of which the file holds the negative. Raises ValueError for another sign."""
    if not (x <= 0).all():
        raise ValueError("a tensor ssm_a has numbers above 0")
    return torch.log(-x.float())


VALUES = {
    "ssm_a": read_decay,
    "ssm_conv1d": lambda x: x.unsqueeze(1),
    "ffn_gate_inp_shexp": lambda x: x.reshape(1, -1),
    **dict.fromkeys(NORMS, lambda x: x.float() - 1),
}

ARCHITECTURE = Architecture(
    lambda meta: make_config(meta, "qwen3_next") | make_expert_config(meta) | qwen3moe.ALL_LAYERS,
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    LAYER_TENSORS
    | EXPERT_LAYER_TENSORS
    | {
        "ssm_in": "linear_attn.in_proj_qkvz",  # of old files, in place of attn_qkv and attn_gate
        "ssm_ba": "linear_attn.in_proj_ba",
    },
    biases=frozenset(),
    expert_tensors=llama.EXPERT_TENSORS,
    whole_names=WHOLE_NAMES,
    values=VALUES,
)
