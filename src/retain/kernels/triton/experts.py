"""Experts as kernel launches of fixed shapes, so that a CUDA graph can hold them: nothing here waits for a count."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import torch
import triton
from torch import Tensor

from retain.kernels.experts import Router
from retain.kernels.reference.experts import route
from retain.kernels.triton import expert_kernels
from retain.kernels.triton.elementwise import activate
from retain.kernels.triton.packed_weight import FEW_ROWS, DeviceWeight, add_splits, choose_block, product_options

BLOCK_ROWS = 16  # choices of one expert that a program multiplies at once with dense weights
BLOCK_OUT = 64
BLOCK_IN = 64


@dataclass(frozen=True, eq=False)
class DeviceExperts:
    """The experts of a layer on the device. See Experts, whose weights on the host it does not keep."""

    num_experts: int
    intermediate_size: int
    router: Router
    act: str
    is_gated: bool
    gate_up: Tensor | DeviceWeight
    down: Tensor | DeviceWeight
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    first: int = 0


@dataclass(frozen=True)
class SortedChoices:
    """The choices of all tokens, sorted by expert, in blocks of one expert. A choice is token * k + rank; int32.

    Fields have the names of kernels' parameters.
    """

    order: Tensor  # [T k]: the choices, by expert
    block_expert: Tensor  # [blocks]: of each block; num_experts where there is no such block
    block_first: Tensor  # [blocks]: where it begins in `order`
    expert_end: Tensor  # [experts]: where the choices of an expert end in `order`


def sort_choices(chosen: Tensor, num_experts: int, block_rows: int) -> SortedChoices:
    """Sort the choices [T, k] by expert, and divide those of each expert into blocks. Others are num_experts."""
    flat = chosen.flatten()
    experts = torch.arange(num_experts, device=flat.device)
    counts = (flat[:, None] == experts).sum(0)  # bincount would wait for the device
    blocks = (counts + block_rows - 1) // block_rows
    end = counts.cumsum(0)
    end_block = blocks.cumsum(0)
    num_blocks = len(flat) // block_rows + min(num_experts, len(flat))  # at most
    block = torch.arange(num_blocks, device=flat.device)
    expert = torch.searchsorted(end_block, block, right=True)
    own = expert.clamp(max=num_experts - 1)
    first = (end - counts)[own] + (block - (end_block - blocks)[own]) * block_rows
    order = flat.sort(stable=True).indices
    return SortedChoices(order.int(), expert.int(), first.int(), end.int())


def mix_experts(x: Tensor, scores: Tensor, w: DeviceExperts) -> Tensor:
    """Return the weighted sums [T, E] of the experts that `scores` [T, n] choose for the rows x [T, E]."""
    T, E = x.shape
    k = w.router.top_k
    if not T:
        return torch.zeros_like(x)
    chosen, weights = route(scores, w.router)
    is_elsewhere = None
    if w.num_experts < scores.shape[1]:
        is_elsewhere = (chosen < w.first) | (chosen >= w.first + w.num_experts)
        chosen = (chosen - w.first).masked_fill(is_elsewhere, w.num_experts)
    products = GroupedProducts(chosen, w.num_experts)
    hidden = products.linear(x, w.gate_up, w.gate_up_bias, k)
    activated = activate(hidden, w.act, w.intermediate_size, w.is_gated)
    y = products.linear(activated, w.down, w.down_bias, 1)
    if is_elsewhere is not None:
        y = y.masked_fill(is_elsewhere.view(-1, 1), 0)  # undefined until now
    out = torch.empty_like(x)
    block = min(triton.next_power_of_2(E), 1024)
    expert_kernels.mix_choices[(T, triton.cdiv(E, block))](y, weights.contiguous(), out, E, K=k, BLOCK=block)
    return out


class GroupedProducts:
    """The products of the choices [T, k] of some tokens, each with the matrix of its expert."""

    def __init__(self, chosen: Tensor, num_experts: int):
        self._chosen = chosen
        self._num_experts = num_experts
        self._sort = cache(partial(sort_choices, chosen, num_experts))  # by the rows of a block

    def linear(self, x: Tensor, weight: Tensor | DeviceWeight, bias: Tensor | None, choices_per_row: int) -> Tensor:
        """Return the products [T k, n] with the rows x, of which each belongs to so many choices."""
        if isinstance(weight, DeviceWeight):
            return self._multiply_packed(x, weight, bias, choices_per_row)
        n = len(weight) // self._num_experts
        choices = self._sort(BLOCK_ROWS)
        out = x.new_empty(len(choices.order), n)
        block_out = min(BLOCK_OUT, triton.next_power_of_2(n))
        expert_kernels.grouped_linear[(len(choices.block_expert), triton.cdiv(n, block_out))](
            x=x, x_row=x.stride(0), weight=weight, bias=weight if bias is None else bias, out=out, n=n,
            choices_per_row=choices_per_row, **vars(choices), num_experts=len(choices.expert_end), width=x.shape[1],
            ROWS=BLOCK_ROWS, OUT=block_out, IN=BLOCK_IN, BIAS=bias is not None,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        )  # fmt: skip
        return out

    def _multiply_packed(self, x: Tensor, weight: DeviceWeight, bias: Tensor | None, choices_per_row: int) -> Tensor:
        """Compute `linear` with packed weights: few tokens in splits of the inputs side by side, as linear layers.

        Of more tokens a program adds the splits itself, in the same order.
        """
        T, k = self._chosen.shape
        n, width = weight.shape
        rows = choose_block(triton.cdiv(T * k, self._num_experts))
        choices = self._sort(rows)
        k_tiles_per_split = weight.k_tiles_per_split(weight.rows_of_tiles * k)
        splits = triton.cdiv(weight.num_k_tiles, k_tiles_per_split) if T <= FEW_ROWS else 1
        out = x.new_empty(T * k, n)
        to = out.new_empty(splits, T * k, n, dtype=torch.float32) if splits > 1 else out
        expert_kernels.multiply_packed_experts[(len(choices.block_expert), weight.rows_of_tiles, splits)](
            x=x, x_row=x.stride(0), bias=out if bias is None else bias, out=to, choices_per_row=choices_per_row,
            num_choices=T * k, **vars(choices), num_experts=len(choices.expert_end), n=n, width=width,
            k_tiles_per_split=k_tiles_per_split, **weight.kernel_args, **product_options(x.dtype, rows),
            BIAS=bias is not None, SPLIT=splits > 1,
        )  # fmt: skip
        if splits > 1:
            add_splits(to, None, out)
        return out
