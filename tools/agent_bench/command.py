"""The command: its arguments are checked before a model is loaded."""

from __future__ import annotations

from argparse import Namespace

from retain.cli import loading
from retain.cli.args import from_args
from retain.cli.bench import print_lines
from retain.config import Config
from tools.agent_bench import bench
from tools.agent_bench.config import AgentBenchConfig

REFUSED = {
    "kv_policy": "the bench compares methods: name --kv-policy in --methods",
    "kv_dtype": "the bench compares methods: name --kv-dtype in --methods",
    "tier": "the bench compares methods: name --tier in --methods",
    "allow_policy": "the bench allows its own policies: --allow-policy is for serve",
    "prefix_cache": "the bench sets it itself: --prefix-cache is for run, chat and serve",
    "speculate": "the bench does not speculate: --speculate is for bench speed",
}


def run(args: Namespace) -> int:
    """Run the bench, and print its lines. Raises OSError or ValueError."""
    for option, message in REFUSED.items():
        if hasattr(args, option):
            raise ValueError(message)
    engine = from_args(Config, args, prefix_cache="exact")
    options = from_args(AgentBenchConfig, args)
    methods = [bench.Method.parse(method) for method in options.methods]
    lines = bench.run(loading.load_llm, engine, options, methods)
    print_lines(lines, args.json, options.output_dir and options.output_dir / "agent.json")
    return 0
