"""The history of the prefix cache: texts that requests computed, and pages that were evicted.

The tree forgets what it evicts and never sees what is not stored. A diagnosis needs both, so this remembers the latest
of them. It exists only once somebody has asked for a diagnosis.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from time import monotonic

from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.text import NO_KEYING, Keying, Text, common_prefix_length
from retain.types import Ints

MAX_TEXTS = 256
MAX_TOKENS = 2**22
MAX_EVICTIONS = 256


@dataclass(eq=False)
class SeenText:
    """A text that a request computed, and how many of its first tokens were stored."""

    link: bytes  # the first of its hashes
    group: str  # see `Text.group`
    policy: EvictionPolicy
    tokens: Ints
    keying: Keying = NO_KEYING
    num_stored_tokens: int = 0
    is_running: bool = False


class PrefixHistory:
    """The latest texts of all groups, and the latest evictions; the oldest are dropped beyond the limits."""

    def __init__(self) -> None:
        self.max_texts = MAX_TEXTS
        self.max_tokens = MAX_TOKENS
        self.texts: deque[SeenText] = deque()
        self.evictions: deque[tuple[float, frozenset[bytes]]] = deque(maxlen=MAX_EVICTIONS)  # time, block hashes

    # ---- recording -----------------------------------------------------------------------------------------------

    def add(self, text: SeenText) -> None:
        """Add a text to those that were seen, and drop the oldest beyond the limit."""
        self.texts.append(text)
        self._drop_oldest()

    def store(self, text: SeenText, tokens: Ints, num_stored_tokens: int) -> None:
        """Record that the first tokens of a text were stored; an answer may have made it longer."""
        text.tokens = tokens
        text.num_stored_tokens = num_stored_tokens
        self._drop_oldest()

    def evict(self, block_hashes: Sequence[bytes]) -> None:
        """Record that pages were evicted."""
        self.evictions.append((monotonic(), frozenset(block_hashes)))

    def _drop_oldest(self) -> None:
        while len(self.texts) > self.max_texts or (self.num_tokens > self.max_tokens and len(self.texts) > 1):
            self.texts.popleft()

    @property
    def num_tokens(self) -> int:
        """The tokens of all texts."""
        return sum(len(text.tokens) for text in self.texts)

    # ---- asking --------------------------------------------------------------------------------------------------

    def nearest_text(self, text: Text, tokens: Ints, besides: Collection[SeenText] = ()) -> tuple[SeenText, int] | None:
        """Return the text that shares the most first `tokens` of a text, the newest of equals, and their number."""
        others = [t for t in self.of_group(text.group) if t not in besides]
        found = [(t, text.keying.count_shared(t.keying, 0, common_prefix_length(t.tokens, tokens))) for t in others]
        return max(reversed(found), key=lambda x: x[1], default=None)

    def of_group(self, group: str) -> list[SeenText]:
        """Return the texts of a group, the oldest first."""
        return [t for t in self.texts if t.group == group]

    def evicted_hashes(self) -> dict[bytes, float]:
        """Return the hashes of all pages that are known to be evicted, and when each last was."""
        return {block_hash: time for time, hashes in self.evictions for block_hash in hashes}

    def evicted_at(self, block_hash: bytes) -> float | None:
        """Return when the page with this hash was last evicted; None where that is not known."""
        return next((time for time, hashes in reversed(self.evictions) if block_hash in hashes), None)
