"""`retain bench cluster`: replicas of the engine behind a router, for what does not fit on one machine.

`--calibrate FILE` measures one replica on this machine. `--simulate` runs a trace on 1 to hundreds of simulated ones,
under routing policies and tiers side by side. `--validate` runs a small trace on two real ones and on two simulated
ones. A simulation depends on nothing but the calibration, the trace and the seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from retain.bench.config import ClusterBenchConfig
from retain.bench.simulation.calibration import Calibration, load_calibration
from retain.bench.simulation.report import summarize
from retain.bench.simulation.routing import ROUTERS, router_class
from retain.bench.simulation.simulator import Cluster
from retain.bench.simulation.tiers import parse_setting
from retain.bench.simulation.trace import TracedRequest, generate_conversations, load_trace, scale_arrivals

Line = dict[str, Any]
NUM_PROMPTS = 4000
DEFAULT_CALIBRATION = Path(__file__).parent / "simulation" / "smollm2-1-core.json"


def check_names(config: ClusterBenchConfig) -> None:
    """Raise ValueError for an unknown routing policy or tier."""
    for name in config.routing:
        router_class(name)
    for setting in config.tier_settings:
        parse_setting(setting)


def open_calibration(config: ClusterBenchConfig, kv_memory: int | None = None) -> Calibration:
    """Return the calibration that is named, or the package's own; with a pool of `kv_memory` bytes, if given.

    Raises OSError or ValueError.
    """
    calibration = load_calibration(config.calibration or DEFAULT_CALIBRATION)
    return replace(calibration, num_pages=kv_memory // calibration.page_bytes) if kv_memory else calibration


def load_requests(config: ClusterBenchConfig, calibration: Calibration) -> list[TracedRequest]:
    """Return the requests of the trace in `--data-dir`, or generated ones. Raises OSError or ValueError."""
    num_prompts = config.num_prompts or NUM_PROMPTS
    if config.data_dir:
        return load_trace(config.data_dir, num_prompts, config.length_divisor, calibration)
    return generate_conversations(num_prompts, config.seed, calibration)


def simulate(config: ClusterBenchConfig, calibration: Calibration) -> Iterator[Line]:
    """Yield a line for each number of replicas, tier setting and routing policy. Raises OSError or ValueError."""
    requests = load_requests(config, calibration)
    for num_replicas in config.replicas:
        scaled = scale_arrivals(requests, calibration, num_replicas, config.load)
        for setting, routing in product(config.tier_settings, config.routing or ROUTERS):
            router = router_class(routing)(num_replicas, config.seed)
            cluster = Cluster(calibration, router, parse_setting(setting))
            yield summarize(cluster, cluster.run(scaled), setting, routing)
