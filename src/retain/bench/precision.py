"""`retain bench precision`: speed and memory of a cache with K and V in several dtypes.

One engine for each dtype and policy, all with the same weights. They take turns, so that all of them see the same
machine, and medians are compared with the first one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import mean, median
from time import perf_counter
from typing import Any

from retain.bench.budget import time_prefills
from retain.bench.config import PrecisionBenchConfig
from retain.bench.engines import (
    cancel_all,
    greedy_request,
    make_engine,
    random_prompts,
    run_queued,
    run_until_first_tokens,
)
from retain.bench.quality import possible_policies
from retain.llm import LLM


@dataclass(frozen=True)
class Variant:
    """The dtype of K and V and the policy of one engine that is measured."""

    kv_dtype: str
    policy: str


Line = dict[str, Any]
Load = Callable[[Variant, int | None], LLM]  # an engine with this cache, and a pool of so many bytes if given


def list_variants(options: PrecisionBenchConfig) -> list[Variant]:
    """Return each dtype with each policy that it can have; the others are compared with the first."""
    return [Variant(d, p) for d in options.kv_dtypes for p in possible_policies(options.policies, d)]


def measure_prefill(load: Load, options: PrecisionBenchConfig) -> Iterator[Line]:
    """Time prompts of 1000 tokens up to their first token."""
    llms = {variant: load(variant, None) for variant in list_variants(options)}
    prompt_len = min(1000, *(llm.max_model_len - 8 for llm in llms.values()))
    times: dict[Variant, list[float]] = {variant: [] for variant in llms}
    for _ in range(options.num_repeats):
        for variant, llm in llms.items():
            times[variant] += time_prefills(llm, [variant.policy], prompt_len, num_repeats=1)[0]
    yield from _compare(f"prefill, {prompt_len} tokens", times)


def measure_decode(load: Load, options: PrecisionBenchConfig) -> Iterator[Line]:
    """Time decode steps of a batch of different prompts: pages that requests share would be read once, from a cache."""
    llms = {variant: load(variant, None) for variant in list_variants(options)}
    num_steps = 8 * options.num_repeats
    engines = {}
    prompt_len = min(options.prompt_len, *(llm.max_model_len - num_steps - 64 for llm in llms.values()))
    for variant, llm in llms.items():
        prompts = random_prompts(llm.spec.vocab_size, prompt_len, options.batch_size, seed=0)
        requests = [greedy_request(llm.cache, prompt, llm.policy, num_steps + 64) for prompt in prompts]
        engines[variant] = make_engine(llm, requests)
        run_until_first_tokens(engines[variant])
    times: dict[Variant, list[float]] = {variant: [] for variant in llms}
    for _ in range(num_steps):
        for variant, engine in engines.items():
            started = perf_counter()
            engine.step()
            times[variant].append(perf_counter() - started)
    for engine in engines.values():
        cancel_all(engine)
    yield from _compare(f"decode, batch {options.batch_size} of {prompt_len} tokens", times)


def measure_requests(load: Load, options: PrecisionBenchConfig) -> Iterator[Line]:
    """Run 40 requests of 512 + 128 tokens under the bytes that 8 of them take in the first dtype.

    `expected_ratio` is the ratio of the bytes of a slot: how many times as many requests that keep every token in this
    dtype should run at once.
    """
    prompt_len = 512
    output_len = 128
    num_requests = 40
    variants = list_variants(options)
    first = load(variants[0], None)
    memory = (8 * _pages(first, prompt_len, output_len) + 1) * first.cache.page_bytes  # 1 is the trash page
    first_fit = first_slot_bytes = first_tok_s = 0.0
    for variant in variants:
        llm = load(variant, memory)
        prompts = random_prompts(llm.spec.vocab_size, prompt_len, num_requests, seed=1)
        requests = [greedy_request(llm.cache, prompt, llm.policy, output_len) for prompt in prompts]
        run = run_queued(make_engine(llm, requests))
        tok_s = num_requests * output_len / run.seconds
        fit = llm.cache.total_pages / _pages(llm, prompt_len, output_len)
        slot_bytes = llm.cache.page_bytes / llm.cache.page_size
        first_fit = first_fit or fit
        first_slot_bytes = first_slot_bytes or slot_bytes
        first_tok_s = first_tok_s or tok_s
        yield {
            "measurement": f"{num_requests} requests",
            "kv_dtype": variant.kv_dtype,
            "policy": variant.policy,
            "slot_bytes": round(slot_bytes, 1),
            "requests_fit": round(fit, 2),
            "ratio": round(fit / first_fit, 3),
            "expected_ratio": round(first_slot_bytes / slot_bytes, 3),
            "max_running": run.max_running,
            "num_preemptions": sum(r.stats.num_preemptions for r in requests),
            "tok_s": round(tok_s, 1),
            "speedup": round(tok_s / first_tok_s, 2),
            "decode_tok_s": round(run.decode_tok_s, 1),
        }


MEASUREMENTS: dict[str, Callable[[Load, PrecisionBenchConfig], Iterator[Line]]] = {
    "prefill": measure_prefill,
    "decode": measure_decode,
    "requests": measure_requests,
}


def _pages(llm: LLM, prompt_len: int, output_len: int) -> int:
    policy = llm.cache.plan_policy(llm.policy, prompt_len)
    return llm.cache.pages_needed(policy, prompt_len + output_len, prompt_len)


def _compare(measurement: str, times: dict[Variant, list[float]]) -> Iterator[Line]:
    first = median(next(iter(times.values())))
    for variant, t in times.items():
        yield {
            "measurement": measurement,
            "kv_dtype": variant.kv_dtype,
            "policy": variant.policy,
            "median_ms": round(1e3 * median(t), 2),
            "mean_ms": round(1e3 * mean(t), 2),
            "time_ratio": round(median(t) / first, 3),
            "speedup": round(first / median(t), 2),
        }
