"""Routing by a session or a text: rendezvous hashing, and the least loaded replica where that one has too much.

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
    """Routes a request by its session (x-session-id), or by the attribute `affinity` of its first argument.

    A session stays on its replica as long as that takes requests, a text only while it is not much busier than others.
    Requests with neither go to the least loaded replica. Ray's FIFOMixin is left out: it would give the replica that
    one request chose to the request that waits longest.
    """

    def initialize_state(self, *, spread: int = 0, **kwargs: Any) -> None:
        """Set the number of requests that a text's replica may have more than the least loaded one."""
        self._spread = spread

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return ranks of replicas, best first. Within a rank Ray takes the one with the shortest queue."""
        if not candidate_replicas or not pending_request:
            return [candidate_replicas] if candidate_replicas else []
        pending_request.routing_context.should_backoff = True  # else Ray retries without a pause
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if session := pending_request.metadata.session_id:
            return [[by_id[replica_id]] for replica_id in rank(session, list(by_id))]
        text = next((a.affinity for a in pending_request.args if hasattr(a, "affinity")), None)
        if not text:
            return [candidate_replicas]
        num_ongoing = {
            replica_id: self.replica_queue_len_cache.get(replica.replica_id) or 0
            for replica_id, replica in by_id.items()
        }
        return [[by_id[replica_id]] for replica_id in order(text, num_ongoing, self._spread)]
