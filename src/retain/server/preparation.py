"""Preparation of requests off the event loop: in threads that keys share, a few at a time for each key."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from retain.threads import without_stop_iteration

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
            future = self._executor.submit(without_stop_iteration(function))
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


@dataclass(eq=False)
class Ticket:
    """A wait for a place, and then the place. `on_place` is called when it becomes one."""

    key_name: str
    on_place: Callable[[], object]
    has_place: bool = False


class FairQueue:
    """Gives `num_places` places to those who wait, at most `places_per_key` of them to one key.

    A key's own waits are served in their order. Of the keys that wait and hold less than their share, the one whose
    last turn is longest ago is next (round robin). Not thread-safe: an event loop owns a queue.
    """

    def __init__(self, num_places: int, places_per_key: int):
        self.num_places = num_places
        self.places_per_key = places_per_key
        self._num_held: Counter[str] = Counter()  # places, by key
        self._waiting: dict[str, dict[Ticket, None]] = {}  # by key, the next turn first; in order of arrival

    def enter(self, key_name: str, on_place: Callable[[], object]) -> Ticket:
        """Wait for a place. It may be given at once; whoever enters must leave once."""
        ticket = Ticket(key_name, on_place)
        self._waiting.setdefault(key_name, {})[ticket] = None
        self._give_places()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Give a place back, or wait no more. Leaving again changes nothing."""
        if ticket.has_place:
            ticket.has_place = False
            self._num_held[ticket.key_name] -= 1
            self._num_held += Counter()  # forget keys that hold none
            self._give_places()
        elif ticket in self._waiting.get(ticket.key_name, ()):
            del self._waiting[ticket.key_name][ticket]
            if not self._waiting[ticket.key_name]:
                del self._waiting[ticket.key_name]

    def _give_places(self) -> None:
        while (key_name := self._next_key()) is not None:
            tickets = self._waiting.pop(key_name)
            ticket = next(iter(tickets))
            del tickets[ticket]
            if tickets:
                self._waiting[key_name] = tickets  # behind all others
            self._num_held[key_name] += 1
            ticket.has_place = True
            ticket.on_place()

    def _next_key(self) -> str | None:
        """Return the key whose turn it is; None where no place is free, or nobody may have one."""
        if self._num_held.total() == self.num_places:
            return None
        return next((key for key in self._waiting if self._num_held[key] < self.places_per_key), None)
