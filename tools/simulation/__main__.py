"""Replicas of the engine behind a router, simulated: for what does not fit on one machine.

    python -m tools.simulation --calibrate FILE --model M    measure one replica on this machine
    python -m tools.simulation --simulate                    run a trace on 1 to hundreds of simulated replicas
    python -m tools.simulation --validate                    run a small trace on two real and two simulated ones

`--simulate` compares routing policies and tiers side by side. A simulation depends on nothing but the calibration, the
trace and the seed. Results are in docs/benchmarks/cluster.md.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from retain.cli import loading
from retain.cli.args import CommandParser, add_arguments, from_args, given_args
from retain.config import Config
from tools.simulation import calibrate, report, validation
from tools.simulation.calibration import Calibration, load_calibration
from tools.simulation.config import SimulationConfig
from tools.simulation.routing import ROUTERS, router_class
from tools.simulation.simulator import Cluster
from tools.simulation.tiers import parse_setting
from tools.simulation.trace import TracedRequest, generate_conversations, load_trace, scale_arrivals

Line = dict[str, Any]
NUM_PROMPTS = 4000
DEFAULT_CALIBRATION = Path(__file__).parent / "smollm2-1-core.json"


def check_names(config: SimulationConfig) -> None:
    """Raise ValueError for an unknown routing policy or tier."""
    for name in config.routing:
        router_class(name)
    for setting in config.tier_settings:
        parse_setting(setting)


def open_calibration(config: SimulationConfig, kv_memory: int | None = None) -> Calibration:
    """Return the calibration that is named, or the one beside this file; with a pool of `kv_memory` bytes, if given.

    Raises OSError or ValueError.
    """
    calibration = load_calibration(config.calibration or DEFAULT_CALIBRATION)
    return replace(calibration, num_pages=kv_memory // calibration.page_bytes) if kv_memory else calibration


def load_requests(config: SimulationConfig, calibration: Calibration) -> list[TracedRequest]:
    """Return the requests of the trace in `--data-dir`, or generated ones. Raises OSError or ValueError."""
    num_prompts = config.num_prompts or NUM_PROMPTS
    if config.data_dir:
        return load_trace(config.data_dir, num_prompts, config.length_divisor, calibration)
    return generate_conversations(num_prompts, config.seed, calibration)


def simulate(config: SimulationConfig, calibration: Calibration) -> Iterator[Line]:
    """Yield a line for each number of replicas, tier setting and routing policy. Raises OSError or ValueError."""
    requests = load_requests(config, calibration)
    for num_replicas in config.replicas:
        scaled = scale_arrivals(requests, calibration, num_replicas, config.load)
        for setting, routing in product(config.tier_settings, config.routing or ROUTERS):
            router = router_class(routing)(num_replicas, config.seed)
            cluster = Cluster(calibration, router, parse_setting(setting))
            yield report.summarize(cluster, cluster.run(scaled), setting, routing)


def run(args: Namespace) -> None:
    """Run what the arguments ask for, and print its lines. Raises OSError or ValueError."""
    options = from_args(SimulationConfig, args)
    if options.calibrate:
        measured = calibrate.calibrate(loading.load_llm(from_args(Config, args, prefix_cache="exact")))
        measured.save(options.calibrate)
        print(json.dumps(measured.summarize()))
        return
    given = given_args(args, Config).keys() - ({"kv_memory"} if options.simulate else set())
    if given:
        raise ValueError(f"--{min(given).replace('_', '-')} is an option of --calibrate: the calibration holds it")
    check_names(options)
    calibration = open_calibration(options, getattr(args, "kv_memory", None))
    if options.validate:
        lines = print_lines(validation.run(options, calibration), json.dumps)
    elif args.json:
        lines = print_lines(simulate(options, calibration), json.dumps)
    else:
        print(report.format_header())
        lines = print_lines(simulate(options, calibration), report.format_row)
    if options.output_dir:
        options.output_dir.mkdir(parents=True, exist_ok=True)
        (options.output_dir / "cluster.json").write_text(json.dumps(lines, indent=1), encoding="utf-8")
        if options.simulate:
            report.plot_replicas(lines, options.output_dir)


def print_lines(lines: Iterable[Line], render: Callable[[Line], str]) -> list[Line]:
    """Print each line as soon as it is there; return all of them."""
    printed = []
    for line in lines:
        print(render(line), flush=True)
        printed.append(line)
    return printed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; an error is one line."""
    parser = CommandParser(prog="tools.simulation", description="simulate replicas of the engine behind a router")
    add_arguments(parser, Config)
    add_arguments(parser, SimulationConfig)
    parser.add_argument("--json", action="store_true", help="a JSON line for each simulation, not a table")
    try:
        run(parser.parse_args(argv))
    except (OSError, ValueError) as error:
        print(f"tools.simulation: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
