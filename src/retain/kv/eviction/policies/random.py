"""random: forget without looking, each head on its own: the control for every score (arXiv 2609.03430)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.view import CacheView
from retain.plugins import check_choice


@dataclass(frozen=True, kw_only=True)
class Policy(BudgetPolicy):
    """Any token may go; with `keep=prompt` those of the answer go first."""

    supports_layerwise = False  # its numbers are drawn for all layers

    seed: int = 0
    keep: str = "any"  # or prompt: its tokens stay as long as there are others

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("keep", self.keep, "any", "prompt")

    def priority(self, view: CacheView) -> Tensor:
        """A random number of the layer, the head and the position, always the same."""
        L, G, _ = view.pos.shape
        table = torch.Generator().manual_seed(self.seed)
        factors = torch.rand(L, G, 1, generator=table, dtype=torch.float64).to(view.pos.device, non_blocking=True)
        x = torch.frac(torch.sin((view.pos.double() + 1) * (12.9898 + factors)) * 43758.5453)
        return x.abs() + (view.pos < self.prompt_len) * (self.keep == "prompt")
