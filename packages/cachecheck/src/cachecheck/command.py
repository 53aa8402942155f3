"""The command `cachecheck URL`: its arguments, what it prints, its exit codes.

Its arguments and its run are apart, so that another command line can have them as a command of its own. Importing this
module is light: httpx is imported when checks run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from argparse import SUPPRESS, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from cachecheck.config import CachecheckConfig, Number
from cachecheck.terminal import escape_controls

DESCRIPTION = "test the prefix cache of a server from outside"
KEYS = ("OPENAI_API_KEY", "OPENAI_API_KEY_2")


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error, which quotes arguments, and exit with code 2."""
        self.exit(2, escape_controls(f"{self.prog}: {' '.join(message.split())}") + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments. Options that are not given are absent: the configuration holds the defaults."""
    parser.add_argument(
        "url", metavar="URL", help="such as http://127.0.0.1:8000/v1 (keys: $OPENAI_API_KEY, $OPENAI_API_KEY_2)"
    )
    for field in dataclasses.fields(CachecheckConfig):
        kind = field.metadata["kind"]
        settings: dict[str, Any] = {"type": kind}
        if isinstance(kind, Number):
            settings = {"type": kind.parse, "metavar": "N" if kind.kind is int else "X"}
        shown = f"{field.default:g}" if isinstance(field.default, int | float) else field.default
        default = f" (default: {shown})" if shown else ""
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, default=SUPPRESS, help=field.metadata["help"] + default, **settings)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--junit", type=Path, metavar="PATH", help="write JUnit's XML to a file, too")


def run(args: Namespace) -> int:
    """Run the checks, and print their table or one JSON object. Returns 1 where a fault was found, 2 where none can be.

    Progress goes to standard error. Raises ValueError, OSError.
    """
    from cachecheck.runner import RunEnvironment, run_checks

    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(CachecheckConfig) if hasattr(args, f.name)}
    first, second = (os.environ.get(name) or None for name in KEYS)
    keys = [first, second] if second else [first]
    report = run_checks(args.url, CachecheckConfig(**given), keys, RunEnvironment(report_progress=_report_progress))
    text = json.dumps(report.to_json()) if args.json else report.to_table()
    print(escape_controls(text) if sys.stdout.isatty() else text, flush=True)  # a closed pipe fails here
    if args.junit:
        args.junit.write_text(report.to_junit(), encoding="utf-8")
    return report.exit_code


def _report_progress(line: str) -> None:
    print(escape_controls(line), file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code: 2 after an error, 130 after Ctrl-C, 0 when the output pipe is closed."""
    parser = OneLineParser(prog="cachecheck", description=f"{DESCRIPTION.capitalize()}.", allow_abbrev=False)
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        return run(args)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # requests may be in flight: the next Ctrl-C waits for none
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed there
        return 0
    except (ValueError, OSError) as error:
        line = " ".join(str(error).split()) or type(error).__name__
        print(f"cachecheck: {escape_controls(line)}", file=sys.stderr)
        return 2
