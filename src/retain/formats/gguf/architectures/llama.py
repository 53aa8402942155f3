"""Llama, and the names and the config that architectures like it share."""

from __future__ import annotations

import torch
from torch import Tensor

from retain.formats.errors import UnsupportedError
from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig, common_config, get_share, read_rope_scaling

GLOBAL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_PREFIX = "model.layers.{}"
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
PROJECTIONS = ATTENTION | {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
LAYER_TENSORS = PROJECTIONS | {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
# Where the norm before the MLP has the name of what it is behind.
POST_ATTENTION_NORM_TENSORS = PROJECTIONS | {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
}
EXPERT_TENSORS = {
    "ffn_gate_exps": ("mlp.experts.{}.gate_proj",),
    "ffn_up_exps": ("mlp.experts.{}.up_proj",),
    "ffn_gate_up_exps": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "ffn_down_exps": ("mlp.experts.{}.down_proj",),
}
# Of an MTP layer, beside its others.
NEXTN_TENSORS = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
QKV_BIASES = frozenset(("attn_q", "attn_k", "attn_v"))
ATTENTION_BIASES = QKV_BIASES | {"attn_output"}
PROJECTION_BIASES = ATTENTION_BIASES | {"ffn_gate", "ffn_up", "ffn_down"}
QK_NORM_TENSORS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def make_config(meta: GGUFMetadata, model_type: str) -> HFConfig:
    """Return the config of Llama and the families like it, which rotate whole heads. Raises ValueError."""
    c = make_partial_rope_config(meta, model_type)
    if c.pop("partial_rotary_factor") != 1:
        raise UnsupportedError(f"heads of which a part is rotated are not supported in the architecture {meta.arch}")
    return c


def make_partial_rope_config(meta: GGUFMetadata, model_type: str) -> HFConfig:
    """Return the config of a family like Llama that rotates a share of each head.

    The file has no flags: tensors say whether there are biases. `attention.sliding_window` is left to the families
    that have one: llama.cpp and transformers read it in no other.
    """
    c = common_config(meta)
    heads = c["num_attention_heads"]
    dim = meta.get_positive("attention.key_length", max(1, c["hidden_size"] // heads))
    rotated = meta.get_positive("rope.dimension_count", dim)
    if meta.get_positive("attention.value_length", max(1, c["hidden_size"] // heads)) != dim or rotated > dim:
        raise UnsupportedError("heads whose keys, values and rotated part differ in size are not supported")
    return c | {
        "model_type": model_type,
        "num_key_value_heads": meta.get_positive("attention.head_count_kv", heads),
        "head_dim": dim,
        "rms_norm_eps": meta.require("attention.layer_norm_rms_epsilon", float),
        "rope_theta": meta.get("rope.freq_base", 10000.0),
        "rope_scaling": read_rope_scaling(meta),
        "partial_rotary_factor": get_share(rotated, dim),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in meta.tensor_shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in meta.tensor_shapes,
    }


def pair_halves(stem: str, num_rows: int, c: HFConfig) -> Tensor | None:
    """Return the place in the file of each row in Hugging Face's layout, int64 [rows]; None where they are equal.

    llama.cpp applies rope to neighbouring pairs, so its converter interleaves the halves of each head of q and k.
    """
    if stem not in ("attn_q", "attn_k"):
        return None
    heads = c["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
    return torch.arange(num_rows).reshape(heads, -1, 2).transpose(1, 2).flatten()


ARCHITECTURE = Architecture(
    lambda meta: make_config(meta, "llama"),
    GLOBAL_TENSORS,
    LAYER_PREFIX,
    LAYER_TENSORS,
    biases=PROJECTION_BIASES,
    row_order=pair_halves,
)
