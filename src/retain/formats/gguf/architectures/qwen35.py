"""Qwen3.5 to 3.8. Value heads of the linear attention are in another order, which ggml's broadcasts need.

Hugging Face lists the value heads of one key head after another. llama.cpp lists the first of each key head, then the
second of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama, qwen3next
from retain.formats.gguf.metadata import HFConfig

LAYER_TENSORS = {
    **qwen3next.LAYER_TENSORS,
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}


def order_value_heads(n: int, c: HFConfig) -> Tensor | None:
    """Return the place in the file of each of the n rows or columns of value heads; None where they are equal."""
    key_heads = c["linear_num_key_heads"]
    per_key_head, rest = divmod(c["linear_num_value_heads"], key_heads)
    if rest:
        raise ValueError(f"{c['linear_num_value_heads']} value heads are no multiple of {key_heads} key heads")
    if per_key_head == 1:
        return None
    return torch.arange(n).reshape(per_key_head, key_heads, -1).transpose(0, 1).flatten()


def order_rows(stem: str, num_rows: int, c: HFConfig) -> Tensor | None:
    """Return the place in the file of each row, int64 [rows]; None where they are equal."""
    if stem in ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"):
        return order_value_heads(num_rows, c)
    if stem not in ("attn_qkv", "ssm_conv1d"):
        return None
    first = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"]  # of the values, behind q and k
    order = order_value_heads(num_rows - first, c)
    return None if order is None else torch.cat((torch.arange(first), first + order))


def order_columns(stem: str, num_columns: int, c: HFConfig) -> Tensor | None:
    """Return the place in the file of each column, int64 [columns]; None where they are equal."""
    return order_value_heads(num_columns, c) if stem == "ssm_out" else None


ARCHITECTURE = Architecture(
    lambda meta: qwen3next.make_config(meta, "qwen3_5_text"),
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    LAYER_TENSORS,
    biases=frozenset(),
    whole_names=qwen3next.WHOLE_NAMES,
    row_order=order_rows,
    column_order=order_columns,
    values=qwen3next.VALUES,
)
