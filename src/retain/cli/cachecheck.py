"""`retain cachecheck`: test the prefix cache of any OpenAI-compatible server from outside."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace

from retain.cachecheck.config import CachecheckConfig
from retain.cli.args import from_args
from retain.plugins import needs_extra

KEYS = ("OPENAI_API_KEY", "OPENAI_API_KEY_2")


def cachecheck(args: Namespace) -> int:
    """Run the checks, and print their table or one JSON object. Returns 1 where a fault was found.

    Progress goes to standard error.
    """
    with needs_extra("checking a server", "client"):
        from retain.cachecheck.runner import RunEnvironment, run_checks

    def report_progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    first, second = (os.environ.get(name) or None for name in KEYS)
    keys = [first, second] if second else [first]
    report = run_checks(
        args.url, from_args(CachecheckConfig, args), keys, RunEnvironment(report_progress=report_progress)
    )
    print(json.dumps(report.to_json()) if args.json else report.to_table())
    if args.junit:
        args.junit.write_text(report.to_junit(), encoding="utf-8")
    return report.exit_code
