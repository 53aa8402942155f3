"""The prefix cache of an engine that caches no prefixes (`prefix_cache=off`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from retain.kv.eviction.evicted_state import EvictedState
from retain.kv.eviction.evictor import BudgetEvictor
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.eviction.prompt_masses import PromptMasses
from retain.kv.prefix.cache import FoundPrefix
from retain.kv.prefix.events import PrefixObserver
from retain.kv.prefix.history import SeenText
from retain.kv.prefix.node import EvictionRecord
from retain.kv.prefix.query import PrefixEntry, PrefixQuery
from retain.kv.prefix.snapshot_ladder import SnapshotLadder
from retain.kv.stores.manager import Offloader
from retain.types import Ints


class NullPrefixCache:
    """Find and store nothing. The methods are those of PrefixCache."""

    enabled = False
    num_evictable_pages = 0
    num_queried_tokens = 0
    ladder = SnapshotLadder(0)

    def __init__(self, num_pages: int):
        self.pages: Ints = np.zeros(0, np.int32)
        self.num_holders: Ints = np.zeros(num_pages, np.int32)

    def num_shared_pages(self, query: PrefixQuery) -> int:  # noqa: D102
        return 0

    def attach(self, row: int, query: PrefixQuery, was_preempted: bool = False) -> FoundPrefix:  # noqa: D102
        return FoundPrefix()

    def store(  # noqa: D102
        self, row: int, entry: PrefixEntry, still_running: bool = False, seen_text: SeenText | None = None
    ) -> None:
        return

    def store_masses(self, entry: PrefixEntry, masses: PromptMasses) -> None:  # noqa: D102
        return

    def find_state(self, query: PrefixQuery) -> EvictedState | None:  # noqa: D102
        return None

    def store_state(  # noqa: D102
        self, entry: PrefixEntry, evictors: Sequence[BudgetEvictor], in_prompt: bool = False
    ) -> None:
        return

    def pin(  # noqa: D102
        self, policy: EvictionPolicy, tokens: Sequence[int], salt: str, seconds: float, owner: str = ""
    ) -> int:
        raise ValueError("prefix_cache=off keeps nothing: there is nothing to pin")

    def keep_history(self) -> None:  # noqa: D102
        return

    def unpin_all(self) -> bool:  # noqa: D102
        return False

    def record_compute(self, num_tokens: int, seconds: float) -> None:  # noqa: D102
        return

    def set_offloader(self, offloader: Offloader) -> None:  # noqa: D102
        raise ValueError("prefix_cache=off keeps nothing: there is nothing for a tier")

    def set_observer(self, observer: PrefixObserver) -> None:  # noqa: D102
        raise ValueError("prefix_cache=off keeps nothing: there are no events for --kv-events")

    def take_evictions(self) -> list[EvictionRecord]:  # noqa: D102
        return []

    def close_offloader(self) -> None:  # noqa: D102
        return

    def hits_by_source(self) -> dict[str, int]:  # noqa: D102
        return {"pool": 0}

    def tier_stats(self) -> list[dict[str, Any]]:  # noqa: D102
        return []

    def snapshot_stats(self) -> tuple[int, int]:  # noqa: D102
        return 0, 0
