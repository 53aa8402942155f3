"""The scheduler: how many tokens of which request the next step computes. It counts tokens and reserves pages.

There are no phases. A request has uncomputed tokens; chunked prefill, decoding, resumption and verification of drafts
compute some of them, under a token limit and the pages of the pool. Requests with one uncomputed token come first, so
that long prompts never stall decoding; the token limit exceeds the number of rows, so that decoding never stalls a
prompt. When pages run out, budgets shrink where they may; then the youngest request (see below) is preempted: it frees
all of its pages and starts again later. The oldest always advances, so every request ends.

Owners (API keys) share all of it. Their prompts take turns, of requests that run and of those that wait. The last free
rows are for the owners with the fewest requests, and the youngest request is that of the owner with the most. One that
has nothing running takes rows and pages from another that has more than half of them.
"""

from __future__ import annotations

import bisect
import logging
from collections import Counter
from time import perf_counter
from typing import NamedTuple

from retain.engine.cache_interface import RequestRow, SchedulerCache
from retain.engine.prompt_sharing import PromptSharing
from retain.engine.request import Request
from retain.kv.prefix.start import Start
from retain.kv.stats.request import RequestMemory

log = logging.getLogger(__name__)


class ScheduledRequest(NamedTuple):
    """A request with its row, and how many of its next tokens the step computes, drafts among them."""

    request: Request
    row: RequestRow
    num_tokens: int
    num_logits: int  # of the last of these tokens


