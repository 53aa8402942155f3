"""What an observer of the prefix cache is told: which pages requests may begin with.

Only whole pages count, of texts that were computed under the model's own windows. Rows that evict, rings shorter than
the model's windows, and rows that hold only the important tokens of a prefix are never mentioned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from retain.types import Ints


class StoredPages(NamedTuple):
    """Consecutive whole pages of a text that are cached from now on."""

    parent_hash: bytes | None  # of the page before them; None at the beginning of a text
    block_hashes: Sequence[bytes]
    tokens: Ints  # [n * page_size]


class PrefixObserver(Protocol):
    """Follows the content of the prefix cache. Called in the thread of the engine, which must not wait."""

    def on_stored(self, pages: StoredPages, group: str) -> None:
        """Handle pages that requests whose texts are of this group (`Text.group`) may begin with."""

    def on_removed(self, block_hashes: Sequence[bytes]) -> None:
        """Handle pages that were evicted; some of them may never have been stored for observers."""

    def on_cleared(self) -> None:
        """Handle the removal of all pages."""
