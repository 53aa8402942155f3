"""Functions of rows in torch: what the operations of a program compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from retain.kernels.weights.quantized import QuantizedWeight

ACTIVATION_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "relu2": lambda x: F.relu(x).square(),
}
SWIGLU_LIMIT = 7.0  # of gpt-oss
SWIGLU_FACTOR = 1.702


def activate(x: Tensor, act: str, n: int, gated: bool) -> Tensor:
    """Return act(x[:n]), times x[n : 2 n] if `gated`, for rows x. See Program.activation."""
    if act == "swiglu_oai":
        gate = x[:, :n].clamp(max=SWIGLU_LIMIT)
        return gate * torch.sigmoid(SWIGLU_FACTOR * gate) * (x[:, n:].clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1)
    function = ACTIVATION_FUNCTIONS[act]
    return function(x[:, :n]) * x[:, n:] if gated else function(x)


def linear(x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Compute x W^T + b. A quantized weight is multiplied in float32: slow, and what kernels must match."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    return F.linear(x.float(), weight.dequantize(), None if bias is None else bias.float()).to(x.dtype)


def linear_by_head(heads: Tensor, weight: Tensor | QuantizedWeight) -> Tensor:
    """Multiply heads [T, H, in] with their matrices, which are rows of a weight [H out, in]: [T, H, out]."""
    n = weight.shape[0] // heads.shape[1]
    outputs = [linear(x, weight[h * n : (h + 1) * n], None) for h, x in enumerate(heads.unbind(1))]
    return torch.stack(outputs, 1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / rms(x) * weight in float32 (arXiv 1910.07467), over the last dimension."""
    return F.rms_norm(x.float(), weight.shape[-1:], eps=eps).mul_(weight).to(x.dtype)


def split_heads(rows: Tensor, num_heads: int) -> Tensor:
    """View rows [T, width] as heads [T, num_heads, width / num_heads]."""
    return rows.view(len(rows), num_heads, rows.shape[1] // num_heads)


def select_indices(rows: Tensor, indices: Tensor) -> Tensor:
    """Return the rows of ascending indices: all of them without a copy, if there are as many."""
    return rows if len(indices) == len(rows) else rows[indices]


def replace_columns(rows: Tensor, columns: Tensor, first: int = 0) -> Tensor:
    """Return rows [T, width] whose columns from `first` on are `columns` [T, n]."""
    return torch.cat((rows[:, :first], columns, rows[:, first + columns.shape[1] :]), 1)


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """Put rows [T, n] beside each other: [T, sum of n]. One part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), 1)
