"""ngram: draft what followed the latest earlier occurrence of the text's last tokens (prompt lookup).

It costs almost nothing, and its drafts are accepted where texts repeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar
from weakref import WeakKeyDictionary

from retain.engine.cache_interface import RequestRow
from retain.engine.drafters import DrafterNeeds, TargetModel
from retain.engine.request import Request
from retain.options import PositiveInt, check_bounds


@dataclass
class NgramIndex:
    """The latest end position of each n-gram in the first `num_tokens` tokens of a text."""

    num_tokens: int = 0
    end_positions: dict[tuple[int, ...], int] = field(default_factory=dict)


@dataclass
class Drafter:
    """Look up the longest n-gram that ends the text and occurred before, from `max` tokens down to `min`."""

    needs: ClassVar[DrafterNeeds] = DrafterNeeds()
    max_draft_tokens: ClassVar[int] = 16
    k: str = "auto"
    min: PositiveInt = 2
    max: PositiveInt = 4
    _indexes: WeakKeyDictionary[Request, NgramIndex] = field(default_factory=WeakKeyDictionary, init=False)

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.min > self.max:
            raise ValueError(f"ngram: min must be at most max, which is {self.max}, not {self.min}")

    def attach(self, target: TargetModel) -> None:
        """Do nothing: drafts are copied from the text, so no model is needed."""

    def propose(self, draft_limits: Sequence[tuple[Request, int]], rows: Mapping[Request, RequestRow]) -> None:
        """Set the drafts of each request, by its own text."""
        for request, limit in draft_limits:
            request.set_drafts(self._lookup(request, limit))

    def remove_request(self, request: Request) -> None:
        """Drop the index of a request."""
        self._indexes.pop(request, None)

    def _lookup(self, request: Request, max_drafts: int) -> list[int]:
        tokens = request.tokens
        index = self._indexes.setdefault(request, NgramIndex())
        for end in range(index.num_tokens + 1, len(tokens)):  # without the n-grams that end the text
            for n in range(self.min, min(self.max, end) + 1):
                index.end_positions[tuple(tokens[end - n : end])] = end
        index.num_tokens = len(tokens) - 1
        for n in range(min(self.max, len(tokens)), self.min - 1, -1):
            if end_position := index.end_positions.get(tuple(tokens[-n:])):
                return tokens[end_position : end_position + max_drafts]
        return []
