"""What the engine needs of a cache and of its rows: `KVCacheManager` and `Row`, or those of a simulation.

The scheduler needs no more than this. What a step computes with needs the manager itself (batch_builder.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.prefix.query import PrefixEntry, PrefixQuery
from retain.kv.row import AttachedPrefix
from retain.kv.stats.attention_trace import AttentionTrace
from retain.kv.stats.request import LoadStats


class RequestRow(Protocol):
    """What the cache has of a running request; see kv/row.py."""

    @property
    def index(self) -> int:
        """Number of the row in block tables."""

    @property
    def num_pages(self) -> int:
        """Pages that the row owns now."""

    @property
    def slots_per_layer(self) -> list[int]:
        """Slots that the largest head owns now, in each layer that has a cache."""

    def attach_prefix(self, query: PrefixQuery, was_preempted: bool = False, explain: bool = False) -> AttachedPrefix:
        """Begin with cached pages."""

    def fork(self, policy: EvictionPolicy, num_computed_tokens: int) -> RequestRow | None:
        """Open a row that continues the text of this one; None where that is not possible now."""

    def reserve(self, end_position: int, scoring: bool = False) -> bool:
        """Own the pages of all positions below `end_position`. False when the pool has too few."""

    def tokens_until_eviction(self, num_computed_tokens: int) -> int:
        """Return how many tokens can be computed before the row evicts; a step must not pass that point."""

    def shrink_budget(self, num_computed_tokens: int) -> bool:
        """Halve the row's budget where its policy allows it. Returns whether pages were freed."""

    def finish_load(self) -> LoadStats | None:
        """End the load of what the row began with, after a step. Where it failed, the row must start again."""

    def restore_masses(self, num_computed_tokens: int) -> None:
        """Give the slots the masses that the row began with, if all those tokens are computed now."""

    def store_prefix(self, entry: PrefixEntry, still_running: bool = False) -> None:
        """Keep the pages of the row's text for others."""

    def snapshot_positions(self, begin: int, end: int) -> Sequence[int]:
        """Return the positions after `begin`, up to `end`, where a long text keeps snapshots."""

    def is_at_chunk_end(self, num_computed_tokens: int) -> bool:
        """Return whether a streamed prompt was just evicted from, where others may leave it."""

    def store_chunk_end(self, entry: PrefixEntry) -> None:
        """Keep a copy of the state at the end of a chunk."""

    def rollback(self, num_computed_tokens: int) -> None:
        """Drop a chunk of a scoring pass."""

    def commit(self, num_computed_tokens: int, num_uncomputed_tokens: int) -> None:
        """Count a step: what the row must give back is known now."""

    def record_attention(self, trace: AttentionTrace, num_computed_tokens: int) -> None:
        """Record which tokens every head keeps, and their masses."""

    def record_attention_if_due(self, trace: AttentionTrace, num_computed_tokens: int) -> None:
        """Do so before `commit`, if the row must evict or the last record is old."""

    def close(self) -> list[int]:
        """Free the row and its pages. Returns the most slots that one head owned, in each layer with a cache."""


class SchedulerCache(Protocol):
    """What the scheduler needs of a cache; see kv/manager.py."""

    @property
    def page_size(self) -> int:
        """Slots of a page."""

    @property
    def max_batched_tokens(self) -> int:
        """Most fresh tokens of a step."""

    @property
    def max_running_requests(self) -> int:
        """Rows, open or not."""

    @property
    def total_pages(self) -> int:
        """Pages of the empty pool."""

    @property
    def free_pages(self) -> int:
        """Pages that a request can get now."""

    @property
    def free_rows(self) -> int:
        """Requests that can still be opened."""

    def pages_needed(self, policy: EvictionPolicy, length: int, num_uncomputed_tokens: int) -> int:
        """Return the pages that a request owns at most on the way to `length` tokens."""

    def num_shared_pages(self, query: PrefixQuery) -> int:
        """Return how many pages of a text are in the tables of rows already."""

    def unpin_all(self) -> bool:
        """Drop all pins of prefixes. Returns whether there were any."""

    def open(self, policy: EvictionPolicy, num_uncomputed_tokens: int) -> RequestRow:
        """Open a row for a request with so many uncomputed tokens. It owns no pages yet."""
