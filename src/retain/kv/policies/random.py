"""random: forget without looking, each head on its own: the control for every score (arXiv 2609.03430)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from retain.kv.budget import Budget


@dataclass(frozen=True, kw_only=True)
class Policy(Budget):
    """Any token may go; with `keep=prompt` those of the answer go first."""

    seed: int = 0
    keep: str = "any"  # or prompt: its tokens stay as long as there are others

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep not in ("any", "prompt"):
            raise ValueError(f"random: keep is any or prompt, not {self.keep!r}")

    def priority(self, pos: Tensor, mass: Tensor, now: int) -> Tensor:
        """A random number of the layer, the head and the position, always the same."""
        L, G, _ = pos.shape
        table = torch.Generator().manual_seed(self.seed)
        factors = torch.rand(L, G, 1, generator=table, dtype=torch.float64)
        x = torch.frac(torch.sin((pos.double() + 1) * (12.9898 + factors)) * 43758.5453)
        return x.abs() + (pos < self.prompt) * (self.keep == "prompt")
