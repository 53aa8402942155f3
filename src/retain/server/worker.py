"""The engine's own thread: it steps while anybody waits, and everything that touches the engine happens in it.

An `Order` is one call over HTTP: some replies that are made together. After every step the event loop is told once
which orders have something new. What is not known here: HTTP, JSON.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from time import perf_counter
from typing import Protocol, TypeVar

from retain.desk import RequestOutputState
from retain.engine.request import Logprob, Request, FinishReason
from retain.llm import LLM

T = TypeVar("T")
log = logging.getLogger("retain")


class Observer(Protocol):
    """Who counts or looks at what happens. Called in the engine's thread."""

    def began(self, request: Request, owner: str) -> None:
        """Somebody asks; it is not in the queue yet."""
        ...

    def stepped(self, took: float, ready: Sequence[Request]) -> None:
        """A step took so many seconds, and these requests got tokens."""
        ...

    def ended(self, request: Request) -> None:
        """It has ended, in whatever way."""
        ...


GOING = "the server is going away"
BROKEN = "the engine has failed and takes no more requests"


class Failed(Exception):
    """An order that the engine could not finish, through no fault of whoever gave it. `status`: as HTTP says it."""

    def __init__(self, why: str, status: int = 500):
        super().__init__(why)
        self.status = status


class News:
    """What came of one reply: some text, tokens, and why it ended."""

    __slots__ = ("index", "logprobs", "text", "tokens", "why")

    def __init__(self, index: int, text: str, tokens: list[int], logprobs: list[Logprob], why: FinishReason | None):
        self.index, self.text, self.tokens, self.logprobs, self.why = index, text, tokens, logprobs, why


class Order:
    """Replies that are made together. `news` is theirs, in order; the engine adds, whoever waits takes."""

    def __init__(self, replies: Sequence[RequestOutputState], owner: str, pin: float = 0.0):
        """`owner` is for people who look; the first prompt stays for `pin` seconds once it is computed."""
        self.replies, self.owner, self.pin = list(replies), owner, pin
        self.pinned = 0  # tokens
        self.error: Exception | None = None
        self._told = [(0, 0)] * len(self.replies)  # tokens and logprobs of each that were told of
        self._news: deque[News] = deque()  # one thread appends, the other takes
        self._wake = asyncio.Event()

    def gather(self, i: int) -> None:
        """What is new of reply i. In the engine's thread."""
        reply = self.replies[i]
        r, (tokens, logprobs) = reply.request, self._told[i]
        begin = len(r.prompt) + tokens
        news = News(i, reply.take_text(), r.tokens[begin:], r.logprobs[logprobs:], r.finish_reason)
        self._told[i] = tokens + len(news.tokens), len(r.logprobs)
        self._news.append(news)

    def wake(self) -> None:
        """In the event loop: there is news."""
        self._wake.set()

    def fail(self, error: Exception) -> None:
        """In the event loop: who waits gets this instead of news."""
        self.error = error
        self._wake.set()

    async def wait(self) -> list[News]:
        """News. Raises what it failed with."""
        await self._wake.wait()
        self._wake.clear()
        if self.error:
            raise self.error
        return [self._news.popleft() for _ in range(len(self._news))]


