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
    seed: int = 0  # of a policy's noise

    @property
    def max_skipped_tokens(self) -> int:
        """The first tokens that cached pages may supply; fewer than `max_length` where the policy needs queries."""
        skippable = self.policy.max_skippable_tokens
        return self.max_length if skippable is None else min(self.max_length, skippable)


@dataclass(frozen=True)
class PrefixEntry:
    """The tokens of a text that a row has computed, whose first `length` are to be cached.

    The first `prompt_len` tokens are the prompt. The request first began with `begun_at` cached tokens. The row has
    computed `num_computed`: more than those of a text whose end was dropped.
    """

    policy: EvictionPolicy
    tokens: Sequence[int]
    prompt_len: int
    salt: str = ""
    seed: int = 0  # of a policy's noise
    length: int = -1  # all of them
    begun_at: int = 0
    num_computed: int = -1  # as many as there are tokens

    def __post_init__(self) -> None:
        if self.length < 0:
            object.__setattr__(self, "length", len(self.tokens))
        if self.num_computed < 0:
            object.__setattr__(self, "num_computed", len(self.tokens))
