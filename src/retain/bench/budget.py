"""`retain bench budget`: what budgets give in speed, and what scoring takes.

Requests of several kinds are in one cache, each kind with an engine of its own; the engines step in turn, so that all
see the same machine, and medians are compared. What is not known here: quality.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from time import perf_counter
from typing import Any

from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kv.eviction import policies
from retain.llm import LLM
from retain.sampling_params import SamplingParams

Line = dict[str, Any]
UNREACHABLE_BUDGET = 10**6  # a budget that is never reached
SCORING_POLICIES = {
    "full": "full",
    "h2o": f"h2o:budget={UNREACHABLE_BUDGET}",
    "keyformer": f"keyformer:budget={UNREACHABLE_BUDGET}",
    "tau=1.5": f"keyformer:budget={UNREACHABLE_BUDGET},tau=1.5",
}


def run(llm: LLM, parts: Sequence[str], as_json: bool) -> None:
    """Print the lines of each part as soon as it is measured."""
    for name in parts:
        for line in PARTS[name](llm):
            text = "  ".join(f"{v}" if k in ("what", "policy") else f"{k} {v}" for k, v in line.items())
            print(json.dumps({"part": name, **line}) if as_json else f"{name:10} {text}", flush=True)


def check_parts(parts: Sequence[str]) -> None:
    """Raises ValueError for a part that there is not."""
    for name in parts:
        if name not in PARTS:
            raise ValueError(f"unknown part {name!r}: choose from {', '.join(PARTS)}")


def measure_scoring(llm: LLM) -> list[Line]:
    """A decode step over 4096 slots, and a prefill of 4096 tokens, with scores and without; nobody forgets."""
    lines, prompt = [], min(4096, llm.max_model_len - 200)
    for batch in (1, 8):
        times = time_side_by_side(llm, list(SCORING_POLICIES.values()), prompt, batch, num_steps=48)
        for name, t in zip(SCORING_POLICIES, times, strict=True):
            lines.append({"what": f"decode, batch {batch}", "policy": name, **_compare_times(t, times[0])})
    times = [[] for _ in SCORING_POLICIES]
    for seed in range(3):
        for each, policy in zip(times, SCORING_POLICIES.values(), strict=True):
            started = perf_counter()
            engine = _make_engine(llm, [_make_request(llm, prompt, policy, seed)])
            _run_until(engine, lambda r: bool(r.first_token_time))
            each.append(perf_counter() - started)
            _cancel_all(engine)
    for name, t in list(zip(SCORING_POLICIES, times, strict=True))[:3]:
        lines.append({"what": "prefill", "policy": name, **_compare_times(t, times[0])})
    return lines


def measure_decode(llm: LLM, prompt_len: int = 7000, batch_size: int = 8) -> list[Line]:
    """A decode step of 8 requests with prompts of 7000 tokens: everything kept, half, a quarter."""
    prompt_len = min(prompt_len, llm.max_model_len - 600)
    names = [f"{p}:budget={b}" for b in ("50%", "25%") for p in ("h2o", "keyformer")]
    times = time_side_by_side(llm, ["full", *names], prompt_len, batch_size, num_steps=160)
    return [
        {"what": f"decode, batch {batch_size}", "policy": name, **_compare_times(t, times[0])}
        for name, t in zip(["full", *names], times, strict=True)
    ]


def measure_throughput(
    llm: LLM, prompt_len: int = 7000, output_len: int = 512, num_requests: int = 32
) -> Iterator[Line]:
    """32 queued requests in memory that holds four full ones: their own tokens a second, all in all and while decoding.

    The pool is as it is: choose it by --kv-memory; how many full requests it holds is printed. `bound` is what
    `times_full` would be if answers cost nothing, only the prompts, one after the other.
    """
    prompt_len = min(prompt_len, llm.max_model_len - output_len)
    full: tuple[float, float] | None = None
    for policy in ("full", "h2o:budget=25%", "h2o:budget=25%,prefill=stream", "keyformer:budget=25%"):
        alone, started = _make_engine(llm, [_make_request(llm, prompt_len, policy, num_requests, 1)]), perf_counter()
        _run_until(alone, lambda r: bool(r.first_token_time))
        prompts = num_requests * (perf_counter() - started)  # seconds
        engine = _make_engine(
            llm, [_make_request(llm, prompt_len, policy, seed, output_len) for seed in range(num_requests)]
        )
        started, paid, prefilling = perf_counter(), 0, 0.0
        requests = list(engine.scheduler.waiting)
        while engine.has_unfinished_requests:
            step = perf_counter()
            owing = any(r.num_computed_tokens < len(r.prompt) for r in engine.scheduler.running)
            engine.step()
            if owing or any(r.num_computed_tokens < len(r.prompt) for r in engine.scheduler.running):
                prefilling += perf_counter() - step
            paid = max(paid, len(engine.scheduler.running))
        total = perf_counter() - started
        rate, apart = num_requests * output_len / total, num_requests * output_len / max(total - prefilling, 1e-9)
        full = full or (rate, apart)  # whose turn is first
        held = llm.cache.total_pages / llm.cache.pages_needed(
            policies.parse("full"), prompt_len + output_len, prompt_len
        )
        yield {
            "what": f"{num_requests} requests",
            "policy": policy,
            "tok_s": round(rate, 1),
            "times_full": round(rate / full[0], 2),
            "bound": round(num_requests * output_len / prompts / full[0], 2),
            "tok_s_but_prefill": round(apart, 1),
            "times_full_but_prefill": round(apart / full[1], 2),
            "at_once": paid,
            "full_ones_held": round(held, 1),
            "preempted": sum(r.num_preemptions for r in requests),
        }


PARTS: dict[str, Callable[[LLM], Iterable[Line]]] = {
    "scoring": measure_scoring,
    "decode": measure_decode,
    "throughput": measure_throughput,
}


def time_side_by_side(
    llm: LLM, policy_specs: Sequence[str], prompt_len: int, batch_size: int, num_steps: int
) -> list[list[float]]:
    """Seconds of each step, for each policy, when all requests of all policies decode; policies in turn."""
    new = min(
        num_steps + 8 + 2 * batch_size * len(policy_specs) * (prompt_len // llm.config.max_batched_tokens + 1),
        llm.max_model_len - prompt_len,
    )
    kinds = [
        [_make_request(llm, prompt_len, policy, seed, new) for seed in range(batch_size)] for policy in policy_specs
    ]
    whole = _make_engine(llm, [r for kind in kinds for r in kind])  # equal prompts are computed once
    _run_until(whole, lambda r: bool(r.first_token_time))
    engines = [_make_engine(llm, []) for _ in kinds]
    for engine, kind in zip(engines, kinds, strict=True):
        engine.scheduler.running = kind
    times: list[list[float]] = [[] for _ in engines]
    for _ in range(num_steps):
        for engine, each in zip(engines, times, strict=True):
            started = perf_counter()
            engine.step()
            each.append(perf_counter() - started)
    assert not any(r.finish_reason for kind in kinds for r in kind), "somebody ended before the last step"
    for engine in engines:
        _cancel_all(engine)
    return times


def _make_request(llm: LLM, prompt_len: int, policy: str, seed: int, output_len: int = 8) -> Request:
    rng, top = random.Random(seed), min(40000, llm.spec.vocab_size)
    params = SamplingParams(temperature=0, ignore_eos=True, seed=seed)
    return Request(
        [rng.randrange(min(100, top - 1), top) for _ in range(prompt_len)], params, policies.parse(policy), output_len
    )


def _make_engine(llm: LLM, requests: Sequence[Request]) -> Engine:
    """One more over the same model and cache."""
    engine = Engine(llm.engine.runner, llm.cache, llm.config.max_batched_tokens)
    engine.add(*requests)
    return engine


def _run_until(engine: Engine, is_done: Callable[[Request], bool]) -> None:
    while engine.scheduler.waiting or not all(is_done(r) for r in engine.scheduler.running):
        engine.step()


def _cancel_all(engine: Engine) -> None:
    for request in [*engine.scheduler.running, *engine.scheduler.waiting]:
        engine.cancel(request)


def _compare_times(times: Sequence[float], baseline: Sequence[float]) -> Line:
    """Median and mean in milliseconds, and what part of the full cache's time they are.

    The mean has in it what forgetting takes, now and then.
    """
    mid, mean = median(times), sum(times) / len(times)
    return {
        "median_ms": round(1e3 * mid, 2),
        "to_full": round(mid / median(baseline), 3),
        "mean_ms": round(1e3 * mean, 2),
        "mean_to_full": round(mean / (sum(baseline) / len(baseline)), 3),
    }
