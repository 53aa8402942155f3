"""The simulation of a cluster: arrivals and ends of steps, in the order of their times."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from retain.engine.request import Request, RequestInput
from retain.kv.eviction import policies
from retain.sampling_params import SamplingParams
from tools.simulation.cache import SimulatedCache
from tools.simulation.calibration import Calibration
from tools.simulation.replica import SimulatedReplica
from tools.simulation.routing import Router
from tools.simulation.tiers import SimulatedTier, TierConfig
from tools.simulation.trace import TracedRequest

PARAMS = SamplingParams(temperature=0, ignore_eos=True, seed=0)


@dataclass(frozen=True)
class RouterEvents:
    """Tells a router what a replica's pool and local tier have. See KeyListener."""

    router: Router
    replica: int

    def on_stored(self, keys: Sequence[bytes]) -> None:
        """Tell the router which pages the replica has stored."""
        self.router.on_stored(self.replica, keys)

    def on_evicted(self, keys: Sequence[bytes]) -> None:
        """Tell the router which pages the replica has evicted."""
        self.router.on_evicted(self.replica, keys)


class Cluster:
    """Replicas behind a router. `tiers` are the configurations of a local and of a shared tier, by kind."""

    def __init__(self, calibration: Calibration, router: Router, tiers: dict[str, TierConfig]):
        self.calibration, self.router = calibration, router
        size = calibration.page_bytes
        shared = [SimulatedTier(kind, config, size) for kind, config in tiers.items() if kind == "shared"]
        self.tiers = list(shared)
        self.replicas: list[SimulatedReplica] = []
        for i in range(router.num_replicas):
            events = RouterEvents(router, i)
            local = [SimulatedTier(kind, config, size, events) for kind, config in tiers.items() if kind == "local"]
            self.tiers += local
            cache = SimulatedCache(calibration, [*local, *shared], events)
            self.replicas.append(SimulatedReplica(calibration, cache))
        self.loads = [0] * router.num_replicas  # requests in flight
        self.assigned: list[int] = []  # the replica of each request
        self._step_ends: list[tuple[float, int]] = []  # (time, replica)

    def run(self, traced: Sequence[TracedRequest]) -> list[Request]:
        """Run requests, in the order of their arrival, to their end; their times are in `stats`, from 0 on.

        Raises ValueError for a request that does not fit into a replica.
        """
        policy = policies.parse("full")
        requests = []
        for t in traced:
            request = Request(RequestInput(t.prompt.tolist(), PARAMS, policy, t.output_len))
            request.stats.arrival_time = t.arrival_time
            requests.append(request)
            self._advance(t.arrival_time)
            self._route(t, request)
        self._advance(float("inf"))
        return requests

    def _route(self, traced: TracedRequest, request: Request) -> None:
        """Give a request that arrives to a replica, which computes it at once if it is idle."""
        chosen = self.router.choose(traced, self.loads)
        self.loads[chosen] += 1
        self.assigned.append(chosen)
        self.replicas[chosen].add(request)
        if self.replicas[chosen].is_idle:
            self._start_step(chosen, traced.arrival_time)

    def _advance(self, until: float) -> None:
        """Finish the steps that end by a time, and those that they start."""
        while self._step_ends and self._step_ends[0][0] <= until:
            now, i = heapq.heappop(self._step_ends)
            self.loads[i] -= len(self.replicas[i].finish_step(now))
            self._start_step(i, now)

    def _start_step(self, replica: int, now: float) -> None:
        seconds = self.replicas[replica].start_step()
        if seconds is not None:
            heapq.heappush(self._step_ends, (now + seconds, replica))
