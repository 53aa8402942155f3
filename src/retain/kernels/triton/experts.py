"""Experts as kernel launches of fixed shapes, so that a CUDA graph can hold them: nothing here waits for a count."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from retain.kernels.api import ACTIVATIONS
from retain.kernels.reference.experts import ExpertWeights, route
from retain.kernels.triton import elementwise, expert_kernels
from retain.kernels.triton.fresh_tokens import tokens_per_program

BLOCK_ROWS = 16  # choices of one expert that a program multiplies at once
BLOCK_OUT = 64
BLOCK_IN = 64


@dataclass(frozen=True)
class SortedChoices:
    """The choices of all tokens, sorted by expert, in blocks of one expert. A choice is token * k + rank; int32."""

    order: Tensor  # [T k]: the choices, by expert
    expert: Tensor  # [blocks]: of each block; num_experts where there is no such block
    first: Tensor  # [blocks]: where it begins in `order`
    end: Tensor  # [experts]: where the choices of an expert end in `order`


def sort_choices(chosen: Tensor, num_experts: int) -> SortedChoices:
    """Sort the choices [T, k] by expert, and divide those of each expert into blocks."""
    flat = chosen.flatten()
    experts = torch.arange(num_experts, device=flat.device)
    counts = (flat[:, None] == experts).sum(0)  # bincount would wait for the device
    blocks = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    end = counts.cumsum(0)
    end_block = blocks.cumsum(0)
    num_blocks = len(flat) // BLOCK_ROWS + min(num_experts, len(flat))  # at most
    block = torch.arange(num_blocks, device=flat.device)
    expert = torch.searchsorted(end_block, block, right=True)
    own = expert.clamp(max=num_experts - 1)
    first = (end - counts)[own] + (block - (end_block - blocks)[own]) * BLOCK_ROWS
    order = flat.sort(stable=True).indices
    return SortedChoices(order.int(), expert.int(), first.int(), end.int())


def mix_experts(x: Tensor, scores: Tensor, w: ExpertWeights) -> Tensor:
    """Return the weighted sums [T, E] of the experts that `scores` [T, n] choose for the rows x [T, E]."""
    T = len(x)
    k = w.experts.router.top_k
    width = w.experts.intermediate_size
    if not T:
        return torch.zeros_like(x)
    chosen, weights = route(scores, w.experts.router)
    choices = sort_choices(chosen, w.experts.num_experts)
    assert isinstance(w.gate_up, Tensor)
    assert isinstance(w.down, Tensor)
    hidden = _grouped_linear(x, k, w.gate_up, w.gate_up_bias, w.experts.inner_size, choices)
    activated = x.new_empty(T * k, width)
    block_t = tokens_per_program(T * k, 1)
    block = min(triton.next_power_of_2(width), 1024)
    elementwise.activation[(triton.cdiv(T * k, block_t), triton.cdiv(width, block))](
        hidden, hidden.stride(0), activated, T * k, width,
        T=block_t, BLOCK=block, ACT=ACTIVATIONS.index(w.experts.act), GATED=w.experts.is_gated,
    )  # fmt: skip
    y = _grouped_linear(activated, 1, w.down, w.down_bias, x.shape[1], choices)
    return (y.view(T, k, -1).float() * weights[..., None]).sum(1).to(x.dtype)


def _grouped_linear(
    x: Tensor, choices_per_row: int, weight: Tensor, bias: Tensor | None, n: int, choices: SortedChoices
) -> Tensor:
    """Return the products [T k, n] of the rows of all choices with the matrices of their experts."""
    out = x.new_empty(len(choices.order), n)
    block_out = min(BLOCK_OUT, triton.next_power_of_2(n))
    expert_kernels.grouped_linear[(len(choices.expert), triton.cdiv(n, block_out))](
        x, x.stride(0), weight, weight if bias is None else bias, out,
        choices.order, choices.expert, choices.first, choices.end, len(choices.end), choices_per_row, n, x.shape[1],
        ROWS=BLOCK_ROWS, OUT=block_out, IN=BLOCK_IN, BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    return out
