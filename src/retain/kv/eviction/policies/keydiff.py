"""keydiff: keep keys that are unlike the others: the least like their mean (arXiv 2504.15364).

Needs no mass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.view import CacheView


@dataclass(frozen=True, kw_only=True)
class Policy(BudgetPolicy):
    """Keep unusual keys."""

    def priority(self, view: CacheView) -> Tensor:
        """Return minus the cosine of the angle between a key and the mean of the head's unit keys."""
        keys = view.keys.where((view.pos >= 0)[..., None], 0)  # [M, G, S, D]; holes may have any numbers
        keys = torch.nn.functional.normalize(keys, dim=-1)
        return -torch.nn.functional.cosine_similarity(keys, keys.sum(-2, keepdim=True), dim=-1)
