"""Configuration of replicas, and of everything that a replica is built from.

Imports neither Ray nor the engine, so that the command line can generate its arguments from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from retain.config import Config
from retain.options import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, check_bounds
from retain.plugins import check_choice, parse_spec
from retain.server.config import ServerConfig

REPLICA_FIELD = "{replica}"  # in the path of a disk tier: the number of the replica on its machine
EXIT_GRACE_S = 30.0  # from the end of the drain to the end of a replica: its tiers write what they hold
PROXY_LIMITS = ("max_header_size", "header_timeout", "max_connections")  # Ray's proxy reads the headers, unbounded
SPARE_REQUESTS = 128  # of a replica: requests that it refuses, and those that need no engine


@dataclass(frozen=True)
class ClusterConfig:
    """Number, place and routing of replicas. Raises ValueError for numbers that contradict each other."""

    replicas: PositiveInt = field(default=1, metadata={"help": "replicas of the engine, each with its own cache"})
    min_replicas: PositiveInt | None = field(
        default=None, metadata={"help": "autoscaling: replicas at least (default: 1)"}
    )
    max_replicas: PositiveInt | None = field(
        default=None, metadata={"help": "autoscaling: replicas at most (default: no autoscaling)"}
    )
    target_ongoing_requests: PositiveFloat | None = field(
        default=None,
        metadata={"help": "autoscaling: requests in flight on a replica (default: half of --max-running-requests)"},
    )
    replicas_per_machine: PositiveInt | None = field(
        default=None,
        metadata={"help": "replicas on one machine at most; they divide its cores (default: all replicas)"},
    )
    cpus: NonNegativeFloat = field(
        default=0.0, metadata={"help": "cores that Ray reserves for a replica, to place it; 0: it may run anywhere"}
    )
    gpus: NonNegativeFloat = field(default=0.0, metadata={"help": "GPUs of a replica"})
    affinity: str = field(
        default="session",
        metadata={
            "help": "what stays on one replica: session (requests with equal x-session-id) or prefix (texts with an "
            "equal beginning)"
        },
    )
    affinity_chars: PositiveInt = field(
        default=2048, metadata={"help": "characters of a text's beginning that choose its replica, with prefix"}
    )
    affinity_spread: NonNegativeInt = field(
        default=8,
        metadata={"help": "requests that a text's replica may have more than the least loaded one, with prefix"},
    )
    address: str | None = field(
        default=None, metadata={"help": "address of a running Ray cluster, or auto (default: start Ray here)"}
    )

    def __post_init__(self) -> None:
        check_choice("affinity", self.affinity, "session", "prefix")
        check_bounds(self)
        if self.max_replicas is None and (self.min_replicas or self.target_ongoing_requests):
            raise ValueError("min_replicas and target_ongoing_requests need max_replicas: it switches autoscaling on")
        if self.max_replicas is not None and not self.num_replicas_at_least <= self.replicas <= self.max_replicas:
            raise ValueError(
                f"replicas ({self.replicas}) must be from min_replicas ({self.num_replicas_at_least}) to max_replicas "
                f"({self.max_replicas})"
            )

    @property
    def num_replicas_at_least(self) -> int:
        """Replicas that run without any load."""
        return self.replicas if self.max_replicas is None else self.min_replicas or 1

    @property
    def num_replicas_at_most(self) -> int:
        """Replicas that run under any load."""
        return self.max_replicas or self.replicas

    @property
    def num_replicas_per_machine(self) -> int:
        """Replicas that share the cores of one machine."""
        return min(self.replicas_per_machine or self.num_replicas_at_most, self.num_replicas_at_most)


@dataclass(frozen=True)
class ClusterSettings:
    """What every replica is built from. Raises ValueError for options that several replicas cannot have."""

    engine: Config
    server: ServerConfig
    cluster: ClusterConfig

    def __post_init__(self) -> None:
        if self.cluster.num_replicas_at_most == 1:
            return
        if self.server.enable_inspector:
            raise ValueError("the inspector shows one engine: leave --inspect out, or have one replica")
        if self.server.kv_events:
            raise ValueError("replicas cannot share an address: leave --kv-events out, or have one replica")
        for spec in self.engine.tier:
            name, options = parse_spec(spec)
            if name == "disk" and REPLICA_FIELD not in options.get("path", ""):
                raise ValueError(
                    f"each replica needs a disk store of its own: write {REPLICA_FIELD} in the path of {spec}"
                )

    @property
    def max_ongoing_requests(self) -> int:
        """Requests of a replica, beyond what its own limits let in: so the replica answers 429, and Ray queues none."""
        return self.engine.max_running_requests + self.server.limits.max_queued_requests + SPARE_REQUESTS

    @property
    def target_ongoing_requests(self) -> float:
        """Requests in flight on a replica at which autoscaling neither adds nor removes one."""
        return self.cluster.target_ongoing_requests or max(self.engine.max_running_requests / 2, 1)

    @property
    def affinity_spread(self) -> int:
        """Requests that a text's replica may have more than the least loaded one, before they wait for a place."""
        return min(self.cluster.affinity_spread, self.engine.max_running_requests)

    @property
    def graceful_shutdown_s(self) -> float:
        """Seconds that a replica gets to finish its requests and to close its stores."""
        return self.server.drain_timeout + EXIT_GRACE_S

    def engine_of(self, index: int) -> Config:
        """Return the options of the engine of replica `index` of a machine: its disk store is its own."""
        tier = tuple(spec.replace(REPLICA_FIELD, str(index)) for spec in self.engine.tier)
        return replace(self.engine, tier=tier)
