"""Routing by a request's `affinity`: rendezvous hashing, and the least loaded replica where that one has too much.

Ray pickles this module by value into every process that routes, so it imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


def rank(key: str, replica_ids: Sequence[str]) -> list[str]:
    """Return the replicas by rendezvous hashing, best first. One that goes moves only the keys that it was first of."""
    return sorted(replica_ids, key=lambda replica_id: blake2b(f"{key}|{replica_id}".encode(), digest_size=8).digest())


def order(key: str, num_ongoing: Mapping[str, int], spread: int) -> list[str]:
    """Return the replicas in the order in which a key tries them.

    `num_ongoing`: requests in flight of each replica. Where the first one has more than `spread` requests more than the
    least loaded, the least loaded come first.
    """
    ranked = rank(key, list(num_ongoing))
    if num_ongoing[ranked[0]] - min(num_ongoing.values()) > spread:
        ranked.sort(key=lambda replica_id: num_ongoing[replica_id])
    return ranked


class AffinityRouter(RequestRouter):
    """Routes a call by the attribute `affinity` of its first argument; others go to the least loaded replica.

    Without Ray's FIFOMixin, which would give the chosen replica to the request that waits longest, whichever that is.
    """

    def initialize_state(self, *, spread: int = 0, **kwargs: Any) -> None:
        """Set the number of requests that a key's replica may have more than the least loaded one."""
        self._spread = spread

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return ranks of replicas, best first. Within a rank Ray takes the one with the shortest queue."""
        if pending_request:
            pending_request.routing_context.should_backoff = True  # else Ray retries without a pause
        key = pending_request and next((a.affinity for a in pending_request.args if hasattr(a, "affinity")), None)
        if not key or not candidate_replicas:
            return [candidate_replicas] if candidate_replicas else []
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        num_ongoing = {
            replica_id: self.replica_queue_len_cache.get(replica.replica_id) or 0
            for replica_id, replica in by_id.items()
        }
        return [[by_id[replica_id]] for replica_id in order(key, num_ongoing, self._spread)]
