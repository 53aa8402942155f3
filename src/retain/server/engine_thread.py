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
from retain.engine.request import FinishReason, Logprob, Request
from retain.llm import LLM

T = TypeVar("T")
log = logging.getLogger("retain")


class Observer(Protocol):
    """Who counts or looks at what happens. Called in the engine's thread."""

    def on_request(self, request: Request, key_name: str) -> None:
        """Somebody asks; it is not in the queue yet."""
        ...

    def on_step(self, step_s: float, sampled_requests: Sequence[Request]) -> None:
        """A step took so many seconds, and these requests got tokens."""
        ...

    def on_finish(self, request: Request) -> None:
        """It has ended, in whatever way."""
        ...


SHUTTING_DOWN = "the server is going away"
ENGINE_FAILED = "the engine has failed and takes no more requests"


class EngineError(Exception):
    """An order that the engine could not finish, through no fault of whoever gave it. `status`: as HTTP says it."""

    def __init__(self, message: str, status: int = 500):
        super().__init__(message)
        self.status = status


class OutputDelta:
    """What came of one reply: some text, tokens, and why it ended."""

    __slots__ = ("finish_reason", "index", "logprobs", "text", "token_ids")

    def __init__(
        self, index: int, text: str, token_ids: list[int], logprobs: list[Logprob], finish_reason: FinishReason | None
    ):
        self.index, self.text, self.token_ids, self.logprobs, self.finish_reason = (
            index,
            text,
            token_ids,
            logprobs,
            finish_reason,
        )


class RequestGroup:
    """Replies that are made together. `news` is theirs, in order; the engine adds, whoever waits takes."""

    def __init__(self, request_states: Sequence[RequestOutputState], key_name: str, pin_s: float = 0.0):
        """`owner` is for people who look; the first prompt stays for `pin` seconds once it is computed."""
        self.request_states, self.key_name, self.pin_s = list(request_states), key_name, pin_s
        self.num_pinned_tokens = 0  # tokens
        self.error: Exception | None = None
        self._num_collected = [(0, 0)] * len(self.request_states)  # tokens and logprobs of each that were told of
        self._deltas: deque[OutputDelta] = deque()  # one thread appends, the other takes
        self._has_news = asyncio.Event()

    def collect(self, index: int) -> None:
        """What is new of reply i. In the engine's thread."""
        reply = self.request_states[index]
        r, (tokens, logprobs) = reply.request, self._num_collected[index]
        begin = len(r.prompt) + tokens
        news = OutputDelta(index, reply.take_text(), r.tokens[begin:], r.logprobs[logprobs:], r.finish_reason)
        self._num_collected[index] = tokens + len(news.token_ids), len(r.logprobs)
        self._deltas.append(news)

    def notify(self) -> None:
        """In the event loop: there is news."""
        self._has_news.set()

    def fail(self, error: Exception) -> None:
        """In the event loop: who waits gets this instead of news."""
        self.error = error
        self._has_news.set()

    async def get_deltas(self) -> list[OutputDelta]:
        """News. Raises what it failed with."""
        await self._has_news.wait()
        self._has_news.clear()
        if self.error:
            raise self.error
        return [self._deltas.popleft() for _ in range(len(self._deltas))]


