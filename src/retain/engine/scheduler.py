"""Who pays how many tokens in the next step. Pure Python: it counts tokens and asks a purse for pages.

There are no phases. A request owes len(tokens) - computed tokens; chunked prefill, decoding, resumption and (later)
verification are payments of that debt, under `step_tokens` a step and the pages of the pool. Who owes one token is
paid first, so that long prompts never stop a conversation; `step_tokens` exceeds the number of rows, so that
conversations never stop a prompt. When pages run out, budgets that may shrink do; then the youngest gives all of its
own back and starts again later: the oldest always gets on, so nobody starves.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from retain.engine.request import Request
from retain.kv.policies import Policy
from retain.kv.reuse import Reuse


class Purse(Protocol):
    """The cache, as far as scheduling goes (see kv/cache.py)."""

    def cost(self, policy: Policy, length: int, owed: int) -> int: ...  # noqa: D102
    def open(self, policy: Policy, owed: int) -> int: ...  # noqa: D102
    def grow(self, row: int, upto: int) -> bool: ...  # noqa: D102
    def close(self, row: int) -> list[int]: ...  # noqa: D102
    @property
    def reuse(self) -> Reuse | None: ...  # noqa: D102
    def stretch(self, row: int, computed: int) -> int: ...  # noqa: D102
    def whole(self, row: int) -> bool: ...  # noqa: D102
    def shrink(self, row: int, computed: int) -> bool: ...  # noqa: D102
    @property
    def free_pages(self) -> int: ...  # noqa: D102
    @property
    def total_pages(self) -> int: ...  # noqa: D102
    @property
    def free_rows(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class Share:
    """In this step `request` pays its next `n` tokens."""

    request: Request
    n: int


class Scheduler:
    """Requests that wait and requests that run, both oldest first."""

    def __init__(self, purse: Purse, step_tokens: int):
        self.purse, self.step_tokens = purse, step_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def check(self, request: Request) -> None:
        """Raises ValueError when even the empty pool could not hold it."""
        length = len(request.prompt) + request.max_tokens - 1  # the last token is never written
        cost, total = self.purse.cost(request.policy, length, length), self.purse.total_pages
        if cost > total:
            raise ValueError(
                f"a request of {len(request.prompt)} + {request.max_tokens} tokens needs {cost} pages of KV memory "
                f"and the pool has {total}: raise kv_memory, or ask for less"
            )

    def plan(self) -> list[Share]:
        """The payments of the next step, drafts among them; their pages are owned when this returns."""
        shares, left = [], self.step_tokens
        turn = self._in_turn()
        while left and (request := next(turn, None)):
            if request.row is None:
                continue  # preempted by an older one a moment ago
            stretch = self._stretch(request)
            n = min(request.owed + len(request.drafts), left, stretch)
            if n < stretch and self.purse.whole(request.row):
                continue  # until a step has room for all of it
            if request.drafts and not self.purse.grow(request.row, request.position + n):
                n = 1  # nobody has to go for a guess
            request.cut(n)
            if self._make_room(request, request.position + n):
                shares.append(Share(request, n))
                left -= n
        return [s for s in shares if s.request.row is not None]

    def _in_turn(self) -> Iterator[Request]:
        """The running ones, who owe one token before who owe more; then, if none of them had to go, admitted ones."""
        queue = len(self.waiting)
        yield from sorted(self.running, key=lambda r: (r.owed > 1, r.id))
        while self.waiting and len(self.waiting) <= queue and self._admissible(self.waiting[0]):
            request = self.waiting[0]
            request.row = self.purse.open(request.policy, request.owed)
            self.waiting.pop(0)
            self.running.append(request)
            if self.purse.reuse:
                again = request.preempted > 0
                request.resume(*self.purse.reuse.resume(request.row, *request.beginning, again))
            yield request

    def _admissible(self, request: Request) -> bool:
        """Its whole debt fits beside one more page for each that runs, so it is seldom preempted at once."""
        if not self.purse.free_rows:
            return False
        spare = len(self.running) * self.purse.cost(request.policy, 1, 1)
        cost = self.purse.cost(request.policy, len(request.tokens), request.owed)
        missing = cost + spare - self.purse.free_pages
        if missing <= 0 or not self.running:  # alone it fits: see check
            return True
        return self.purse.reuse is not None and self.purse.reuse.covered(*request.beginning) >= missing

    def _stretch(self, request: Request) -> int:
        """How many tokens it may pay at once: none past a moment of forgetting."""
        assert request.row is not None
        if request.followers and request.computed < len(request.prompt):
            return len(request.prompt) - request.computed
        if request.rereads:
            return request.rereads - request.reread % request.rereads
        stretch = self.purse.stretch(request.row, request.computed)
        return min(stretch, request.mark - request.computed) if request.mark > request.computed else stretch

    def _make_room(self, request: Request, upto: int) -> bool:
        """Pages for `request` up to a position; where there are none, budgets shrink, or the youngest has to go."""
        assert request.row is not None
        while not self.purse.grow(request.row, upto):
            if self._shrink():
                continue
            if len(self.running) == 1 and self.purse.reuse and self.purse.reuse.tree.unpin():
                continue  # alone it fits: see check
            youngest = max(self.running, key=lambda r: r.id)
            self.preempt(youngest)
            if youngest is request:
                return False
        return True

    def _shrink(self) -> bool:
        """Somebody, the youngest that can, gives pages back and goes on with less."""
        youngest = sorted(self.running, key=lambda r: -r.id)
        return any(self.purse.shrink(r.row, r.computed) for r in youngest if r.row is not None)

    def wait(self, request: Request) -> None:
        """Into the queue; all of its tokens are to be computed."""
        request.computed = request.reread = request.mark = 0
        request.draft([])
        bisect.insort(self.waiting, request, key=lambda r: r.id)

    def preempt(self, request: Request) -> None:
        """Back to the queue, without pages; its tokens will be computed again."""
        self._leave(request)
        request.preempted += 1
        self.wait(request)

    def again(self, request: Request) -> None:
        """What it began with did not come: it waits, and begins with less."""
        self._close(request)
        self.wait(request)

    def drop(self, request: Request) -> None:
        """It has ended or is cancelled: its pages go back at once."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        assert request.row is not None
        if self.purse.reuse:
            self.purse.reuse.leave(request.row, *request.ending)
        self._close(request)

    def _close(self, request: Request) -> None:
        assert request.row is not None
        peaks = self.purse.close(request.row)
        request.peaks = [max(p) for p in zip(peaks, request.peaks or peaks, strict=True)]
        self.running.remove(request)
        request.row = None
