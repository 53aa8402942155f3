"""ring: keep the last `window` tokens; the oldest is overwritten.

The ring buffer of sliding-window attention: Mistral's rolling buffer (arXiv 2310.06825), and a patent's. Lossless
where the model's own layer sees no further; on a layer without a window it makes the model forget.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.eviction.view import CacheView
from retain.options import PositiveInt, check_bounds


@dataclass(frozen=True)
class Policy(EvictionPolicy):
    """Keep the last `window` tokens."""

    window: PositiveInt

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def ring_window(self) -> int:
        """The number of newest tokens that a layer sees."""
        return self.window

    def priority(self, view: CacheView) -> Tensor:
        """Rank by position: the oldest is the lowest."""
        return view.pos
