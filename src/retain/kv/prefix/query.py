"""What the prefix cache is asked for, and what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from retain.kv.eviction.policy import EvictionPolicy


@dataclass(frozen=True)
class PrefixQuery:
    """A text that wants to begin with cached pages: at most `max_length` of its tokens, of the same `salt` only."""

    policy: EvictionPolicy
    tokens: Sequence[int]
    max_length: int
    salt: str = ""

    @property
    def max_skipped_tokens(self) -> int:
        """The first tokens that cached pages may supply; fewer than `max_length` where the policy needs queries."""
        skippable = self.policy.max_skippable_tokens
        return self.max_length if skippable is None else min(self.max_length, skippable)


@dataclass(frozen=True)
class PrefixEntry:
    """A text whose pages are to be cached; its first `prompt_len` tokens are the prompt."""

    policy: EvictionPolicy
    tokens: Sequence[int]
    prompt_len: int
    salt: str = ""
