"""look: keep every token, and let tokens of the answer attend to few of them, chosen anew at each step and head.

What to forget is decided before a question is known; what to look at, with its query in hand. The choice is by a copy
of the keys in 4 bits (see "Looks" in kernels/api.py), as IMPRESS finds important tokens with few bits (FAST 2025). The
prompt attends to everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.eviction.view import CacheView
from retain.options import PositiveInt, check_bounds
from retain.plugins import Amount


@dataclass(frozen=True)
class Policy(EvictionPolicy):
    """Attend to `slots` of each head, a number or a share of the tokens that a token sees, but to no fewer than `min`.

    Layers with a window of the model's own attend to all of it.
    """

    slots: Amount  # that a token chooses in each head: 1024, or 12.5% of the tokens so far
    min: PositiveInt = 64  # slots that it chooses at least

    looks = True

    def __post_init__(self) -> None:
        check_bounds(self)

    def looked_slots(self, num_seen: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the larger of `slots` and `min`, and 0 where a token sees no more."""
        wanted = np.ceil(self.slots.fraction * num_seen) if self.slots.tokens is None else self.slots.tokens
        wanted = np.maximum(wanted, self.min)
        return np.where(wanted < num_seen, wanted, 0).astype(np.int32)

    def priority(self, view: CacheView) -> Tensor:
        """Rank all slots alike; the cache never asks, since nothing is evicted."""
        return view.pos * 0
