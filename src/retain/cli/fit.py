"""`retain fit`: fit a gate or the shares of heads, and print what it explains."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict
from time import perf_counter

from retain.cli.args import from_args
from retain.fit.config import FitConfig


def fit(args: Namespace) -> int:
    """Run `retain fit`. Arguments are checked before a model is loaded."""
    config = from_args(FitConfig, args)
    if not config.out.parent.is_dir():
        raise ValueError(f"{config.out.parent}: no such folder for --out")
    if config.out.is_dir():
        raise ValueError(f"{config.out}: --out is a folder")
    from retain.fit.gate import fit_gate
    from retain.fit.shares import fit_shares
    from retain.kv.eviction.head_shares import BUDGETS
    from retain.models.resolve import resolve_model

    started = perf_counter()
    report = (fit_shares if config.budgets else fit_gate)(resolve_model(args.model), config)
    seconds = perf_counter() - started
    if args.json:
        print(json.dumps({**asdict(report), "seconds": round(seconds, 1)}))
        return 0
    print(report.describe(seconds))
    if report.kl:
        print("KL from the full cache there" + "".join(f"{b:>10.1%}" for b in BUDGETS))
    for name, values in report.kl.items():
        print(f"{name:28}" + "".join(f"{value:>10.4f}" for value in values))
    print(report.advise(config.out))
    return 0
