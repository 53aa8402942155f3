"""Preparation of requests off the event loop: rendering, tokenizing and grammars, a few at a time for each key."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
NUM_THREADS = 8
THREADS_PER_KEY = 2


class PreparationPool:
    """Threads that prepare requests. One key occupies a few of them at most, so that others need not wait for it."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="retain-prepare")
        self._places: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(THREADS_PER_KEY))

    async def run(self, key_name: str, function: Callable[[], T]) -> T:
        """Run a function in a thread of the key and return its result.

        A caller that is cancelled does not wait, but the thread counts for its key until it ends.
        """
        place, loop = self._places[key_name], asyncio.get_running_loop()
        await place.acquire()
        future = self._executor.submit(function)
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(place.release))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Accept no more functions, and wait for none."""
        self._executor.shutdown(wait=False, cancel_futures=True)
