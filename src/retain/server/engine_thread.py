"""The engine thread: runs engine steps while requests are unfinished. Everything that touches the engine runs in it.

The event loop submits request groups and calls functions here. After each step one callback tells the event loop which
groups have new output.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TypeVar

from retain.engine.hints import Hint, carry_out
from retain.engine.request import FinishReason, Request
from retain.kernels.ranks import RankError
from retain.kv.text import Text
from retain.llm import LLM
from retain.server.metric_families import render_page
from retain.server.observers import CreateObserver, Observer
from retain.server.request_group import EngineError, PooledCallStats, RequestGroup
from retain.threads import without_stop_iteration

T = TypeVar("T")
log = logging.getLogger(__name__)
LEAD_S = 1.0  # before an agent is back its text begins to be loaded
MAX_TIMERS = 32  # of an owner: each holds a text
SHUTTING_DOWN = "the server is shutting down"
ENGINE_FAILED = "the engine has failed and accepts no more requests"
STEP_FAILED = "the engine failed while running this request or another of its batch"


class EngineThread:
    """Owns the engine. Call `start` from the event loop that serves requests."""

    def __init__(self, load_llm: Callable[[], LLM]):
        self._load_llm = load_llm
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None ends the thread
        self._group_of_request: dict[Request, tuple[RequestGroup, int]] = {}  # with the index of its choice
        self._thread = threading.Thread(target=self._run, name="retain-engine", daemon=True)
        self._loaded: Future[LLM] = Future()
        self.observers: list[Observer] = []
        self.fatal_error: str | None = None  # set after a failure that the engine cannot recover from
        self.rank_error: RankError | None = None  # after which the server ends, too
        self.closed_error: EngineError | None = None  # raised for new requests once set
        self._stopped = False  # the thread runs no more commands
        self._has_read = False  # since the last step
        self._num_timers = Counter[str]()  # of texts that will be loaded, by owner

    # ---- called from the event loop ------------------------------------------------------------------------------

    async def start(self) -> LLM:
        """Start the thread and load the model in it. Raises what loading raises."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return await asyncio.wrap_future(self._loaded)

    async def submit(self, group: RequestGroup) -> None:
        """Queue the requests of a group. Raises ValueError if one could never fit the pool, EngineError if closed."""
        await self.call(lambda: self._add_group(group))

    def cancel(self, group: RequestGroup) -> None:
        """Cancel the unfinished requests of a group. Their pages are free after one more step at most."""
        self._commands.put(lambda: self._cancel_group(group))

    async def hint(self, hint: Hint, request: Request, text: Text, owner: str) -> int:
        """Carry out a hint about a text, computed as a request says. Returns the tokens; raises ValueError."""
        return await self.call(lambda: self._give_hint(hint, request, text, owner))

    def report(self, stats: PooledCallStats) -> None:
        """Tell observers that a call has ended whose texts were pooled."""
        self._commands.put(lambda: self._notify_observers(lambda observer: observer.on_pooled_call(stats)))

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function in the engine thread, between two steps, and return its result."""
        return await self._call(function, lambda command: command())

    async def read(self, function: Callable[[], T]) -> T:
        """Run a function that takes long and changes nothing, one between two steps. Returns its result."""
        return await self._call(function, self._run_read)

    async def _call(self, function: Callable[[], T], run: Callable[[Callable[[], None]], None]) -> T:
        done: Future[T] = Future()

        def command() -> None:
            if not done.set_running_or_notify_cancel():
                return  # the caller was cancelled
            try:
                if self._stopped:
                    raise self.closed_error or EngineError(SHUTTING_DOWN, 503)
                result = without_stop_iteration(function)()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(result)

        self._commands.put(lambda: run(command))
        if self._stopped:
            self._run_remaining_commands()
        return await asyncio.wrap_future(done)

    async def observe(self, create: Sequence[CreateObserver]) -> None:
        """Let observers watch the engine from now on. Raises what making them raises."""
        await self.call(lambda: self.observers.extend(make(self.llm) for make in create))

    async def render_metrics(self) -> bytes:
        """Return the metrics of all observers in Prometheus' text format."""
        return await self.call(lambda: render_page(self.observers))

    def close(self) -> None:
        """Accept no more requests, and fail all that are unfinished."""

        def command() -> None:
            self.closed_error = EngineError(SHUTTING_DOWN, 503)
            for group in self._groups():
                self._fail_group(group, self.closed_error)

        self._commands.put(command)

    async def stop(self) -> None:
        """End the thread. Unfinished requests are cancelled and tiers are flushed."""
        self._commands.put(None)
        while self._thread.is_alive():
            await asyncio.sleep(0.01)

    # ---- in the engine thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.llm = self._load_llm()
            try:
                self.llm.warm_up()
            except BaseException:
                self.llm.close()  # else its store stays in use
                raise
        except BaseException as error:
            self._loaded.set_exception(error)
            return
        self._engine = self.llm.engine
        if self.llm.ranks:
            self.llm.ranks.on_end.append(lambda: self._commands.put(self._fail_without_rank))
        self._loaded.set_result(self.llm)
        try:
            while self._run_commands():
                self._step()
        except RankError as error:
            log.critical("%s", error)
            self.rank_error = error
            self.fatal_error = ENGINE_FAILED
        except BaseException:
            log.critical("engine thread failed", exc_info=True)
            self.fatal_error = ENGINE_FAILED
        self.closed_error = self.closed_error or EngineError(self.fatal_error or SHUTTING_DOWN, 503)
        self._stopped = True
        for group in self._groups():
            self._loop.call_soon_threadsafe(group.fail, self.closed_error)
        self._run_remaining_commands()
        self.llm.close()

    def _fail_without_rank(self) -> None:
        assert self.llm.ranks
        if not self._stopped:
            raise RankError(self.llm.ranks.name_ended())

    def _groups(self) -> set[RequestGroup]:
        """Return the groups with unfinished requests."""
        return {group for group, _ in self._group_of_request.values()}

    def _run_commands(self) -> bool:
        """Run the commands that are queued now; block for one if the engine is idle. False ends the thread.

        Commands that are queued meanwhile wait for the next step, so that no number of them stops the engine.
        """
        self._has_read = False
        if not self._engine.has_unfinished_requests and not self._run_command():
            return False
        return all(self._run_command() for _ in range(self._commands.qsize()))

    def _run_command(self) -> bool:
        command = self._commands.get()
        if command:
            command()
        return command is not None

    def _run_read(self, command: Callable[[], None]) -> None:
        """Run a command that only reads, or queue it again if another ran since the last step."""
        if self._has_read and not self._stopped:
            self._commands.put(lambda: self._run_read(command))
            return
        self._has_read = True
        command()

    def _run_remaining_commands(self) -> None:
        """Run commands that came too late, which then raise `closed_error` to their callers."""
        with suppress(queue.Empty):
            while True:
                if command := self._commands.get_nowait():
                    command()

    def _step(self) -> None:
        if not self._engine.has_unfinished_requests:
            return
        started_at = perf_counter()
        try:
            sampled = list(self.llm.step().token_ids)
        except RankError:
            raise
        except Exception as error:
            self._recover(error)
            return
        self._publish(sampled)
        step_s = perf_counter() - started_at
        self._notify_observers(lambda observer: observer.on_step(step_s, sampled))

    def _publish(self, sampled_requests: Sequence[Request]) -> None:
        """Collect the new output and notify all groups in one callback: a callback costs more than its content."""
        groups = set()
        ended = []
        for request in sampled_requests:
            if request not in self._group_of_request:
                continue
            group, index = self._group_of_request[request]
            self._pin_prompt(group, request)
            if group.is_due(index):
                group.collect(index)
                groups.add(group)
            if request.finish_reason:
                ended.append((request, group))
                self._remove_request(request)
        if groups:
            self._loop.call_soon_threadsafe(_notify_groups, groups)
        for request, group in ended:
            for hint in group.hints if request.finish_reason is not FinishReason.CANCELLED else ():
                self._try_hint(hint, request, request.text, group.key_name)

    def _pin_prompt(self, group: RequestGroup, request: Request) -> None:
        """Pin what the client wants pinned of the prompt of a group's first sampled request."""
        cache = self.llm.cache
        pins = group.pins
        group.pins = ()
        for pin in pins:
            prefix = request.prompt[: pin.num_tokens]
            num_pinned = 0
            if cache.prefix_cache.enabled:
                text = request.text.head(len(prefix))
                num_pinned = cache.hints.retain(request.policy, text, pin.seconds, group.key_name)
            group.record_pin(len(prefix) // cache.planner.block_size * cache.planner.block_size, num_pinned)

    def _give_hint(self, hint: Hint, request: Request, text: Text, owner: str) -> int:
        """Carry out a hint. A text that is asked for again is loaded shortly before, where tiers have it."""
        num_tokens = carry_out(self.llm.cache, hint, request, text, owner)
        if hint.action == "signal" and hint.seconds is not None and self._num_timers[owner] < MAX_TIMERS:
            self._num_timers[owner] += 1
            prefetch = partial(self._end_timer, Hint("prefetch", LEAD_S), request, text, owner)
            delay = max(hint.seconds - LEAD_S, 0.0)
            self._loop.call_soon_threadsafe(lambda: self._loop.call_later(delay, self._commands.put, prefetch))
        return num_tokens

    def _end_timer(self, hint: Hint, request: Request, text: Text, owner: str) -> None:
        self._num_timers[owner] -= 1
        if not self._stopped:
            self._try_hint(hint, request, text, owner)

    def _try_hint(self, hint: Hint, request: Request, text: Text, owner: str) -> None:
        """Carry out a hint to whose sender nothing can be said any more."""
        try:
            self._give_hint(hint, request, text, owner)
        except RankError:
            raise
        except ValueError as error:
            log.info("a hint is left out: %s", error)
        except Exception as error:
            self._recover(error)

    def _notify_observers(self, notify: Callable[[Observer], None]) -> None:
        """Call each observer. A failing observer is logged and does not affect the requests."""
        for observer in self.observers:
            try:
                notify(observer)
            except Exception:
                log.exception("an observer failed")

    def _add_group(self, group: RequestGroup) -> None:
        if self.closed_error:
            raise self.closed_error
        requests = group.requests
        self.llm.output_processor.add(group.request_states)
        self._group_of_request |= {request: (group, index) for index, request in enumerate(requests)}
        for request in requests:
            self._notify_observers(partial(_notify_request, request=request, group=group))

    def _cancel_group(self, group: RequestGroup) -> None:
        for request in group.requests:
            if request in self._group_of_request:
                self.llm.output_processor.cancel(request)
                self._remove_request(request)

    def _remove_request(self, request: Request) -> None:
        group, _ = self._group_of_request.pop(request)
        group.num_unfinished -= 1
        self._notify_observers(lambda observer: observer.on_finish(request, group))

    def _fail_group(self, group: RequestGroup, error: EngineError) -> None:
        self._loop.call_soon_threadsafe(group.fail, error)
        self._cancel_group(group)

    def _recover(self, error: Exception) -> None:
        """Fail the groups that a failed step may have harmed; the others go on if the pages still add up.

        The culprit is unknown, so all running requests fail, and those that the scheduler lost. If none was running,
        the first waiting one fails, so that the engine makes progress.
        """
        scheduler = self._engine.scheduler
        suspects = set(scheduler.running) or set(scheduler.waiting[:1])
        followers = self._engine.sharing.followers
        known = {r for queued in (*suspects, *scheduler.waiting) for r in (queued, *followers(queued))}
        failed = {group for r, (group, _) in self._group_of_request.items() if r in suspects or r not in known}
        log.warning("engine step failed: %d requests fail", len(failed), exc_info=error)
        for group in failed:
            self._fail_group(group, EngineError(STEP_FAILED))
        try:
            self._engine.cache.check()
        except AssertionError as unbalanced:
            log.critical("page accounting check failed: %s", unbalanced)
            self.fatal_error = ENGINE_FAILED
            self.closed_error = EngineError(ENGINE_FAILED, 503)
            for group in self._groups():
                self._fail_group(group, self.closed_error)


def _notify_request(observer: Observer, request: Request, group: RequestGroup) -> None:
    observer.on_request(request, group)


def _notify_groups(groups: Collection[RequestGroup]) -> None:
    for group in groups:
        group.notify()
