"""Tokens of earlier steps that a step computes although only the device knows them yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from retain.kernels.transfers import to_device


@dataclass(frozen=True)
class PendingTokens:
    """Sampled tokens, and the fresh tokens of a step that they are."""

    sampled: Tensor  # int64 [n], on the device; -1 where logits were NaN, which is told when they are read
    sources: Tensor  # host int32 [T]: the place of each fresh token in `sampled`, or -1 if the host knows it

    def insert(self, input_ids: Tensor) -> Tensor:
        """Return token ids [T] with the pending ones in their places, where `sampled` lies."""
        device = self.sampled.device
        sources = to_device(self.sources, device)
        found = self.sampled[sources.clamp(min=0).long()].clamp(min=0)
        return torch.where(sources < 0, to_device(input_ids, device), found)
