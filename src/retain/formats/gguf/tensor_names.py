"""Translate each architecture's tensor names and layouts from llama.cpp's to Hugging Face's.

llama.cpp's converter renames all tensors, and changes the layout of some for its kernels. An Architecture describes the
way back. A new architecture is one more entry in ARCHITECTURES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from retain.formats.gguf.config import (
    GGUFMetadata,
    HFConfig,
    gemma3_config,
    gpt2_config,
    gpt_neox_config,
    gpt_oss_config,
    llama_config,
    mpt_config,
    qwen3_moe_config,
)


@dataclass(frozen=True)
class Architecture:
    """How to read one architecture.

    Tensor names lack `.weight` and `.bias`; `layer_prefix` has a {} for the layer's number.
    """

    make_config: Callable[[GGUFMetadata], HFConfig]
    global_tensors: Mapping[str, str]
    layer_prefix: str
    layer_tensors: Mapping[str, str]
    biases: frozenset[str] | None = None  # tensors that may have a bias; None: all
    norm_offset: float = 0.0  # added to the weights of norms by the converter
    transposed: frozenset[str] = frozenset()  # matrices [in, out] in Hugging Face, [out, in] in llama.cpp
    # Of the matrices of all experts, which llama.cpp stacks [n, out, in]; {} is the number of the expert.
    expert_tensors: Mapping[str, str] = field(default_factory=dict)
    bare: frozenset[str] = frozenset()  # tensors that are no `.weight` in Hugging Face
    row_order: Callable[[str, int, HFConfig], Tensor | None] = lambda stem, rows, config: None  # see _llama_row_order

    def to_hf_name(self, name: str, num_layers: int) -> str | None:
        """Translate `blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`; None for an unknown name."""
        stem, _, leaf = name.rpartition(".")
        if leaf == "bias" and self.biases is not None and stem.split(".")[-1] not in self.biases:
            return None
        if stem in self.global_tensors:
            return f"{self.global_tensors[stem]}.{leaf}"
        blk, _, rest = stem.partition(".")
        number, _, stem = rest.partition(".")
        if blk == "blk" and stem in self.layer_tensors and number in map(str, range(num_layers)):
            hf_stem = f"{self.layer_prefix.format(number)}.{self.layer_tensors[stem]}"
            if stem in self.bare:
                return hf_stem if leaf == "weight" else None
            return f"{hf_stem}.{leaf}"
        return None

    def expert_names(self, name: str, num_experts: int, num_layers: int) -> list[str] | None:
        """Return the Hugging Face names of the matrices in a tensor of all experts; None for any other tensor."""
        stem, _, leaf = name.rpartition(".")
        blk, _, rest = stem.partition(".")
        number, _, stem = rest.partition(".")
        if blk != "blk" or stem not in self.expert_tensors or number not in map(str, range(num_layers)):
            return None
        prefix = self.layer_prefix.format(number)
        return [f"{prefix}.{self.expert_tensors[stem].format(e)}.{leaf}" for e in range(num_experts)]

    def to_hf_tensor(self, stem: str, x: Tensor, config: HFConfig) -> Tensor:
        """Convert a tensor to Hugging Face's layout. Raises RuntimeError where it does not fit the config."""
        if self.norm_offset and stem.endswith("norm"):
            return x.float() - self.norm_offset
        if stem in self.transposed and x.ndim == 2:
            return x.T.contiguous()
        order = self.row_order(stem, len(x), config)
        return x if order is None else x[order]


def _llama_row_order(stem: str, num_rows: int, c: HFConfig) -> Tensor | None:
    """Return the place in the file of each row in Hugging Face's layout, int64 [rows]; None where they are equal.

    llama.cpp applies rope to neighbouring pairs, so its converter interleaves the halves of each head of q and k.
    """
    if stem not in ("attn_q", "attn_k"):
        return None
    heads = c["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
    return torch.arange(num_rows).reshape(heads, -1, 2).transpose(1, 2).flatten()


def _gpt_neox_row_order(stem: str, num_rows: int, c: HFConfig) -> Tensor | None:
    """See _llama_row_order. GPT-NeoX has q, k and v of each head in turn; llama.cpp all q, then all k, then all v."""
    if stem != "attn_qkv":
        return None
    return torch.arange(num_rows).reshape(3, c["num_attention_heads"], -1).transpose(0, 1).flatten()


LLAMA_GLOBAL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LLAMA_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERT_TENSORS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
QKV_BIASES = frozenset(("attn_q", "attn_k", "attn_v"))
ATTENTION_BIASES = QKV_BIASES | {"attn_output"}
QK_NORM_TENSORS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GEMMA_NORM_TENSORS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        lambda f: llama_config(f, "llama"),
        LLAMA_GLOBAL_TENSORS,
        "model.layers.{}",
        LLAMA_LAYER_TENSORS,
        biases=ATTENTION_BIASES | {"ffn_gate", "ffn_up", "ffn_down"},
        row_order=_llama_row_order,
    ),
    "qwen2": Architecture(
        lambda f: llama_config(f, "qwen2"),
        LLAMA_GLOBAL_TENSORS,
        "model.layers.{}",
        LLAMA_LAYER_TENSORS,
        biases=QKV_BIASES,
    ),
    "qwen3": Architecture(
        lambda f: llama_config(f, "qwen3"),
        LLAMA_GLOBAL_TENSORS,
        "model.layers.{}",
        LLAMA_LAYER_TENSORS | QK_NORM_TENSORS,
        biases=ATTENTION_BIASES,
    ),
    "qwen3moe": Architecture(
        qwen3_moe_config,
        LLAMA_GLOBAL_TENSORS,
        "model.layers.{}",
        LLAMA_LAYER_TENSORS | QK_NORM_TENSORS | {"ffn_gate_inp": "mlp.gate"},
        biases=ATTENTION_BIASES,
        expert_tensors=EXPERT_TENSORS,
    ),
    "gpt-oss": Architecture(
        gpt_oss_config,
        LLAMA_GLOBAL_TENSORS,
        "model.layers.{}",
        LLAMA_LAYER_TENSORS
        | {
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        expert_tensors=EXPERT_TENSORS,
        bare=frozenset(("attn_sinks",)),
    ),
    "gemma3": Architecture(
        gemma3_config,
        LLAMA_GLOBAL_TENSORS,
        "model.layers.{}",
        LLAMA_LAYER_TENSORS | QK_NORM_TENSORS | GEMMA_NORM_TENSORS,
        biases=ATTENTION_BIASES,
        norm_offset=1.0,
    ),
    "gpt2": Architecture(
        gpt2_config,
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
    ),
    "gptneox": Architecture(
        gpt_neox_config,
        {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "lm_head"},
        "gpt_neox.layers.{}",
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        row_order=_gpt_neox_row_order,
    ),
    "mpt": Architecture(
        mpt_config,
        {"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"},
        "transformer.blocks.{}",
        {
            "attn_norm": "norm_1",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
    ),
}
