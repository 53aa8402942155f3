"""Routing policies: which replica gets a request. One policy is one class, found by its name in `ROUTERS`.

A policy sees the requests in flight of every replica. `kv-aware` sees events of the replicas' pools and local tiers,
too. Ties go to a replica at random, by a seed.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from hashlib import blake2b

from tools.simulation.trace import TracedRequest

PREFIX_PAGES = 4  # pages of a prompt that name its replica under `prefix`
MAX_LOAD_DIFFERENCE = 4  # requests in flight more than the least loaded replica, before `prefix` goes elsewhere


class Router:
    """Chooses a replica for each request."""

    def __init__(self, num_replicas: int, seed: int):
        self.num_replicas, self.rng = num_replicas, random.Random(seed)

    def choose(self, request: TracedRequest, loads: Sequence[int]) -> int:
        """Return the number of a replica; `loads` are requests in flight, by replica."""
        raise NotImplementedError

    def on_stored(self, replica: int, keys: Sequence[bytes]) -> None:
        """Note that a replica's pool, or its local tier, has these pages now."""

    def on_evicted(self, replica: int, keys: Sequence[bytes]) -> None:
        """Note that a replica's pool, or its local tier, has these pages no more."""

    def least_loaded(self, loads: Sequence[int]) -> int:
        """Return one of the replicas with the fewest requests in flight."""
        fewest = min(loads)
        return self.rng.choice([i for i, load in enumerate(loads) if load == fewest])

    def rank(self, key: bytes) -> list[int]:
        """Return all replicas, those of a key first: rendezvous hashing, so that one that goes moves only its keys."""
        hashes = (blake2b(i.to_bytes(4, "big") + key, digest_size=8).digest() for i in range(self.num_replicas))
        return [i for _, i in sorted(zip(hashes, range(self.num_replicas), strict=True))]


class RandomRouter(Router):
    """Any replica."""

    def choose(self, request: TracedRequest, loads: Sequence[int]) -> int:
        """Choose any replica, each with the same probability."""
        return self.rng.randrange(self.num_replicas)


class LeastLoadedRouter(Router):
    """The replica with the fewest requests in flight."""

    def choose(self, request: TracedRequest, loads: Sequence[int]) -> int:
        """Choose the replica with the fewest requests in flight."""
        return self.least_loaded(loads)


class SessionRouter(Router):
    """The replica of the conversation, whatever its load."""

    def choose(self, request: TracedRequest, loads: Sequence[int]) -> int:
        """Choose the replica to which the hash of the conversation leads."""
        return self.rank(request.session.to_bytes(8, "big"))[0]


class PrefixRouter(Router):
    """The replica of the prompt's first pages; the least loaded one where that has much more to do."""

    def choose(self, request: TracedRequest, loads: Sequence[int]) -> int:
        """Choose the replica to which the first pages' hash leads, or the least loaded one if that is too busy."""
        if not request.keys:
            return self.least_loaded(loads)
        preferred = self.rank(request.keys[:PREFIX_PAGES][-1])[0]
        overloaded = loads[preferred] - min(loads) > MAX_LOAD_DIFFERENCE
        return self.least_loaded(loads) if overloaded else preferred


class KvAwareRouter(Router):
    """The replica with the longest cached prefix, less its load.

    A request in flight counts as many pages as requests lacked on average.
    """

    def __init__(self, num_replicas: int, seed: int):
        super().__init__(num_replicas, seed)
        self.holders = defaultdict[bytes, Counter[int]](Counter)  # by page: replicas, and how often each has it
        self.num_requests = self.num_missing_pages = 0

    def choose(self, request: TracedRequest, loads: Sequence[int]) -> int:
        """Choose the replica with the most cached pages of the prompt, less its load."""
        found = self.matched_pages(request.keys)
        missing_pages = self.num_missing_pages / max(self.num_requests, 1)
        scores = [found.get(i, 0) - missing_pages * load for i, load in enumerate(loads)]
        best = max(scores)
        chosen = self.rng.choice([i for i, score in enumerate(scores) if score == best])
        self.num_requests += 1
        self.num_missing_pages += len(request.keys) - found.get(chosen, 0)
        return chosen

    def matched_pages(self, keys: Sequence[bytes]) -> dict[int, int]:
        """Return the length of the longest cached prefix, in pages, of each replica that has any of it."""
        found: dict[int, int] = {}
        holders = set(range(self.num_replicas))
        for num_pages, key in enumerate(keys, 1):
            holders = holders & self.holders.get(key, Counter()).keys()
            if not holders:
                break
            found |= dict.fromkeys(holders, num_pages)
        return found

    def on_stored(self, replica: int, keys: Sequence[bytes]) -> None:
        """Count a replica as a holder of the pages that it has stored."""
        for key in keys:
            self.holders[key][replica] += 1

    def on_evicted(self, replica: int, keys: Sequence[bytes]) -> None:
        """Drop a replica from the holders of the pages that it has evicted."""
        for key in keys:
            holders = self.holders[key]
            holders[replica] -= 1
            if not holders[replica]:
                del holders[replica]


ROUTERS: dict[str, type[Router]] = {
    "random": RandomRouter,
    "least-loaded": LeastLoadedRouter,
    "session": SessionRouter,
    "prefix": PrefixRouter,
    "kv-aware": KvAwareRouter,
}


def router_class(name: str) -> type[Router]:
    """Return the routing policy of that name. Raises ValueError."""
    if name not in ROUTERS:
        raise ValueError(f"unknown routing policy {name!r}: choose from {', '.join(ROUTERS)}")
    return ROUTERS[name]