class Worker:
    """Owns an engine. `start` it from the event loop that shall be told of news."""

    def __init__(self, make: Callable[[], LLM]):
        self._make = make
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._orders: dict[Request, tuple[Order, int]] = {}
        self._thread = threading.Thread(target=self._run, name="retain-engine", daemon=True)
        self._ready: Future[LLM] = Future()
        self.observers: list[Observer] = []
        self.broken: str | None = None  # why the engine is not to be trusted any more
        self.closed: Failed | None = None  # why nobody is let in any more
        self._over = False  # the thread obeys nobody any more

    # ---- from the event loop -----------------------------------------------------------------------------------

    async def start(self) -> LLM:
        """Load the model, in the engine's thread. Raises what that raises."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return await asyncio.wrap_future(self._ready)

    async def give(self, order: Order) -> None:
        """Begin an order. Raises ValueError where the pool could never hold it."""
        await self.call(lambda: self._add(order))

    def cancel(self, order: Order) -> None:
        """Nobody waits for it any more: its pages are free before the next step."""
        self._inbox.put(lambda: self._drop(order))

    async def call(self, f: Callable[[], T]) -> T:
        """Do something in the engine's thread, between two steps."""
        done: Future[T] = Future()

        def act() -> None:
            if not done.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            try:
                if self._over:
                    raise self.closed or Failed(GOING, 503)
                result = f()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(result)

        self._inbox.put(act)
        if self._over:
            self._answer()
        return await asyncio.wrap_future(done)

    def refuse(self) -> None:
        """Who has not begun is refused: the server is to end."""

        def act() -> None:
            self.closed = Failed(GOING, 503)
            begun = {r for r in self._orders if r.row is not None or r.first_token_time}
            waiting = {order for order, _ in self._orders.values()} - {self._orders[r][0] for r in begun}
            for order in waiting:
                self._fail(order, self.closed)

        self._inbox.put(act)

    async def stop(self) -> None:
        """End the thread; what still runs is cancelled, and tiers are written to their ends."""
        self._inbox.put(None)
        while self._thread.is_alive():
            await asyncio.sleep(0.01)

    # ---- in the engine's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.llm = self._make()
        except BaseException as error:
            self._ready.set_exception(error)
            return
        self._engine = self.llm.engine
        self._ready.set_result(self.llm)
        try:
            while self._obey():
                self._step()
        except BaseException:
            log.critical("the engine's thread failed", exc_info=True)
            self.broken = BROKEN
        self.closed, self._over = self.closed or Failed(self.broken or GOING, 503), True
        for order in {order for order, _ in self._orders.values()}:
            self._loop.call_soon_threadsafe(order.fail, self.closed)
        self._answer()
        self.llm.close()

    def _obey(self) -> bool:
        """Whatever was asked for; where there is nothing to step for, wait for it. False: to end."""
        idle = not self._engine.has_unfinished_requests
        while True:
            try:
                act = self._inbox.get() if idle else self._inbox.get_nowait()
            except queue.Empty:
                return True
            if act is None:
                return False
            act()
            idle = False

    def _answer(self) -> None:
        """Who asked when it was too late is told so."""
        with suppress(queue.Empty):
            while True:
                if act := self._inbox.get_nowait():
                    act()

    def _step(self) -> None:
        if not self._engine.has_unfinished_requests:
            return
        began = perf_counter()
        try:
            ready = self._engine.step()
        except Exception as error:
            self._recover(error)
            return
        self._tell(ready)
        self._observe(lambda observer: observer.stepped(perf_counter() - began, ready))

    def _tell(self, ready: Sequence[Request]) -> None:
        """Who waits for these, all at once: waking the event loop costs more than what it is told."""
        orders = set()
        for request in ready:
            if request not in self._orders:
                continue
            order, i = self._orders[request]
            order.gather(i)
            if order.pin and self.llm.cache.prefix_cache:
                order.pinned = self.llm.cache.prefix_cache.pin(request.policy, request.prompt, request.salt, order.pin)
                order.pin = 0
            orders.add(order)
            if request.finish_reason:
                self._forget(request)
        if orders:
            self._loop.call_soon_threadsafe(_wake, orders)

    def _observe(self, told: Callable[[Observer], None]) -> None:
        """Whoever counts or looks must not harm who is counted."""
        for observer in self.observers:
            try:
                told(observer)
            except Exception:
                log.exception("an observer failed")

    def _add(self, order: Order) -> None:
        if self.closed:
            raise self.closed
        self._engine.add(*(reply.request for reply in order.replies))
        self._orders |= {reply.request: (order, i) for i, reply in enumerate(order.replies)}
        for reply in order.replies:
            self._observe(lambda observer, request=reply.request: observer.began(request, order.owner))  # type: ignore[misc]

    def _drop(self, order: Order) -> None:
        for reply in order.replies:
            if reply.request in self._orders:
                self._engine.cancel(reply.request)
                self._forget(reply.request)

    def _forget(self, request: Request) -> None:
        del self._orders[request]
        self._observe(lambda observer: observer.ended(request))

    def _fail(self, order: Order, why: Failed) -> None:
        self._loop.call_soon_threadsafe(order.fail, why)
        self._drop(order)

    def _recover(self, error: Exception) -> None:
        """A step failed: nobody knows for whom. Those that ran end, and those that it lost; where nobody ran, the next
        one, so that it goes on. Those that wait go on, if the accounts balance.
        """
        log.exception("a step failed", exc_info=error)
        scheduler = self._engine.scheduler
        ran = set(scheduler.running) or set(scheduler.waiting[:1])
        there = {r for held in (*ran, *scheduler.waiting) for r in (held, *held.prompt_sharers)}
        gone = {order for r, (order, _) in self._orders.items() if r in ran or r not in there}
        for order in gone:
            self._fail(order, Failed("the engine failed at this answer, or at one beside it"))
        try:
            self._engine.cache.check()
        except AssertionError as unbalanced:
            log.critical("the pool's accounts do not balance: %s", unbalanced)
            self.broken = BROKEN
            self.closed = Failed(BROKEN, 503)
            for order in {order for order, _ in self._orders.values()}:
                self._fail(order, self.closed)


def _wake(orders: set[Order]) -> None:
    for order in orders:
        order.wake()
