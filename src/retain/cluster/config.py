"""Configuration of replicas. Imports neither Ray nor the engine: the command line makes its arguments from here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from retain.config import Config
from retain.options import NonNegativeFloat, PositiveInt, check_bounds, option
from retain.plugins import check_choice, parse_spec
from retain.server.config import ServerConfig

REPLICA_FIELD = "{replica}"  # in the path of a disk tier: the number of the replica on its machine
EXIT_GRACE_S = 30.0  # from the end of the drain to the end of a replica: its tiers write what they hold
PROXY_LIMITS = ("max_header_size", "header_timeout", "max_connections")  # Ray's proxy reads the headers, unbounded


@dataclass(frozen=True)
class ClusterConfig:
    """Number and place of replicas, and what stays on one. Raises ValueError for a value out of range."""

    replicas: PositiveInt = option(1, "replicas of the engine, each with its own cache")
    replicas_per_machine: PositiveInt | None = option(
        None, "replicas on one machine at most; they divide its cores (default: all replicas)"
    )
    gpus: NonNegativeFloat = option(0.0, "GPUs of a replica")
    affinity: str = option(
        "session",
        "session: requests with equal x-session-id stay on one replica, others go to any; none: each "
        "request goes to the less loaded of two replicas",
    )

    def __post_init__(self) -> None:
        check_choice("affinity", self.affinity, "session", "none")
        check_bounds(self)


@dataclass(frozen=True)
class ClusterSettings:
    """What every replica is built from. Raises ValueError for options that several replicas cannot have."""

    engine: Config
    server: ServerConfig
    cluster: ClusterConfig

    def __post_init__(self) -> None:
        if self.server.port == 0:
            raise ValueError("Ray's proxy needs a port: --port 0 is for retain serve")
        if 0 < self.cluster.gpus < self.engine.tensor_parallel:  # of one actor, so they are of one machine
            raise ValueError(f"{self.engine.tensor_parallel} ranks of a replica take a GPU each: raise --gpus")
        if self.cluster.replicas == 1:
            return
        if self.server.enable_inspector:
            raise ValueError("the inspector shows one engine: leave --inspect out, or have one replica")
        if self.server.kv_events:
            raise ValueError("replicas cannot share an address: leave --kv-events out, or have one replica")
        self.engine_of(1)

    @property
    def graceful_shutdown_s(self) -> float:
        """Seconds that a replica gets to finish its requests and to close its stores."""
        return self.server.drain_timeout + EXIT_GRACE_S

    def engine_of(self, index: int) -> Config:
        """Return the options of the engine of replica `index` of a machine: its disk store is its own.

        Raises ValueError for a second replica that would have the store of the first.
        """
        for spec in self.engine.tier:
            name, options = parse_spec(spec)
            if index > 0 and name == "disk" and REPLICA_FIELD not in options.get("path", ""):
                raise ValueError(f"replicas share no disk store: write {REPLICA_FIELD} in the path of {spec}")
        tier = tuple(spec.replace(REPLICA_FIELD, str(index)) for spec in self.engine.tier)
        return replace(self.engine, tier=tier)
