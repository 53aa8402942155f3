"""Who pays how many tokens in the next step. Pure Python: it counts tokens and asks a purse for pages.

There are no phases. A request owes len(tokens) - computed tokens; chunked prefill, decoding, resumption and (later)
verification are payments of that debt, under `max_batched_tokens` a step and the pages of the pool. Who owes one token is
paid first, so that long prompts never stop a conversation; `max_batched_tokens` exceeds the number of rows, so that
conversations never stop a prompt. When pages run out, budgets that may shrink do; then the youngest gives all of its
own back and starts again later: the oldest always gets on, so nobody starves.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from retain.engine.request import Request
from retain.kv.eviction.policies import Policy
from retain.kv.prefix.cache import PrefixCache


class KVCacheManager(Protocol):
    """The cache, as far as scheduling goes (see kv/cache.py)."""

    def pages_needed(self, policy: Policy, length: int, num_uncomputed_tokens: int) -> int: ...  # noqa: D102
    def open(self, policy: Policy, num_uncomputed_tokens: int) -> int: ...  # noqa: D102
    def reserve(self, row: int, end_position: int) -> bool: ...  # noqa: D102
    def close(self, row: int) -> list[int]: ...  # noqa: D102
    @property
    def prefix_cache(self) -> PrefixCache | None: ...  # noqa: D102
    def tokens_until_eviction(self, row: int, num_computed_tokens: int) -> int: ...  # noqa: D102
    def needs_single_step(self, row: int) -> bool: ...  # noqa: D102
    def shrink(self, row: int, num_computed_tokens: int) -> bool: ...  # noqa: D102
    @property
    def free_pages(self) -> int: ...  # noqa: D102
    @property
    def total_pages(self) -> int: ...  # noqa: D102
    @property
    def free_rows(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class ScheduledRequest:
    """In this step `request` pays its next `n` tokens."""

    request: Request
    num_tokens: int


class Scheduler:
    """Requests that wait and requests that run, both oldest first."""

    def __init__(self, kv_cache_manager: KVCacheManager, max_batched_tokens: int):
        self.kv_cache_manager, self.max_batched_tokens = kv_cache_manager, max_batched_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def check_fits(self, request: Request) -> None:
        """Raises ValueError when even the empty pool could not hold it."""
        length = len(request.prompt) + request.max_tokens - 1  # the last token is never written
        cost, total = (
            self.kv_cache_manager.pages_needed(request.policy, length, length),
            self.kv_cache_manager.total_pages,
        )
        if cost > total:
            raise ValueError(
                f"a request of {len(request.prompt)} + {request.max_tokens} tokens needs {cost} pages of KV memory "
                f"and the pool has {total}: raise kv_memory, or ask for less"
            )

    def schedule(self) -> list[ScheduledRequest]:
        """The payments of the next step, drafts among them; their pages are owned when this returns."""
        shares, left = [], self.max_batched_tokens
        turn = self._iter_candidates()
        while left and (request := next(turn, None)):
            if request.row is None:
                continue  # preempted by an older one a moment ago
            stretch = self._get_token_limit(request)
            n = min(request.num_uncomputed_tokens + len(request.drafts), left, stretch)
            if n < stretch and self.kv_cache_manager.needs_single_step(request.row):
                continue  # until a step has room for all of it
            if request.drafts and not self.kv_cache_manager.reserve(request.row, request.next_position + n):
                n = 1  # nobody has to go for a guess
            request.trim_drafts(n)
            if self._reserve_pages(request, request.next_position + n):
                shares.append(ScheduledRequest(request, n))
                left -= n
        return [s for s in shares if s.request.row is not None]

    def _iter_candidates(self) -> Iterator[Request]:
        """The running ones, who owe one token before who owe more; then, if none of them had to go, admitted ones."""
        queue = len(self.waiting)
        yield from sorted(self.running, key=lambda r: (r.num_uncomputed_tokens > 1, r.id))
        while self.waiting and len(self.waiting) <= queue and self._can_admit(self.waiting[0]):
            request = self.waiting[0]
            request.row = self.kv_cache_manager.open(request.policy, request.num_uncomputed_tokens)
            self.waiting.pop(0)
            self.running.append(request)
            if self.kv_cache_manager.prefix_cache:
                again = request.num_preemptions > 0
                request.start_from_prefix(
                    *self.kv_cache_manager.prefix_cache.attach_prefix(request.row, *request.prefix_query, again)
                )
            yield request

    def _can_admit(self, request: Request) -> bool:
        """Its whole debt fits beside one more page for each that runs, so it is seldom preempted at once."""
        if not self.kv_cache_manager.free_rows:
            return False
        spare = len(self.running) * self.kv_cache_manager.pages_needed(request.policy, 1, 1)
        cost = self.kv_cache_manager.pages_needed(request.policy, len(request.tokens), request.num_uncomputed_tokens)
        missing = cost + spare - self.kv_cache_manager.free_pages
        if missing <= 0 or not self.running:  # alone it fits: see check
            return True
        return (
            self.kv_cache_manager.prefix_cache is not None
            and self.kv_cache_manager.prefix_cache.num_shared_pages(*request.prefix_query) >= missing
        )

    def _get_token_limit(self, request: Request) -> int:
        """How many tokens it may pay at once: none past a moment of forgetting."""
        assert request.row is not None
        if request.prompt_sharers and request.num_computed_tokens < len(request.prompt):
            return len(request.prompt) - request.num_computed_tokens
        if request.reread_chunk:
            return request.reread_chunk - request.num_reread_tokens % request.reread_chunk
        stretch = self.kv_cache_manager.tokens_until_eviction(request.row, request.num_computed_tokens)
        return (
            min(stretch, request.branch_point - request.num_computed_tokens)
            if request.branch_point > request.num_computed_tokens
            else stretch
        )

    def _reserve_pages(self, request: Request, end_position: int) -> bool:
        """Pages for `request` up to a position; where there are none, budgets shrink, or the youngest has to go."""
        assert request.row is not None
        while not self.kv_cache_manager.reserve(request.row, end_position):
            if self._shrink_one_budget():
                continue
            if (
                len(self.running) == 1
                and self.kv_cache_manager.prefix_cache
                and self.kv_cache_manager.prefix_cache.tree.unpin_all()
            ):
                continue  # alone it fits: see check
            youngest = max(self.running, key=lambda r: r.id)
            self.preempt(youngest)
            if youngest is request:
                return False
        return True

    def _shrink_one_budget(self) -> bool:
        """Somebody, the youngest that can, gives pages back and goes on with less."""
        youngest = sorted(self.running, key=lambda r: -r.id)
        return any(self.kv_cache_manager.shrink(r.row, r.num_computed_tokens) for r in youngest if r.row is not None)

    def enqueue(self, request: Request) -> None:
        """Into the queue; all of its tokens are to be computed."""
        request.num_computed_tokens = request.num_reread_tokens = request.branch_point = 0
        request.set_drafts([])
        bisect.insort(self.waiting, request, key=lambda r: r.id)

    def preempt(self, request: Request) -> None:
        """Back to the queue, without pages; its tokens will be computed again."""
        self._release(request)
        request.num_preemptions += 1
        self.enqueue(request)

    def requeue(self, request: Request) -> None:
        """What it began with did not come: it waits, and begins with less."""
        self._close_row(request)
        self.enqueue(request)

    def remove(self, request: Request) -> None:
        """It has ended or is cancelled: its pages go back at once."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self._release(request)

    def _release(self, request: Request) -> None:
        assert request.row is not None
        if self.kv_cache_manager.prefix_cache:
            self.kv_cache_manager.prefix_cache.insert(request.row, *request.prefix_entry)
        self._close_row(request)

    def _close_row(self, request: Request) -> None:
        assert request.row is not None
        peaks = self.kv_cache_manager.close(request.row)
        request.peak_slots = [max(p) for p in zip(peaks, request.peak_slots or peaks, strict=True)]
        self.running.remove(request)
        request.row = None
