"""What the engine needs of a cache and of its rows: `KVCacheManager` and `Row`, or those of a simulation.

The scheduler needs no more than this. What a step computes with needs the manager itself (batch_builder.py).
"""

from __future__ import annotations

from typing import Protocol

from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.prefix.start import Begun, Start
from retain.kv.row_task import RowTask
from retain.kv.stats.request import LoadStats, RequestMemory


class RequestRow(Protocol):
    """What the cache has of a running request; see kv/row.py."""

    @property
    def index(self) -> int:
        """Number of the row in block tables."""

    @property
    def num_pages(self) -> int:
        """Pages that the row owns now."""

    def start(self, task: RowTask, found: Start) -> Begun:
        """Begin with cached pages of a text."""

    def fork(self, policy: EvictionPolicy, num_computed_tokens: int, task: RowTask | None = None) -> RequestRow | None:
        """Open and start a row that continues the text of this one; None where that is not possible now."""

    def reserve(self, end_position: int) -> bool:
        """Own the pages of all positions below `end_position`. False when the pool has too few."""

    def next_stop(self, position: int) -> int:
        """Return the first later position where the cache has work to do, such as an eviction."""

    def advance(self, num_computed_tokens: int, num_uncomputed_tokens: int) -> None:
        """Do what is due where a step ended; what must be evicted is evicted later, with other rows."""

    def shrink(self, num_computed_tokens: int) -> bool:
        """Halve the row's budget where its policy allows it. Returns whether pages were freed."""

    def finish_load(self) -> LoadStats | None:
        """End the load of what the row began with, after a step. Where it failed, the row must start again."""

    def close(self) -> RequestMemory:
        """Leave the prefix to others; free the row and its pages. Returns what it owned."""


class SchedulerCache(Protocol):
    """What the scheduler needs of a cache; see kv/manager.py."""

    @property
    def page_size(self) -> int:
        """The number of slots in a page; each holds what is cached of one token."""

    @property
    def max_batched_tokens(self) -> int:
        """Most fresh tokens of a step."""

    @property
    def max_running_requests(self) -> int:
        """The number of rows in the cache: each running request needs one."""

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

    def find(self, policy: EvictionPolicy, task: RowTask) -> Start:
        """Return where a row may begin that computes a task under this policy."""

    def unpin_all(self) -> bool:
        """Drop all pins of prefixes. Returns whether there were any."""

    def open(self, policy: EvictionPolicy, num_uncomputed_tokens: int) -> RequestRow:
        """Open a row for a request with so many uncomputed tokens. It owns no pages yet."""
