"""`retain bench speed`, `budget`, `quality`, `speculate`, `prefix`, `serve`: arguments to calls, results to lines."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from retain.llm import LLM

Load = Callable[[], LLM]


def bench(args: Namespace, load: Load) -> int:
    """Whichever was asked for. `load` gives the engine, when arguments are known to be good."""
    if args.bench == "serve":
        return serve(args)
    if args.bench != "speed" and hasattr(args, "kv_policy"):
        raise ValueError(f"bench {args.bench} compares policies: --kv-policy is for bench speed")
    if hasattr(args, "prefix"):
        raise ValueError(f"bench {args.bench} says itself what is kept: --prefix is for run and chat")
    args.prefix = "exact" if args.bench == "prefix" else "off"
    if args.bench in ("budget", "quality", "prefix") and hasattr(args, "speculate"):
        raise ValueError(f"bench {args.bench} drafts nothing: --speculate is for bench speed")
    if args.bench == "quality":
        return quality(args, load)
    if args.bench == "speculate":
        return speculate(args, load)
    if args.bench == "prefix":
        return prefix(args, load)
    from retain.bench import budget, speed

    if args.bench == "budget":
        parts = [p.strip() for p in args.parts.split(",")]
        budget.check(parts)
        llm = load()
        budget.run(llm, parts, as_json=args.json)
        return 0

    workloads = speed.choose(args.workloads)
    llm = load()
    speed.run(llm, workloads, as_json=args.json)
    return 0


def quality(args: Namespace, load: Load) -> int:
    """`retain bench quality`."""
    from retain.bench import plots, tasks
    from retain.bench import quality as bench

    if args.kept and not args.out:
        raise ValueError("--kept draws pictures: say where by --out")
    names = tasks.names() if args.tasks == "all" else [t.strip() for t in args.tasks.split(",")]
    asked = bench.Asked([tasks.load(n) for n in names], Path(args.data), args.items, args.longest)
    policies = bench.choose(args.policies, args.budgets)
    out = Path(args.out) if args.out else None
    if out:
        plots.pyplot()
        out.mkdir(parents=True, exist_ok=True)
    args.kv_policy = bench.engine_policy(policies)
    llm = load()
    for results in bench.run(llm, asked, policies, out):
        lines = map(json.dumps, results.summary()) if args.json else [bench.table(results)]
        print("\n".join(lines), flush=True)
        if out:
            plots.lines(results, out)
    if out and args.kept:
        prompt = asked.example(llm)
        plots.kept({p: llm.kept(prompt, p) for p in policies}, len(prompt), out)
    return 0


def speculate(args: Namespace, load: Load) -> int:
    """`retain bench speculate`."""
    from retain.bench import speculate as bench

    if hasattr(args, "speculate"):
        raise ValueError("bench speculate compares drafters: name them by --drafters")
    if not all(c.strip().isdigit() for c in args.contexts.split(",")):
        raise ValueError(f"--contexts are numbers of tokens, not {args.contexts!r}")
    workloads, contexts = [w.strip() for w in args.workloads.split(",")], [int(c) for c in args.contexts.split(",")]
    asked = bench.Asked(workloads, args.drafters.split(), Path(args.data), args.items, args.batch, args.new, contexts)
    return _lines(args, bench.run(load(), asked), bench.write)


def prefix(args: Namespace, load: Load) -> int:
    """`retain bench prefix`."""
    from retain.bench import prefix as bench

    workloads = [w.strip() for w in args.workloads.split(",")]
    methods, store = [m.strip() for m in args.methods.split(",")], Path(args.store) if args.store else None
    data, more = Path(args.data), (args.items, args.shared, store, args.ratio, args.accuracy, args.hot)
    asked = bench.Asked(workloads, methods, data, *more)
    return _lines(args, bench.run(load(), asked), bench.write)


def serve(args: Namespace) -> int:
    """`retain bench serve`."""
    from retain.bench import serve as bench

    if args.trace and args.rate:
        raise ValueError("--trace says itself when requests come: --rate is for others")
    for name in ("items", "prompt", "new", "faster", "shorter"):
        if getattr(args, name) <= 0:
            raise ValueError(f"--{name} is above 0, not {getattr(args, name)}")
    if args.trace:
        calls = bench.trace(Path(args.trace), args.items, args.faster, args.shorter)
    else:
        calls = bench.poisson(args.items, args.rate, args.prompt, args.new, args.seed)
    key = os.environ.get("OPENAI_API_KEY")
    load = bench.Load(args.url.rstrip("/"), args.model, key, args.ttft / 1e3, args.each / 1e3, args.streams)
    return _lines(args, [bench.run(load, calls)], bench.write)


def _lines(args: Namespace, found: Iterable[dict[str, Any]], write: Callable[[Sequence[Any], Path], None]) -> int:
    """Each as it comes; all of them where --out says."""
    lines = []
    for line in found:
        lines.append(line)
        text = "  ".join(f"{v}" if isinstance(v, str) else f"{k} {v}" for k, v in line.items())
        print(json.dumps(line) if args.json else text, flush=True)
    if args.out:
        write(lines, Path(args.out))
    return 0
