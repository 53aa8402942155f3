"""`retain fit`: fit a gate or the shares of heads, and print what it explains."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict
from time import perf_counter
from typing import Any

from retain.cli.args import from_args
from retain.fit.config import FitConfig


def fit(args: Namespace) -> int:
    """Run `retain fit`. Arguments are checked before a model is loaded."""
    config = from_args(FitConfig, args)
    if not config.out.parent.is_dir():
        raise ValueError(f"{config.out.parent}: no such folder for --out")
    if config.out.is_dir():
        raise ValueError(f"{config.out}: --out is a folder")
    from retain.fit.gate import FitReport, fit_gate
    from retain.fit.shares import SharesReport, fit_shares
    from retain.kv.eviction.head_shares import BUDGETS
    from retain.models.resolve import resolve_model

    started = perf_counter()
    path = resolve_model(args.model)
    report: FitReport | SharesReport = fit_shares(path, config) if config.budgets else fit_gate(path, config)
    seconds = perf_counter() - started
    if args.json:
        print(json.dumps({**asdict(report), "seconds": round(seconds, 1)}))
        return 0
    if isinstance(report, FitReport):
        _print_gate(report, seconds)
    else:
        print(
            f"shares of {report.lowest:.2f} to {report.highest:.2f} from {report.num_fitted} prompts, {seconds:.0f} s"
        )
    if report.kl:
        print("KL from the full cache there" + "".join(f"{b:>10.1%}" for b in BUDGETS))
    for name, values in report.kl.items():
        print(f"{name:28}" + "".join(f"{value:>10.4f}" for value in values))
    if isinstance(report, FitReport):
        print(f"use it: --kv-policy {report.best}:budget=25%,file={config.out}")
    elif report.has_gained:
        print("use it: --kv-policy h2o:budget=25%,share=fitted, with the file beside the model")
    else:
        print("shares gain nothing on this model: leave share=fitted out")
    return 0


def _print_gate(report: Any, seconds: float) -> None:
    print(f"{report.num_weights} numbers fitted on {report.num_fitted} prompts in {seconds:.0f} s")
    print(f"R2 on {report.num_held_out} other prompts: {report.r2:.3f}")
