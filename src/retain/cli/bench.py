"""`retain bench`: arguments to a bench's configuration, its results to lines and files."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from retain.bench import budget, precision, prefix, quality, speculate, speed
from retain.bench.config import (
    BudgetBenchConfig,
    PrecisionBenchConfig,
    PrefixBenchConfig,
    QualityBenchConfig,
    SpeculateBenchConfig,
    SpeedBenchConfig,
)
from retain.cli import loading
from retain.cli.args import from_args
from retain.config import Config
from retain.llm import LLM
from retain.plugins import check_known, needs_extra

Line = dict[str, Any]


def bench(args: Namespace) -> int:
    """Run a bench. Its arguments are checked before a model is loaded."""
    BENCHES[args.bench](args)
    return 0


def engine_config(args: Namespace) -> Config:
    """Return the engine's options. Raises ValueError for an option that the bench itself varies."""
    if args.bench != "speed" and hasattr(args, "kv_policy"):
        raise ValueError(f"bench {args.bench} compares policies: --kv-policy is for bench speed")
    if hasattr(args, "allow_policy"):
        raise ValueError(f"bench {args.bench} allows its own policies: --allow-policy is for serve")
    if hasattr(args, "prefix_cache"):
        raise ValueError(f"bench {args.bench} sets it itself: --prefix-cache is for run, chat and serve")
    if args.bench == "speculate" and hasattr(args, "speculate"):
        raise ValueError("bench speculate compares drafters: name them by --drafters")
    if args.bench != "speed" and hasattr(args, "speculate"):
        raise ValueError(f"bench {args.bench} does not speculate: --speculate is for bench speed")
    return from_args(Config, args, prefix_cache="exact" if args.bench == "prefix" else "off")


def run_speed(args: Namespace) -> None:
    """Run `retain bench speed`: measure the throughput and latency of workloads."""
    config = engine_config(args)
    options = from_args(SpeedBenchConfig, args)
    workloads = speed.select_workloads(options.workloads)
    llm = loading.load_llm(config)
    chosen = workloads if options.workloads else speed.fitting_workloads(workloads, llm.max_model_len)
    speed.run(llm, chosen, as_json=args.json, peer=options.peer)


def run_budget(args: Namespace) -> None:
    """Run `retain bench budget`: measure what KV budgets cost and save."""
    config = engine_config(args)
    names = from_args(BudgetBenchConfig, args).measurements
    check_known("measurement", names, budget.MEASUREMENTS)
    llm = loading.load_llm(replace(config, allow_policy=budget.LOOK_POLICIES if "looks" in names else ()))
    for name in names:
        print_lines(({"bench": name, **line} for line in budget.MEASUREMENTS[name](llm)), args.json)


def run_precision(args: Namespace) -> None:
    """Run `retain bench precision`: compare dtypes of the KV cache."""
    if hasattr(args, "kv_dtype"):
        raise ValueError("bench precision compares dtypes of K and V: name them by --kv-dtypes")
    config = engine_config(args)
    options = from_args(PrecisionBenchConfig, args)
    check_known("measurement", options.measurements, precision.MEASUREMENTS)
    variants = precision.list_variants(options)
    configs = {v: replace(config, kv_dtype=v.kv_dtype, kv_policy=v.policy) for v in variants}  # raises before it loads

    def load(variant: precision.Variant, kv_memory: int | None) -> LLM:
        return loading.load_llm(replace(configs[variant], kv_memory=kv_memory or config.kv_memory))

    for name in options.measurements:
        print_lines(precision.MEASUREMENTS[name](load, options), args.json)


def run_quality(args: Namespace) -> None:
    """Run `retain bench quality`: score the answers under each policy."""
    config = engine_config(args)
    options = from_args(QualityBenchConfig, args)
    tasks = quality.load_tasks(options.tasks)
    policies = quality.expand_policies(options.policies, options.budgets)
    if options.output_dir:
        options.output_dir.mkdir(parents=True, exist_ok=True)
    if options.report:
        options.report.mkdir(parents=True, exist_ok=True)
        with needs_extra("--report", "bench"):
            from retain.bench.report import write_report
    config = replace(config, allow_policy=tuple(policies))
    others = {  # raises before anything is loaded
        dtype: replace(config, kv_dtype=dtype, allow_policy=tuple(quality.possible_policies(policies, dtype)))
        for dtype in options.kv_dtypes
    }
    llm, *other_llms = (loading.load_llm(c) for c in (config, *others.values()))
    policies = quality.choose_policies(llm, policies)
    done: list[quality.QualityResults] = []
    for results in quality.run(llm, options, tasks, policies, dict(zip(others, other_llms, strict=True))):
        done.append(results)
        if options.report:
            write_report(options.report, config.model, done)
        print(*(map(json.dumps, results.summarize()) if args.json else [quality.format_table(results)]), sep="\n")


def run_speculate(args: Namespace) -> None:
    """Run `retain bench speculate`: measure speculative decoding."""
    config = engine_config(args)
    options = from_args(SpeculateBenchConfig, args)
    speculate.check_names(options)
    named = [name for name in options.drafters if name != speculate.PLAIN]
    lines = speculate.run(loading.load_llm(config, named), options)
    print_lines(lines, args.json, options.output_dir and options.output_dir / "speculate.json")


def run_prefix(args: Namespace) -> None:
    """Run `retain bench prefix`: time first tokens where prompts share a prefix."""
    config = engine_config(args)
    options = from_args(PrefixBenchConfig, args)
    prefix.check_names(options)
    lines = prefix.run(loading.load_llm(replace(config, allow_policy=options.chat_policies)), options)
    print_lines(lines, args.json, options.output_dir and options.output_dir / "prefix.json")


BENCHES: dict[str, Callable[[Namespace], None]] = {
    "speed": run_speed,
    "budget": run_budget,
    "precision": run_precision,
    "quality": run_quality,
    "speculate": run_speculate,
    "prefix": run_prefix,
}


def print_lines(lines: Iterable[Line], as_json: bool, path: Path | None = None) -> None:
    """Print each line as soon as it is measured; at the end write all of them to a file, if one is given."""
    printed = []
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
    for line in lines:
        print(_format_line(line, as_json), flush=True)
        printed.append(line)
    if path:
        path.write_text(json.dumps(printed, indent=1), encoding="utf-8")


def _format_line(line: Line, as_json: bool) -> str:
    if as_json:
        return json.dumps(line)
    return "  ".join(f"{value}" if isinstance(value, str) else f"{key} {value}" for key, value in line.items())
