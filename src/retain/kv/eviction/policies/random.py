"""random: evict at random, each head on its own; the control for every score (arXiv 2609.03430)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.view import CacheView
from retain.options import Seed
from retain.plugins import check_choice


@dataclass(frozen=True, kw_only=True)
class Policy(BudgetPolicy):
    """Evict any token; with `keep=prompt` those of the answer first."""

    seed: Seed = 0
    keep: str = "any"  # or prompt: its tokens go last

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("keep", self.keep, "any", "prompt")

    def priority(self, view: CacheView) -> Tensor:
        """Return a random number that depends on layer, head and position only."""
        L, own, _ = view.pos.shape
        G = self.kv_heads.num_of_all(own)
        table = torch.Generator().manual_seed(self.seed)
        factors = self.kv_heads.select(torch.rand(L, G, 1, generator=table, dtype=torch.float64))
        factors = factors.to(view.pos.device, non_blocking=True)
        x = torch.frac(torch.sin((view.pos.double() + 1) * (12.9898 + factors)) * 43758.5453)
        return x.abs() + (view.pos < self.prompt_len) * (self.keep == "prompt")
