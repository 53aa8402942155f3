"""Which replica a request goes to: rendezvous hashing of its key, and the requests in flight of each replica."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import blake2b

REFRESH_S = 0.1  # for each replica: the time between two questions for their loads
WAIT_S = 0.25  # for answers where older ones are known
FIRST_WAIT_S = 20.0  # for the first answers


def rank(key: str, replica_ids: Sequence[str]) -> list[str]:
    """Return the replicas by rendezvous hashing, best first. One that goes moves only the keys that it was first of."""
    return sorted(replica_ids, key=lambda replica_id: blake2b(f"{key}|{replica_id}".encode(), digest_size=8).digest())


def choose(num_ongoing: Mapping[str, int], key: str | None, spread: float) -> str:
    """Return the replica of a key, or the least loaded one without a key.

    `num_ongoing`: requests in flight of each replica. A key leaves its replica where that has more than `spread`
    requests more than the least loaded one.
    """
    least = min(num_ongoing.values())
    if key:
        first = rank(key, list(num_ongoing))[0]
        if num_ongoing[first] - least <= spread:
            return first
    return random.choice([replica_id for replica_id, count in num_ongoing.items() if count == least])


class ReplicaLoads:
    """Requests in flight of each running replica, as it said last.

    Requests sent since then are not counted: most of them may have ended, and texts would leave their replica.
    """

    def __init__(self, ask: Callable[[], Awaitable[Sequence[tuple[str, int]]]]):
        """`ask` returns the name and the number of requests of each replica, or raises TimeoutError if one is busy."""
        self._ask = ask
        self._counts: dict[str, int] = {}
        self._next = 0.0  # when to ask again
        self._question: asyncio.Task[None] | None = None

    async def get(self) -> dict[str, int]:
        """Return the requests in flight of each replica. Asks the replicas unless they were asked just now."""
        if time.monotonic() >= self._next and not self._question:
            self._question = asyncio.create_task(self._refresh())
        if self._question:
            await asyncio.wait([self._question], timeout=WAIT_S if self._counts else FIRST_WAIT_S)
        return dict(self._counts)

    async def _refresh(self) -> None:
        try:
            self._counts = dict(await self._ask())
        except TimeoutError:
            pass  # what is known stays: a replica that is busy still runs
        finally:
            self._next = time.monotonic() + REFRESH_S * len(self._counts)
            self._question = None