class Scheduler:
    """Requests that wait, the oldest first, and the rows of those that run, by request, the first admitted first."""

    def __init__(self, cache: SchedulerCache, sharing: PromptSharing):
        self.cache = cache
        self.sharing = sharing
        self.max_batched_tokens = cache.max_batched_tokens
        self.waiting: list[Request] = []
        self.running: dict[Request, RequestRow] = {}
        self.num_preemptions = 0
        self._num_turns = 0  # of owners
        self._last_turn = Counter[str]()  # by owner
        self._stalled = dict[int, int]()  # tokens of requests that got no pages although they ran alone, by id

    def check_fits(self, request: Request) -> None:
        """Raise ValueError when even the empty pool could not hold the request."""
        num_prompt = len(request.prompt)
        max_tokens = request.input.max_tokens
        length = num_prompt + max_tokens - 1  # the last token is never written
        needed = self.cache.pages_needed(request.policy, length, length)
        total = self.cache.total_pages
        if needed > total:
            raise ValueError(
                f"a request of {num_prompt} + {max_tokens} tokens needs {needed} pages of KV memory "
                f"and the pool has {total}: raise kv_memory (or the capacity of kv_offload), or ask for less"
            )

    def schedule(self) -> list[ScheduledRequest]:
        """Choose the tokens of the next step, and reserve their pages."""
        scheduled: list[ScheduledRequest] = []
        left = self.max_batched_tokens
        num_waiting = len(self.waiting)
        running = sorted((r for r in self.running if not r.awaits_tokens), key=lambda r: r.id)
        turns = [r for r in running if r.num_uncomputed_tokens > 1]
        prompts = set(turns)
        for request in running:
            if left and request not in prompts and request in self.running:  # an older one may have taken its row
                left -= self._schedule_request(request, left, scheduled)
        waiting = [r for r in self.waiting if not r.awaits_tokens] if len(self.waiting) <= num_waiting else []
        turns = [*(r for r in turns if r in self.running), *waiting]
        while left and turns:
            request = min(turns, key=self._turn)
            turns.remove(request)
            is_waiting = request not in self.running
            num_waiting = len(self.waiting) - is_waiting
            if is_waiting and not self._admit(request):
                turns = [r for r in turns if r in self.running or self._comes_before(r, request)]
                continue
            left -= self._schedule_request(request, left, scheduled)
            if len(self.waiting) > num_waiting:  # one was preempted: nothing is admitted in its place
                turns = [r for r in turns if r in self.running]
        return [s for s in scheduled if self.is_running(s)]

    def is_running(self, scheduled: ScheduledRequest) -> bool:
        """Return whether a request still runs in the row that it had when it was scheduled."""
        return self.running.get(scheduled.request) is scheduled.row

    def find_stalled(self) -> Request | None:
        """Return the request that can never go on, after a step in which nothing could be scheduled; or None.

        The oldest got no pages although no other had any. Once that may be due to what it began with. The second time,
        without a token more, it is a mistake of the plan by which `check_fits` let it in: it would begin for ever.
        """
        request = min((*self.running, *self.waiting), key=lambda r: r.id, default=None)
        if request is None or self._stalled.get(request.id) == len(request.tokens):
            return request
        self._stalled[request.id] = len(request.tokens)
        return None

    def _schedule_request(self, request: Request, token_budget: int, scheduled: list[ScheduledRequest]) -> int:
        """Schedule as many tokens of a running request as possible. Returns their number."""
        row = self.running[request]
        limit = row.next_stop(request.next_position) - request.next_position
        num_uncomputed = request.num_uncomputed_tokens
        n = min(num_uncomputed + len(request.drafts), token_budget, limit)
        if request.drafts:
            n = n if self._reserve(request, n) else 1  # no request is preempted for drafts
            request.trim_drafts(n)
        if not self._reserve_or_preempt(request, n):
            return 0
        scheduled.append(ScheduledRequest(request, row, n, request.num_logits(n)))
        if num_uncomputed > 1:
            self._count_turn(request.input.owner)
        return n

    def _count_turn(self, owner: str) -> None:
        """Record that it was an owner's turn: a prompt of it is computed, or a request of it was admitted."""
        self._num_turns += 1
        self._last_turn[owner] = self._num_turns

    def _turn(self, request: Request) -> tuple[int, bool, int]:
        """Return a key by which prompts are computed, and requests admitted for it.

        Next is the owner whose last turn was first: with the oldest of its prompts, then with the oldest that waits.
        """
        return self._last_turn[request.input.owner], request not in self.running, request.id

    def _admit(self, request: Request) -> bool:
        """Open a row for a waiting request, with the prefix that is cached of it, unless it must wait."""
        num_running = Counter(r.input.owner for r in self.running)
        own = num_running[request.input.owner]
        others = {r.input.owner for r in self.waiting if num_running[r.input.owner] < own}
        if others and self.cache.free_rows <= len(others):
            return False
        found = self._find_start(request) or (None if own else self._make_room(request))
        if found is None:
            return False
        self.waiting.remove(request)
        request.stats.scheduled_time = request.stats.scheduled_time or perf_counter()
        self.running[request] = self.cache.open(request.policy, request.num_uncomputed_tokens)
        self._start(request, self.running[request], found)
        self._count_turn(request.input.owner)  # a prompt that is cached takes no other turn
        return True

    def _comes_before(self, request: Request, refused: Request) -> bool:
        """Return whether a request may be admitted although another, whose turn it was, was not.

        Only one of an owner with fewer running: otherwise small requests would pass a large one for ever.
        """
        num_running = Counter(r.input.owner for r in self.running)
        return num_running[request.input.owner] < num_running[refused.input.owner]

    def _start(self, request: Request, row: RequestRow, found: Start) -> None:
        """Begin with the prefix that is cached of a request; the first time, find out why there is no more of it."""
        stats = request.stats
        begun = row.start(request.row_task(stops_at_prompt_end=bool(self.sharing.followers(request))), found)
        request.start_from_prefix(begun.position)
        stats.prefix_diagnosis = begun.diagnosis or stats.prefix_diagnosis
        stats.loads += [begun.state_load] if begun.state_load else []

    def _find_start(self, request: Request) -> Start | None:
        """Return where a request begins, if all its tokens fit beside one more page of tokens for each that runs.

        So a request is seldom preempted right after its admission. None where it has to wait.
        """
        if not self.cache.free_rows:
            return None
        found = self.cache.find(request.policy, request.row_task())
        needed = self.cache.pages_needed(request.policy, request.num_tokens, request.num_uncomputed_tokens)
        missing = needed - self.cache.free_pages
        if missing + len(self.running) * self.cache.pages_needed(request.policy, 1, 1) <= 0:
            return found
        missing += sum(map(self._next_pages, self.running))
        if missing <= 0 or not self.running:  # alone it fits: see check_fits
            return found
        return found if found.num_shared_pages >= missing else None

    def _make_room(self, request: Request) -> Start | None:
        """Preempt requests of another owner that has more than half of the rows or pages, until a request is admitted.

        Returns where it begins; None where it has to wait all the same.
        """
        while (found := self._find_start(request)) is None:
            victim = self._find_victim()
            owned = [r for r in self.running if r.input.owner == victim.input.owner]
            num_pages = sum(self.running[r].num_pages for r in owned)
            has_half = 2 * len(owned) > self.cache.max_running_requests or 2 * num_pages > self.cache.total_pages
            if len(owned) == 1 or not has_half:
                return None
            self.preempt(victim)
        return found

    def _find_victim(self) -> Request:
        """Return the running request to preempt next: the youngest of the owner that has the most."""
        num_running = Counter(r.input.owner for r in self.running)
        return max(self.running, key=lambda r: (num_running[r.input.owner], r.id))

    def _next_pages(self, request: Request) -> int:
        """Return the pages that a running request needs for one more page of tokens, or for those that it may have."""
        length = request.num_tokens
        last = len(request.prompt) + request.input.max_tokens - 1
        longer = max(length, min(length + self.cache.page_size, last))
        before, after = (self.cache.pages_needed(request.policy, n, n) for n in (length, longer))
        return after - before

    # ---- pages ---------------------------------------------------------------------------------------------------

    def _reserve(self, request: Request, num_tokens: int) -> bool:
        return self.running[request].reserve(request.next_position + num_tokens)

    def _reserve_or_preempt(self, request: Request, num_tokens: int) -> bool:
        """Reserve pages; shrink a budget or preempt a request while there are too few."""
        while not self._reserve(request, num_tokens):
            if self._shrink_one_budget():
                continue
            if len(self.running) == 1 and self.cache.unpin_all():
                continue  # alone it fits: see check_fits
            victim = self._find_victim()
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _shrink_one_budget(self) -> bool:
        """Halve the budget of the youngest request that allows it. Returns whether pages were freed.

        Where drafts are pending, nobody knows yet how many of the row's slots stay.
        """
        for request in sorted(self.running, key=lambda r: -r.id):
            if request.drafts and request.num_pending_tokens:
                continue
            if self.running[request].shrink(request.num_computed_tokens):
                log.info("KV memory is full: the budget of request %d was halved", request.id)
                return True
        return False

    # ---- queues --------------------------------------------------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        """Put a request into the queue; all of its tokens are to be computed."""
        request.reset()
        bisect.insort(self.waiting, request, key=lambda r: r.id)

    def preempt(self, request: Request) -> None:
        """Free the pages of a request and put it back into the queue."""
        log.info("KV memory is full: request %d is preempted after %d tokens", request.id, request.num_computed_tokens)
        try:
            self._close_row(request)
        finally:
            self.num_preemptions += 1
            request.stats.num_preemptions += 1
            self.enqueue(request)

    def requeue(self, request: Request) -> None:
        """Put a request whose prefix could not be loaded back into the queue."""
        self._close_row(request)
        self.enqueue(request)

    def start_forked(self, request: Request, row: RequestRow) -> None:
        """Run a request that begins with a fork of its leader's row."""
        self.running[request] = row

    def remove(self, request: Request) -> None:
        """Free the pages of a request that has ended, and record what it owned."""
        self._stalled.pop(request.id, None)
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            memory = self._close_row(request)
            request.stats.final_slots = list(memory.final_slots)
            request.stats.num_final_pages = memory.num_final_pages

    def _close_row(self, request: Request) -> RequestMemory:
        """Close the row of a request, which leaves its prefix to others. Returns what it owned."""
        memory = self.running.pop(request).close()
        before = request.stats.peak_slots or memory.peak_slots
        request.stats.peak_slots = [max(p) for p in zip(memory.peak_slots, before, strict=True)]
        return memory
