"""`prefix-doctor FILE ...`: what a cache would have of recorded requests, and what a server said of its answers."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from retain.cli.args import CommandParser, add_log_level, add_why_arguments
from retain.cli.main import run_main


def build_parser() -> CommandParser:
    """Build the parser; its arguments are those of `retain cache why`."""
    parser = CommandParser(prog="prefix-doctor", description="say why prompts were not found in the prefix cache")
    add_why_arguments(parser)
    add_log_level(parser, "warning")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code; an error is one line."""
    return run_main(build_parser, argv, lambda args: "prefix_doctor.command:explain_files")


if __name__ == "__main__":
    sys.exit(main())
