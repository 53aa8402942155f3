"""`retain tune`: find the policy with the least memory that holds a bound, and print its option."""

from __future__ import annotations

import json
import sys
from argparse import Namespace

from retain.cli.args import from_args
from retain.config import Config
from retain.tune.config import TuneConfig


def tune(args: Namespace) -> int:
    """Run `retain tune`; 1 where no policy holds the bound. Arguments are checked before a model is loaded.

    Standard output is only the policy's spec, or one JSON object; the table goes to standard error.
    """
    from retain.bench.quality import expand_policies
    from retain.cli import loading
    from retain.tune.bound import parse_bound
    from retain.tune.measure import rouge_scorer
    from retain.tune.tuner import tune

    config = from_args(TuneConfig, args)
    if hasattr(args, "kv_policy") or hasattr(args, "allow_policy"):
        raise ValueError("tune compares policies: name them by --policies")
    if hasattr(args, "prefix_cache"):
        raise ValueError("tune sets it itself: --prefix-cache is for run, chat and serve")
    bound = parse_bound(config.within)
    if bound.needs_answers:
        rouge_scorer()
    if not config.data.is_file():
        raise ValueError(f"{config.data}: no such file for --data")
    specs = tuple(expand_policies(config.policies, config.budgets))
    report = tune(loading.load_llm(from_args(Config, args, prefix_cache="off", allow_policy=specs)), config, bound)
    print(report.to_table(), file=sys.stderr)
    if args.json:
        print(json.dumps(report.to_json()))
    elif report.best:
        print(report.best.spec)
    if report.best is None:
        print(f"retain: {report.refusal()}", file=sys.stderr)
    return 0 if report.best else 1
