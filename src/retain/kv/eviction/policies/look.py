"""look: keep every token, and let tokens of the answer attend to few of them, chosen anew at each step and head.

What to forget is decided before a question is known; what to look at, with its query in hand. The choice is by a copy
of the keys in 4 bits (see "Looks" in kernels/api.py), as IMPRESS finds important tokens with few bits (FAST 2025). The
prompt attends to everything.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from retain.kv.eviction.plan import MIN_LOOKED_SLOTS, choose_looked_slots
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.eviction.view import CacheView
from retain.options import PositiveInt, check_bounds
from retain.plugins import Amount
from retain.types import Ints


@dataclass(frozen=True)
class Policy(EvictionPolicy):
    """Attend to `slots` of each head: a number, or a share of the tokens that a token sees, no fewer than `min`.

    Layers with a window of the model's own attend to all of it.
    """

    slots: Amount  # that a token chooses in each head: 1024, or 12.5% of the tokens so far
    min: PositiveInt = MIN_LOOKED_SLOTS  # slots that a share is at least

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def looks(self) -> bool:
        """Whether tokens of the answer attend to few slots: they do."""
        return True

    def looked_slots(self, num_held: Ints) -> Ints:
        """Return `slots`, a share of no fewer than `min`, and 0 where a head holds no more."""
        return choose_looked_slots(self.slots, self.min, num_held)

    def priority(self, view: CacheView) -> Tensor:
        """Rank all slots alike; the cache never asks, since nothing is evicted."""
        return view.pos * 0
