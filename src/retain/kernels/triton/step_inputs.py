"""A step as the operations of a program of this backend see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from retain.kernels.api import GroupInputs
from retain.kernels.reference.program import Step
from retain.kernels.triton import step_kernels
from retain.kernels.triton.plan import AttentionPlan

BLOCK_TOKENS = 128  # of a program


@dataclass(frozen=True, kw_only=True)
class DeviceStep(Step):
    """The tensors of a batch on the device (see `Batch`), and what attention needs beside them."""

    groups: Sequence[GroupInputs]  # with slot mappings on the device
    layers: Sequence[tuple[int, int]]  # see Batch
    plans: Sequence[AttentionPlan | None]  # of each KV cache group; None where no attention reads it
    requests: Tensor  # int32 [B, 6]: a tile for each request (see plan.py), whatever its length
    before_attention: Callable[[int, Tensor], None] | None = None
    after_attention: Callable[[int], None] | None = None

    @contextmanager
    def use_cache(self, layer: int, q: Tensor | None = None) -> Iterator[GroupInputs]:
        """Give the inputs of a layer of the model; call what the caller wants before and after it.

        `q` are the queries [T, H, D] of an attention.
        """
        if self.before_attention:
            no_queries = torch.zeros(len(self.positions), 0, 0, device=self.positions.device)
            self.before_attention(layer, no_queries if q is None else q)
        group, index = self.layers[layer]
        yield self.groups[group].for_layer(index)
        if self.after_attention:
            self.after_attention(layer)

    def plan(self, layer: int) -> AttentionPlan:
        """Return the plan of a layer that attends."""
        plan = self.plans[self.layers[layer][0]]
        assert plan is not None
        return plan


def insert_pending_tokens(input_ids: Tensor, sources: Tensor, sampled: Tensor) -> None:
    """Replace ids [T] of pending tokens in place; all tensors are those of `PendingTokens`, on the device."""
    T = len(input_ids)
    step_kernels.insert_pending_tokens[(triton.cdiv(T, BLOCK_TOKENS),)](input_ids, sources, sampled, T, T=BLOCK_TOKENS)