class EngineThread:
    """Owns an engine. `start` it from the event loop that shall be told of news."""

    def __init__(self, load_llm: Callable[[], LLM]):
        self._load_llm = load_llm
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._group_of_request: dict[Request, tuple[RequestGroup, int]] = {}
        self._thread = threading.Thread(target=self._run, name="retain-engine", daemon=True)
        self._loaded: Future[LLM] = Future()
        self.observers: list[Observer] = []
        self.fatal_error: str | None = None  # why the engine is not to be trusted any more
        self.closed_error: EngineError | None = None  # why nobody is let in any more
        self._stopped = False  # the thread obeys nobody any more

    # ---- from the event loop -----------------------------------------------------------------------------------

    async def start(self) -> LLM:
        """Load the model, in the engine's thread. Raises what that raises."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return await asyncio.wrap_future(self._loaded)

    async def submit(self, group: RequestGroup) -> None:
        """Begin an order. Raises ValueError where the pool could never hold it."""
        await self.call(lambda: self._add_group(group))

    def cancel(self, group: RequestGroup) -> None:
        """Nobody waits for it any more: its pages are free before the next step."""
        self._commands.put(lambda: self._cancel_group(group))

    async def call(self, function: Callable[[], T]) -> T:
        """Do something in the engine's thread, between two steps."""
        done: Future[T] = Future()

        def command() -> None:
            if not done.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            try:
                if self._stopped:
                    raise self.closed_error or EngineError(SHUTTING_DOWN, 503)
                result = function()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(result)

        self._commands.put(command)
        if self._stopped:
            self._drain_commands()
        return await asyncio.wrap_future(done)

    def reject_waiting(self) -> None:
        """Who has not begun is refused: the server is to end."""

        def command() -> None:
            self.closed_error = EngineError(SHUTTING_DOWN, 503)
            begun = {r for r in self._group_of_request if r.row is not None or r.first_token_time}
            waiting = {order for order, _ in self._group_of_request.values()} - {
                self._group_of_request[r][0] for r in begun
            }
            for order in waiting:
                self._fail_group(order, self.closed_error)

        self._commands.put(command)

    async def stop(self) -> None:
        """End the thread; what still runs is cancelled, and tiers are written to their ends."""
        self._commands.put(None)
        while self._thread.is_alive():
            await asyncio.sleep(0.01)

    # ---- in the engine's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.llm = self._load_llm()
        except BaseException as error:
            self._loaded.set_exception(error)
            return
        self._engine = self.llm.engine
        self._loaded.set_result(self.llm)
        try:
            while self._run_commands():
                self._step()
        except BaseException:
            log.critical("the engine's thread failed", exc_info=True)
            self.fatal_error = ENGINE_FAILED
        self.closed_error, self._stopped = (
            self.closed_error or EngineError(self.fatal_error or SHUTTING_DOWN, 503),
            True,
        )
        for order in {order for order, _ in self._group_of_request.values()}:
            self._loop.call_soon_threadsafe(order.fail, self.closed_error)
        self._drain_commands()
        self.llm.close()

    def _run_commands(self) -> bool:
        """Whatever was asked for; where there is nothing to step for, wait for it. False: to end."""
        idle = not self._engine.has_unfinished_requests
        while True:
            try:
                act = self._commands.get() if idle else self._commands.get_nowait()
            except queue.Empty:
                return True
            if act is None:
                return False
            act()
            idle = False

    def _drain_commands(self) -> None:
        """Who asked when it was too late is told so."""
        with suppress(queue.Empty):
            while True:
                if act := self._commands.get_nowait():
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
        self._publish(ready)
        self._notify_observers(lambda observer: observer.on_step(perf_counter() - began, ready))

    def _publish(self, sampled_requests: Sequence[Request]) -> None:
        """Who waits for these, all at once: waking the event loop costs more than what it is told."""
        orders = set()
        for request in sampled_requests:
            if request not in self._group_of_request:
                continue
            order, i = self._group_of_request[request]
            order.collect(i)
            if order.pin_s and self.llm.cache.prefix_cache:
                order.num_pinned_tokens = self.llm.cache.prefix_cache.pin(
                    request.policy, request.prompt, request.salt, order.pin_s
                )
                order.pin_s = 0
            orders.add(order)
            if request.finish_reason:
                self._remove_request(request)
        if orders:
            self._loop.call_soon_threadsafe(_notify_groups, orders)

    def _notify_observers(self, notify: Callable[[Observer], None]) -> None:
        """Whoever counts or looks must not harm who is counted."""
        for observer in self.observers:
            try:
                notify(observer)
            except Exception:
                log.exception("an observer failed")

    def _add_group(self, group: RequestGroup) -> None:
        if self.closed_error:
            raise self.closed_error
        self._engine.add(*(reply.request for reply in group.request_states))
        self._group_of_request |= {reply.request: (group, i) for i, reply in enumerate(group.request_states)}
        for reply in group.request_states:
            self._notify_observers(lambda observer, request=reply.request: observer.on_request(request, group.key_name))  # type: ignore[misc]

    def _cancel_group(self, group: RequestGroup) -> None:
        for reply in group.request_states:
            if reply.request in self._group_of_request:
                self._engine.cancel(reply.request)
                self._remove_request(reply.request)

    def _remove_request(self, request: Request) -> None:
        del self._group_of_request[request]
        self._notify_observers(lambda observer: observer.on_finish(request))

    def _fail_group(self, group: RequestGroup, error: EngineError) -> None:
        self._loop.call_soon_threadsafe(group.fail, error)
        self._cancel_group(group)

    def _recover(self, error: Exception) -> None:
        """A step failed: nobody knows for whom. Those that ran end, and those that it lost; where nobody ran, the next
        one, so that it goes on. Those that wait go on, if the accounts balance.
        """
        log.exception("a step failed", exc_info=error)
        scheduler = self._engine.scheduler
        ran = set(scheduler.running) or set(scheduler.waiting[:1])
        there = {r for held in (*ran, *scheduler.waiting) for r in (held, *held.prompt_sharers)}
        gone = {order for r, (order, _) in self._group_of_request.items() if r in ran or r not in there}
        for order in gone:
            self._fail_group(order, EngineError("the engine failed at this answer, or at one beside it"))
        try:
            self._engine.cache.check()
        except AssertionError as unbalanced:
            log.critical("the pool's accounts do not balance: %s", unbalanced)
            self.fatal_error = ENGINE_FAILED
            self.closed_error = EngineError(ENGINE_FAILED, 503)
            for order in {order for order, _ in self._group_of_request.values()}:
                self._fail_group(order, self.closed_error)


def _notify_groups(groups: set[RequestGroup]) -> None:
    for order in groups:
        order.notify()
