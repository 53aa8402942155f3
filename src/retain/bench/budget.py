"""`retain bench budget`: the speed of KV budgets, and the cost of scoring.

Requests of several policies share one cache, each policy with an engine of its own. The engines step in turn, so that
all of them see the same machine, and medians are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from time import perf_counter
from typing import Any

from retain.bench.bytes_read import cache_bytes_read
from retain.bench.engines import (
    cancel_all,
    greedy_request,
    make_engine,
    random_prompts,
    run_queued,
    run_until_first_tokens,
)
from retain.bench.quality import policy_at_budget
from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kv.eviction import policies
from retain.llm import LLM

Line = dict[str, Any]
UNREACHABLE_BUDGET = 10**6  # tokens: with such a budget a policy scores and never evicts
SCORING_POLICIES = {
    "full": "full",
    "h2o": f"h2o:budget={UNREACHABLE_BUDGET}",
    "keyformer": f"keyformer:budget={UNREACHABLE_BUDGET}",
    "tau=1.5": f"keyformer:budget={UNREACHABLE_BUDGET},tau=1.5",
}
EVICTION_POLICIES = ("full", "h2o", "h2o:share=all,value=norm", "gate", "reread:share=all,value=norm")
LOOK_POLICIES = ("look:slots=25%", "look:slots=12.5%")
THROUGHPUT_POLICIES = ("full", "h2o:budget=25%", "h2o:budget=25%,prefill=stream", "keyformer:budget=25%")


def measure_scoring(llm: LLM) -> list[Line]:
    """Time a decode step over 4096 slots and a prefill of 4096 tokens, with and without scores; nothing is evicted."""
    lines = []
    prompt_len = min(4096, llm.max_model_len - 200)
    for batch_size in (1, 8):
        times = time_side_by_side(llm, list(SCORING_POLICIES.values()), prompt_len, batch_size, num_steps=48)
        lines += _compare_with_first(f"decode, batch {batch_size}", list(SCORING_POLICIES), times)
    times = time_prefills(llm, list(SCORING_POLICIES.values()), prompt_len, num_repeats=3)
    return lines + _compare_with_first("prefill", list(SCORING_POLICIES), times)[:3]


def measure_eviction(llm: LLM) -> Iterator[Line]:
    """Time a prefill of 700 and of 4096 tokens with the eviction that follows, to 25 %, and the decode steps then.

    A policy that the model has no gate for is left out. The ratios are to h2o, the second of the policies.
    """
    specs = [policy_at_budget(p, "25%") if p != "full" else p for p in EVICTION_POLICIES]
    specs = [spec for spec in specs if not spec.startswith("gate") or llm.cache.planner.has_gate]
    for prompt_len in (700, min(4096, llm.max_model_len - 200)):
        prefills = time_prefills(llm, specs, prompt_len, num_repeats=7)
        steps = time_side_by_side(llm, specs, prompt_len, batch_size=1, num_steps=96)
        for name, times in (("prefill", prefills), ("decode", steps)):
            for spec, t in zip(specs, times, strict=True):
                line = {"measurement": f"{name}, {prompt_len} tokens", "policy": spec, **_compare_times(t, times[1])}
                yield {key.replace("full", "h2o"): value for key, value in line.items()}


def measure_decode(llm: LLM, prompt_len: int = 7000, batch_size: int = 8) -> list[Line]:
    """Time a decode step of 8 requests with prompts of 7000 tokens, of which all, half or a quarter is kept."""
    prompt_len = min(prompt_len, llm.max_model_len - 600)
    names = ["full", *(f"{p}:budget={b}" for b in ("50%", "25%") for p in ("h2o", "keyformer"))]
    times = time_side_by_side(llm, names, prompt_len, batch_size, num_steps=160)
    return _compare_with_first(f"decode, batch {batch_size}", names, times)


def measure_looks(llm: LLM) -> Iterator[Line]:
    """Time a decode step behind 100 to 30,000 tokens that attends to all slots, a quarter or an eighth of them.

    The engine allows LOOK_POLICIES. Lengths that the model's context does not hold are left out. `cache_mb` are the
    megabytes of K, V and sketches that attention of such a step reads.
    """
    names = ["full", *LOOK_POLICIES]
    for prompt_len in (100, 2000, 7000, 16_000, 30_000):
        if prompt_len <= llm.max_model_len - 200:
            times = time_side_by_side(llm, names, prompt_len, batch_size=1, num_steps=96)
            for line in _compare_with_first(f"decode, {prompt_len} tokens", names, times):
                policy = policies.parse(line["policy"]).resolve(prompt_len)
                read = cache_bytes_read(llm.cache.planner, policy, prompt_len)
                yield {**line, "cache_mb": round(read / 1e6, 2)}


def _compare_with_first(measurement: str, names: Sequence[str], times: Sequence[list[float]]) -> list[Line]:
    return [
        {"measurement": measurement, "policy": name, **_compare_times(t, times[0])}
        for name, t in zip(names, times, strict=True)
    ]


def measure_throughput(
    llm: LLM, prompt_len: int = 7000, output_len: int = 512, num_requests: int = 32
) -> Iterator[Line]:
    """Measure the output tokens per second of 32 queued requests, over the whole run and while only decoding.

    --kv-memory chooses how many full requests fit into the pool; `full_requests_fit` is that number. `max_speedup` is
    the speed-up if decoding took no time, so that the run took its prefill alone. `decode_tok_s` counts the steps in
    which no prompt is computed; it is null where there is none.
    """
    prompt_len = min(prompt_len, llm.max_model_len - output_len)
    pages = llm.cache.pages_needed(policies.parse("full"), prompt_len + output_len, prompt_len)
    full_rates: tuple[float, float] | None = None
    for policy in THROUGHPUT_POLICIES:
        first = make_engine(llm, [_make_request(llm, prompt_len, policy, num_requests, 1)])
        prefill_s = num_requests * time_first_tokens(first)
        requests = [_make_request(llm, prompt_len, policy, seed, output_len) for seed in range(num_requests)]
        run = run_queued(make_engine(llm, requests))
        rates = num_requests * output_len / run.seconds, run.decode_tok_s
        full_rates = full_rates or rates
        yield {
            "measurement": f"{num_requests} requests",
            "policy": policy,
            "tok_s": round(rates[0], 1),
            "speedup_over_full": round(rates[0] / full_rates[0], 2),
            "max_speedup": round(num_requests * output_len / prefill_s / full_rates[0], 2),
            "decode_tok_s": round(rates[1], 1) or None,
            "decode_speedup_over_full": round(rates[1] / full_rates[1], 2) if all((rates[1], full_rates[1])) else None,
            "max_running": run.max_running,
            "full_requests_fit": round(llm.cache.total_pages / pages, 1),
            "num_preemptions": sum(r.stats.num_preemptions for r in requests),
        }


MEASUREMENTS: dict[str, Callable[[LLM], Iterable[Line]]] = {
    "scoring": measure_scoring,
    "eviction": measure_eviction,
    "decode": measure_decode,
    "throughput": measure_throughput,
    "looks": measure_looks,
}


def time_prefills(llm: LLM, policy_specs: Sequence[str], prompt_len: int, num_repeats: int) -> list[list[float]]:
    """Return the seconds from a request to its first token and what follows in that step; the policies take turns."""
    times: list[list[float]] = [[] for _ in policy_specs]
    for seed in range(num_repeats):
        for policy_times, policy in zip(times, policy_specs, strict=True):
            engine = make_engine(llm, [_make_request(llm, prompt_len, policy, seed)])
            policy_times.append(time_first_tokens(engine))
            cancel_all(engine)
    return times


def time_side_by_side(
    llm: LLM, policy_specs: Sequence[str], prompt_len: int, batch_size: int, num_steps: int
) -> list[list[float]]:
    """Return the seconds of each decode step of each policy; the policies step in turn, in one cache."""
    prefill_steps = 2 * batch_size * len(policy_specs) * (prompt_len // llm.config.max_batched_tokens + 1)
    output_len = min(num_steps + 8 + prefill_steps, llm.max_model_len - prompt_len)
    groups = [
        [_make_request(llm, prompt_len, policy, seed, output_len) for seed in range(batch_size)]
        for policy in policy_specs
    ]
    shared_engine = make_engine(llm, [r for group in groups for r in group])  # equal prompts are computed once
    run_until_first_tokens(shared_engine)
    engines = [make_engine(llm, []) for _ in groups]
    for engine, group in zip(engines, groups, strict=True):
        engine.scheduler.running = {r: shared_engine.scheduler.running[r] for r in group}
    times: list[list[float]] = [[] for _ in engines]
    for _ in range(num_steps):
        for engine, policy_times in zip(engines, times, strict=True):
            started = perf_counter()
            engine.step()
            policy_times.append(perf_counter() - started)
    assert not any(r.finish_reason for group in groups for r in group), "a request ended before the last step"
    for engine in engines:
        cancel_all(engine)
    return times


def _make_request(llm: LLM, prompt_len: int, policy: str, seed: int, output_len: int = 8) -> Request:
    (prompt,) = random_prompts(llm.spec.vocab_size, prompt_len, 1, seed)
    return greedy_request(llm.cache, prompt, policies.parse(policy), output_len, seed)


def time_first_tokens(engine: Engine) -> float:
    """Return the seconds until every request of an engine has its first token."""
    started = perf_counter()
    run_until_first_tokens(engine)
    return perf_counter() - started


def _compare_times(times: Sequence[float], baseline: Sequence[float]) -> Line:
    """Return median and mean in milliseconds, and their ratios to the full cache's. Only the mean counts evictions."""
    mid = median(times)
    mean = sum(times) / len(times)
    return {
        "median_ms": round(1e3 * mid, 2),
        "median_ratio_to_full": round(mid / median(baseline), 3),
        "mean_ms": round(1e3 * mean, 2),
        "mean_ratio_to_full": round(mean / (sum(baseline) / len(baseline)), 3),
    }
