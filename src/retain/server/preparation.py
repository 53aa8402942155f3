"""Preparation of requests off the event loop: in threads that keys share, a few at a time for each key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from retain.server.fair_queue import FairQueue

T = TypeVar("T")
NUM_THREADS = 8
THREADS_PER_KEY = 2  # also of a lone key: what the threads run holds the interpreter, so more would gain it nothing


class PreparationPool:
    """Threads that run functions of requests. A key occupies few of them, and waiting keys take turns (FairQueue)."""

    def __init__(self, name: str, num_threads: int = NUM_THREADS, threads_per_key: int = THREADS_PER_KEY):
        """`name`: what the threads do, in one word."""
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=f"retain-{name}")
        self._queue = FairQueue(num_threads, threads_per_key)

    async def run(self, key_name: str, function: Callable[[], T]) -> T:
        """Run a function in a thread of the key and return its result.

        A caller that is cancelled does not wait: it leaves the queue. A function that has begun goes on, and counts for
        its key until it ends.
        """
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()

        def begin_turn() -> None:
            if not turn.done():  # the caller may just have been cancelled
                turn.set_result(None)

        ticket = self._queue.enter(key_name, begin_turn)
        try:
            await turn
            future = self._executor.submit(function)
        except BaseException:
            self._queue.leave(ticket)  # also a place that came after the cancellation
            raise

        def give_back(_: object) -> None:
            with suppress(RuntimeError):  # the event loop is closed, and nobody waits any more
                loop.call_soon_threadsafe(self._queue.leave, ticket)

        future.add_done_callback(give_back)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Accept no more functions, and wait for none."""
        self._executor.shutdown(wait=False, cancel_futures=True)
