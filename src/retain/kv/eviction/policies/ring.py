"""ring: keep the last `window` tokens; the oldest goes.

The ring buffer of sliding-window attention: Mistral's rolling buffer (arXiv 2310.06825), and a patent's. Lossless
where the model's own layer looks no further; on a layer that sees everything it makes the model forget.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from retain.kv.eviction.view import CacheView


@dataclass(frozen=True)
class Policy:
    """The last `window` tokens stay."""

    window: int

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"ring: window must be at least 1, not {self.window}")

    def resolve(self, prompt_len: int, system_len: int = 0) -> Policy:
        """A window is in tokens."""
        return self

    def priority(self, view: CacheView) -> Tensor:
        """The position: the oldest is the lowest."""
        return view.pos
