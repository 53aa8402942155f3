"""Options of the simulation of replicas."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from retain.options import PositiveFloat, PositiveInt, Seed, check_bounds


@dataclass(frozen=True)
class SimulationConfig:
    """Options of the command. Raises ValueError for a number out of range."""

    simulate: bool = field(default=False, metadata={"help": "run a trace on simulated replicas"})
    validate: bool = field(
        default=False,
        metadata={"help": "run a small trace on two real replicas of one core each, and on simulated ones"},
    )
    calibrate: Path | None = field(
        default=None, metadata={"help": "measure the steps of a replica on this machine, and write them to this file"}
    )
    calibration: Path | None = field(
        default=None, metadata={"help": "a file of --calibrate (default: SmolLM2 on one core of a Zen 4 server)"}
    )
    data_dir: Path | None = field(
        default=None,
        metadata={"help": "folder with mooncake_conversation_trace.jsonl (default: generated conversations)"},
    )
    num_prompts: PositiveInt | None = field(
        default=None, metadata={"help": "requests (default: 4000, with --validate 40)"}
    )
    length_divisor: PositiveInt = field(default=8, metadata={"help": "divide the lengths of the trace by this"})
    load: PositiveFloat = field(
        default=0.8,
        metadata={"help": "scale arrival times so that requests, one by one and uncached, take this share of all time"},
    )
    replicas: tuple[PositiveInt, ...] = field(
        default=(1, 2, 4, 8, 16, 32, 64, 128, 256),
        metadata={"help": "numbers of replicas, comma-separated", "separator": ","},
    )
    routing: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "of random, least-loaded, session, prefix and kv-aware, comma-separated (default: all, with "
            "--validate session)",
            "separator": ",",
        },
    )
    tier_settings: tuple[str, ...] = field(
        default=("none", "local:capacity=4GiB,read=1GB", "shared:latency=0.02,read=200MB"),
        metadata={
            "help": "tiers side by side, separated by spaces: none, or local:read=SIZE[,latency=S][,capacity=SIZE], "
            "shared:..., or both joined by +",
            "separator": " ",
        },
    )
    seed: Seed = field(default=0, metadata={"help": "seed of generated conversations and of routing"})
    output_dir: Path | None = field(default=None, metadata={"help": "write every number as JSON, and a plot as PNG"})

    def __post_init__(self) -> None:
        if self.simulate + self.validate + (self.calibrate is not None) != 1:
            raise ValueError("the simulation needs one of --simulate, --validate and --calibrate FILE")
        check_bounds(self)
        if not self.replicas:
            raise ValueError("--replicas names no number")
