"""`retain bench speed`, `budget`, `quality`, `speculate`, `prefix`, `serve`: arguments to calls, results to lines."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from retain.llm import LLM

LLMFactory = Callable[[], LLM]


def run_bench(args: Namespace, load_llm: LLMFactory) -> int:
    """Whichever was asked for. `load` gives the engine, when arguments are known to be good."""
    if args.bench == "serve":
        return run_serve(args)
    if args.bench != "speed" and hasattr(args, "kv_policy"):
        raise ValueError(f"bench {args.bench} compares policies: --kv-policy is for bench speed")
    if hasattr(args, "prefix"):
        raise ValueError(f"bench {args.bench} says itself what is kept: --prefix is for run and chat")
    args.prefix = "exact" if args.bench == "prefix" else "off"
    if args.bench in ("budget", "quality", "prefix") and hasattr(args, "speculate"):
        raise ValueError(f"bench {args.bench} drafts nothing: --speculate is for bench speed")
    if args.bench == "quality":
        return run_quality(args, load_llm)
    if args.bench == "speculate":
        return run_speculate(args, load_llm)
    if args.bench == "prefix":
        return run_prefix(args, load_llm)
    from retain.bench import budget, speed

    if args.bench == "budget":
        parts = [p.strip() for p in args.parts.split(",")]
        budget.check_parts(parts)
        llm = load_llm()
        budget.run(llm, parts, as_json=args.json)
        return 0

    workloads = speed.select_workloads(args.workloads)
    llm = load_llm()
    speed.run(llm, workloads, as_json=args.json)
    return 0


def run_quality(args: Namespace, load_llm: LLMFactory) -> int:
    """`retain bench quality`."""
    from retain.bench import plots, tasks
    from retain.bench import quality as bench

    if args.kept and not args.out:
        raise ValueError("--kept draws pictures: say where by --out")
    names = tasks.task_names() if args.tasks == "all" else [t.strip() for t in args.tasks.split(",")]
    asked = bench.QualityBenchConfig([tasks.load_task(n) for n in names], Path(args.data), args.items, args.longest)
    policies = bench.expand_policies(args.policies, args.budgets)
    out = Path(args.out) if args.out else None
    if out:
        plots.import_pyplot()
        out.mkdir(parents=True, exist_ok=True)
    args.kv_policy = bench.choose_engine_policy(policies)
    llm = load_llm()
    for results in bench.run(llm, asked, policies, out):
        lines = map(json.dumps, results.summarize()) if args.json else [bench.format_table(results)]
        print("\n".join(lines), flush=True)
        if out:
            plots.plot_metrics(results, out)
    if out and args.kept:
        prompt = asked.first_prompt(llm)
        plots.plot_kept_positions({p: llm.kept_positions(prompt, p) for p in policies}, len(prompt), out)
    return 0


def run_speculate(args: Namespace, load_llm: LLMFactory) -> int:
    """`retain bench speculate`."""
    from retain.bench import speculate as bench

    if hasattr(args, "speculate"):
        raise ValueError("bench speculate compares drafters: name them by --drafters")
    if not all(c.strip().isdigit() for c in args.contexts.split(",")):
        raise ValueError(f"--contexts are numbers of tokens, not {args.contexts!r}")
    workloads, contexts = [w.strip() for w in args.workloads.split(",")], [int(c) for c in args.contexts.split(",")]
    asked = bench.SpeculateBenchConfig(
        workloads, args.drafters.split(), Path(args.data), args.items, args.batch, args.new, contexts
    )
    return _print_results(args, bench.run(load_llm(), asked), bench.write_results)


def run_prefix(args: Namespace, load_llm: LLMFactory) -> int:
    """`retain bench prefix`."""
    from retain.bench import prefix as bench

    workloads = [w.strip() for w in args.workloads.split(",")]
    methods, store = [m.strip() for m in args.methods.split(",")], Path(args.store) if args.store else None
    data, more = Path(args.data), (args.items, args.shared, store, args.ratio, args.accuracy, args.hot)
    asked = bench.PrefixBenchConfig(workloads, methods, data, *more)
    return _print_results(args, bench.run(load_llm(), asked), bench.write_results)


def run_serve(args: Namespace) -> int:
    """`retain bench serve`."""
    from retain.bench import serve as bench

    if args.trace and args.rate:
        raise ValueError("--trace says itself when requests come: --rate is for others")
    for name in ("items", "prompt", "new", "faster", "shorter"):
        if getattr(args, name) <= 0:
            raise ValueError(f"--{name} is above 0, not {getattr(args, name)}")
    if args.trace:
        calls = bench.load_trace(Path(args.trace), args.items, args.faster, args.shorter)
    else:
        calls = bench.poisson_requests(args.items, args.rate, args.prompt, args.new, args.seed)
    key = os.environ.get("OPENAI_API_KEY")
    load = bench.LoadConfig(args.url.rstrip("/"), args.model, key, args.ttft / 1e3, args.each / 1e3, args.streams)
    return _print_results(args, [bench.run(load, calls)], bench.write_results)


def _print_results(
    args: Namespace, results: Iterable[dict[str, Any]], write_results: Callable[[Sequence[Any], Path], None]
) -> int:
    """Each as it comes; all of them where --out says."""
    lines = []
    for line in results:
        lines.append(line)
        text = "  ".join(f"{v}" if isinstance(v, str) else f"{k} {v}" for k, v in line.items())
        print(json.dumps(line) if args.json else text, flush=True)
    if args.out:
        write_results(lines, Path(args.out))
    return 0
