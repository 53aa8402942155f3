"""What followed when the text last ended like this (prompt look-up): costs nothing, and is right where texts repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from retain.engine.drafters import TargetModel
from retain.engine.request import Request


@dataclass
class NgramIndex:
    """Where each of a text's n-grams was last seen to end."""

    num_tokens: int = 0  # tokens that are in it
    end_positions: dict[tuple[int, ...], int] = field(default_factory=dict)


@dataclass
class Drafter:
    """Tokens behind the latest earlier place of the longest n-gram, `max` down to `min`, that ends the text."""

    k: str = "auto"
    min: int = 2
    max: int = 4
    _indexes: WeakKeyDictionary[Request, NgramIndex] = field(default_factory=WeakKeyDictionary, init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max:
            raise ValueError(f"ngram: min and max are from 1 up, not {self.min} and {self.max}")

    @property
    def max_draft_tokens(self) -> int:
        """See Drafter."""
        return 16

    def attach(self, target: TargetModel) -> None:
        """See Drafter."""

    def propose(self, draft_limits: Sequence[tuple[Request, int]]) -> None:
        """See Drafter."""
        for request, most in draft_limits:
            request.set_drafts(self._lookup(request, most))

    def remove_request(self, request: Request) -> None:
        """See Drafter."""
        self._indexes.pop(request, None)

    def _lookup(self, request: Request, max_drafts: int) -> list[int]:
        tokens, index = request.tokens, self._indexes.setdefault(request, NgramIndex())
        for end in range(index.num_tokens + 1, len(tokens)):  # not the one that ends the text
            for n in range(self.min, min(self.max, end) + 1):
                index.end_positions[tuple(tokens[end - n : end])] = end
        index.num_tokens = len(tokens) - 1
        for n in range(min(self.max, len(tokens)), self.min - 1, -1):
            if found := index.end_positions.get(tuple(tokens[-n:])):
                return tokens[found : found + max_drafts]
        return []
