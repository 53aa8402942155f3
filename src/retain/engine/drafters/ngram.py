"""What followed when the text last ended like this (prompt look-up): costs nothing, and is right where texts repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from retain.engine.drafters import Target
from retain.engine.request import Request


@dataclass
class Index:
    """Where each of a text's n-grams was last seen to end."""

    n: int = 0  # tokens that are in it
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)


@dataclass
class Drafter:
    """Tokens behind the latest earlier place of the longest n-gram, `max` down to `min`, that ends the text."""

    k: str = "auto"
    min: int = 2
    max: int = 4
    _texts: WeakKeyDictionary[Request, Index] = field(default_factory=WeakKeyDictionary, init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max:
            raise ValueError(f"ngram: min and max are from 1 up, not {self.min} and {self.max}")

    @property
    def most(self) -> int:
        """See Drafter."""
        return 16

    def join(self, target: Target) -> None:
        """See Drafter."""

    def propose(self, asked: Sequence[tuple[Request, int]]) -> None:
        """See Drafter."""
        for request, most in asked:
            request.draft(self._find(request, most))

    def drop(self, request: Request) -> None:
        """See Drafter."""
        self._texts.pop(request, None)

    def _find(self, request: Request, most: int) -> list[int]:
        tokens, index = request.tokens, self._texts.setdefault(request, Index())
        for end in range(index.n + 1, len(tokens)):  # not the one that ends the text
            for n in range(self.min, min(self.max, end) + 1):
                index.ends[tuple(tokens[end - n : end])] = end
        index.n = len(tokens) - 1
        for n in range(min(self.max, len(tokens)), self.min - 1, -1):
            if found := index.ends.get(tuple(tokens[-n:])):
                return tokens[found : found + most]
        return []
