"""`retain bench`: arguments to a bench's configuration, its results to lines and files."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retain.bench.config import (
    BudgetBenchConfig,
    PrecisionBenchConfig,
    PrefixBenchConfig,
    QualityBenchConfig,
    SpeculateBenchConfig,
    SpeedBenchConfig,
)
from retain.cli.args import from_args
from retain.config import Config

if TYPE_CHECKING:
    from retain.llm import LLM

Line = dict[str, Any]


def bench(args: Namespace) -> int:
    """Run a bench. Its arguments are checked before a model is loaded."""
    return BENCHES[args.bench](args)


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


def run_speed(args: Namespace) -> int:
    """Run `retain bench speed`."""
    from retain.bench import speed
    from retain.cli import loading

    config = engine_config(args)
    options = from_args(SpeedBenchConfig, args)
    workloads = speed.select_workloads(options.workloads)
    speed.run(loading.load_llm(config), workloads, as_json=args.json, peer=options.peer)
    return 0


def run_budget(args: Namespace) -> int:
    """Run `retain bench budget`."""
    from retain.bench import budget
    from retain.cli import loading

    config = engine_config(args)
    names = from_args(BudgetBenchConfig, args).measurements
    budget.check_measurements(names)
    llm = loading.load_llm(config)
    for name in names:
        for line in budget.MEASUREMENTS[name](llm):
            print(_format_line({"bench": name, **line}, args.json), flush=True)
    return 0


def run_precision(args: Namespace) -> int:
    """Run `retain bench precision`."""
    from retain.bench import precision
    from retain.cli import loading

    if hasattr(args, "kv_dtype"):
        raise ValueError("bench precision compares dtypes of K and V: name them by --kv-dtypes")
    config = engine_config(args)
    options = from_args(PrecisionBenchConfig, args)
    precision.check_measurements(options.measurements)
    variants = precision.list_variants(options)
    configs = {v: replace(config, kv_dtype=v.kv_dtype, kv_policy=v.policy) for v in variants}  # raises before it loads

    def load(variant: precision.Variant, kv_memory: int | None) -> LLM:
        return loading.load_llm(replace(configs[variant], kv_memory=kv_memory or config.kv_memory))

    for name in options.measurements:
        _print_lines(args, precision.MEASUREMENTS[name](load, options))
    return 0


def run_quality(args: Namespace) -> int:
    """Run `retain bench quality`."""
    from retain.bench import quality
    from retain.cli import loading

    config = engine_config(args)
    options = from_args(QualityBenchConfig, args)
    tasks = quality.load_tasks(options.tasks)
    policies = quality.expand_policies(options.policies, options.budgets)
    if options.output_dir:
        options.output_dir.mkdir(parents=True, exist_ok=True)
    config = replace(config, allow_policy=tuple(policies))
    others = {  # raises before anything is loaded
        dtype: replace(config, kv_dtype=dtype, allow_policy=tuple(quality.possible_policies(policies, dtype)))
        for dtype in options.kv_dtypes
    }
    llm, *other_llms = (loading.load_llm(c) for c in (config, *others.values()))
    for results in quality.run(llm, options, tasks, policies, dict(zip(others, other_llms, strict=True))):
        print(*(map(json.dumps, results.summarize()) if args.json else [quality.format_table(results)]), sep="\n")
    return 0


def run_speculate(args: Namespace) -> int:
    """Run `retain bench speculate`."""
    from retain.bench import speculate
    from retain.cli import loading

    config = engine_config(args)
    options = from_args(SpeculateBenchConfig, args)
    speculate.check_names(options)
    lines = _print_lines(args, speculate.run(loading.load_llm(config), options))
    if options.output_dir:
        _write_lines(lines, options.output_dir, "speculate")
    return 0


def run_prefix(args: Namespace) -> int:
    """Run `retain bench prefix`."""
    from retain.bench import prefix
    from retain.cli import loading

    config = engine_config(args)
    options = from_args(PrefixBenchConfig, args)
    prefix.check_names(options)
    lines = _print_lines(args, prefix.run(loading.load_llm(config), options))
    if options.output_dir:
        _write_lines(lines, options.output_dir, "prefix")
    return 0


BENCHES: dict[str, Callable[[Namespace], int]] = {
    "speed": run_speed,
    "budget": run_budget,
    "precision": run_precision,
    "quality": run_quality,
    "speculate": run_speculate,
    "prefix": run_prefix,
}


def _print_lines(args: Namespace, lines: Iterable[Line]) -> list[Line]:
    """Print each line as soon as it is measured; return all of them."""
    printed = []
    for line in lines:
        print(_format_line(line, args.json), flush=True)
        printed.append(line)
    return printed


def _format_line(line: Line, as_json: bool) -> str:
    if as_json:
        return json.dumps(line)
    return "  ".join(f"{value}" if isinstance(value, str) else f"{key} {value}" for key, value in line.items())


def _write_lines(lines: list[Line], folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(lines, indent=1), encoding="utf-8")
