"""What the prefix cache is asked for, and what it is given."""

from __future__ import annotations

from dataclasses import dataclass

from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.text import Text


@dataclass(frozen=True)
class PrefixQuery:
    """A text that wants to begin with cached pages: at most `max_length` of its tokens, of the same `salt` only."""

    policy: EvictionPolicy
    text: Text
    max_length: int
    seed: int = 0  # of a policy's noise


@dataclass(frozen=True)
class PrefixEntry:
    """The tokens of a text that a row has computed, whose first `length` are to be cached."""

    policy: EvictionPolicy
    text: Text
    prompt_len: int
    length: int
    num_computed: int
    seed: int = 0  # of a policy's noise
    begun_at: int = 0
