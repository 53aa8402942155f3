"""`python -m tools.agent_bench`: arguments to the bench's configuration."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from retain.cli.args import CommandParser, add_arguments, add_log_level
from retain.cli.main import run_main
from retain.config import Config
from tools.agent_bench.config import AgentBenchConfig


def build_parser() -> CommandParser:
    """Build the parser of the bench's options."""
    parser = CommandParser(prog="tools.agent_bench", description="measure sessions of a coding agent")
    add_arguments(parser, Config)
    add_arguments(parser, AgentBenchConfig)
    parser.add_argument("--json", action="store_true", help="a JSON line for each method and size")
    add_log_level(parser, "warning")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench. Returns its exit code, as every command does; an error is one line."""
    return run_main(build_parser, argv, lambda args: "tools.agent_bench.command:run")


if __name__ == "__main__":
    sys.exit(main())
