"""How many tokens each head keeps of a prompt, as a model's file says: `share=fitted`.

Heads differ in how many tokens they need, and mostly in the same way from text to text. `retain fit` counts what heads
would keep if they divided one budget by what answers need, and takes the mean over texts. After head budgets that are
learned once for a model: LU-KV (arXiv 2602.08585), Attention Matching (arXiv 2602.16284).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import torch
from torch import Tensor

from retain.kernels.ranks import KVHeads

BUDGETS = (0.5, 0.25, 0.125)  # shares of a prompt for which the counts were taken


@dataclass(frozen=True, eq=False)
class HeadShares:
    """The share of a prompt's tokens that each head keeps at each of `BUDGETS`; their mean is the budget."""

    kept: Tensor  # float32 [3, M, G], between 0 and 1

    @cached_property
    def fingerprint(self) -> bytes:
        """Return a hash of the numbers, equal only for equal ones."""
        return blake2b(self.kept.cpu().numpy().tobytes(), digest_size=16).digest()

    def of_heads(self, heads: KVHeads) -> HeadShares:
        """Return the shares of a rank's heads alone."""
        return HeadShares(heads.select(self.kept, 2))

    def divide(self, budget: int, num_tokens: int) -> Tensor:
        """Return how many of `num_tokens` each head keeps, int64 [M, G], where the mean is at most `budget`.

        Between the budgets of the file, and down to nothing and up to everything, counts are linear in the budget. So
        no head has more than there is, and none loses where the budget grows.
        """
        if budget <= 0 or num_tokens <= 0:
            return torch.zeros(self.kept.shape[1:], dtype=torch.int64)
        share = min(budget / num_tokens, 1.0)
        ends = (1.0, *BUDGETS, 0.0)
        kept = torch.cat((torch.ones_like(self.kept[:1]), self.kept, torch.zeros_like(self.kept[:1]))).double()
        i = next(i for i in range(len(BUDGETS) + 1) if share >= ends[i + 1])
        weight = (share - ends[i + 1]) / (ends[i] - ends[i + 1])
        return (num_tokens * kept[i + 1].lerp(kept[i], weight)).long()
