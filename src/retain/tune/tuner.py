"""Tune a KV policy for a model and a user's prompts.

The candidate with the least memory that holds the bound is found by successive halving (Jamieson, Talwalkar, 2016).
Every round measures the candidates that are left on twice as many prompts, and drops half of them. A candidate that
was dropped comes back at the end where none that was kept holds the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tqdm import tqdm
from xxhash import xxh3_64

from retain.bench.quality import FULL, choose_policies, expand_policies
from retain.kv.eviction import policies
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.manager import KVCacheManager
from retain.llm import LLM
from retain.processing.examples import Example, load_examples
from retain.tune.bound import Bound, Interval
from retain.tune.config import TuneConfig
from retain.tune.measure import Journal, Measurer, complete_answers
from retain.tune.report import Candidate, Line, Report

MIN_ITEMS = 4


def tune(llm: LLM, config: TuneConfig, bound: Bound) -> Report:
    """Search the policy with the least memory that holds the bound. Raises ValueError or OSError."""
    room = min(config.max_prompt_len, llm.max_model_len - max(config.output_len, 128))
    examples = list(load_examples(llm.tokenizer, config.data, config.first, config.num_items, room))
    journal = Journal(config.journal, _subject(llm, config, examples))
    examples = complete_answers(llm, examples, journal, config.output_len)
    if len(examples) < MIN_ITEMS:
        raise ValueError(f"{config.data}: {len(examples)} prompts of at most {room} tokens, {MIN_ITEMS} are needed")
    candidates = make_candidates(llm, config, examples)
    if not candidates:
        raise ValueError("no policy needs less memory than the full cache on these prompts: they are too short")
    with tqdm(total=count_measurements(len(candidates), len(examples)), desc="tuning", unit="measurement") as progress:
        measurer = Measurer(llm, examples, journal, bound.metric, progress.update)
        best = find_best(measurer, candidates, bound)
    return make_report(measurer, candidates, bound, best, mean_bytes(llm.cache, FULL, examples))


def find_best(measurer: Measurer, candidates: Sequence[Candidate], bound: Bound) -> Candidate | None:
    """Return the candidate with the least memory that holds the bound on all examples, or None."""

    def measure(active: Sequence[Candidate], num_items: int) -> None:
        measurer.measure([c.spec for c in active], num_items)

    def estimate(candidate: Candidate, num_items: int) -> Interval:
        return bound.interval(measurer.rows(candidate.spec, num_items), measurer.rows(FULL, num_items))

    return find_smallest(candidates, len(measurer.examples), bound.limit, measure, estimate)


def make_report(
    measurer: Measurer, candidates: Sequence[Candidate], bound: Bound, best: Candidate | None, full_bytes: float
) -> Report:
    """Return what is known of every candidate."""
    lines = []
    total = len(measurer.examples)
    for candidate in candidates:
        n = measurer.num_measured(candidate.spec)
        excess = bound.interval(measurer.rows(candidate.spec, n), measurer.rows(FULL, n))
        holds = n == total and excess.high <= bound.limit
        share = candidate.kv_bytes / full_bytes
        lines.append(Line(candidate.spec, candidate.kv_bytes, share, excess, n, holds))
    return Report(bound, best, total, lines)


def _subject(llm: LLM, config: TuneConfig, examples: Sequence[Example]) -> dict[str, str | int]:
    ids = xxh3_64(repr([(e.prompt, e.answer) for e in examples]).encode()).hexdigest()
    c = llm.config
    return {"model": c.model, "dtype": c.dtype, "weights": c.weights, "prompts": ids, "output_len": config.output_len}


FIRST_ROUND = 4  # prompts

Measure = Callable[[Sequence[Candidate], int], None]  # on so many of the first prompts
Estimate = Callable[[Candidate, int], Interval]  # of the excess over so many of the first prompts


def find_smallest(
    candidates: Sequence[Candidate], num_items: int, limit: float, measure: Measure, estimate: Estimate
) -> Candidate | None:
    """Return the candidate with the least memory whose whole interval holds the limit, or None.

    `candidates` ascend by memory. The winner is measured on all items.
    """
    active = list(candidates)
    n = min(FIRST_ROUND, num_items)
    num_measured: dict[Candidate, int] = {}
    while True:
        measure(active, n)
        num_measured |= dict.fromkeys(active, n)
        if n == num_items:
            break
        active = halve(active, limit, lambda c, n=n: estimate(c, n).mean)  # type: ignore[misc]
        n = min(2 * n, num_items)
    for candidate in candidates:
        n = num_measured[candidate]
        if n < num_items and estimate(candidate, n).mean <= limit:
            measure([candidate], num_items)
            num_measured[candidate] = n = num_items
        if n == num_items and estimate(candidate, n).high <= limit:
            return candidate
    return None


def halve(candidates: Sequence[Candidate], limit: float, mean: Callable[[Candidate], float]) -> list[Candidate]:
    """Return half of the candidates: those that seem to hold by memory, then the others by how nearly they hold."""
    rank = {c: (0.0, c.kv_bytes) if mean(c) <= limit else (mean(c), c.kv_bytes) for c in candidates}
    kept = sorted(candidates, key=lambda c: rank[c])[: -(-len(candidates) // 2)]
    return sorted(kept, key=lambda c: c.kv_bytes)


def count_measurements(num_candidates: int, num_items: int) -> int:
    """Return about how many pairs of candidate and prompt a search measures."""
    n = min(FIRST_ROUND, num_items)
    done = 0
    total = 0
    while True:
        total += num_candidates * (n - done)
        if n == num_items:
            return total
        num_candidates = -(-num_candidates // 2)
        done = n
        n = min(2 * n, num_items)


def make_candidates(llm: LLM, config: TuneConfig, examples: Sequence[Example]) -> list[Candidate]:
    """Return the policies at their budgets that need less memory than the full cache, the least memory first.

    A policy `gate` without options is left out where no gate is fitted for the model. Raises ValueError.
    """
    names = list(config.policies)
    if "gate" in names and not llm.cache.planner.has_gate:
        names.remove("gate")
    specs = choose_policies(llm, expand_policies(names, config.budgets))
    found = [Candidate(spec, mean_bytes(llm.cache, spec, examples)) for spec in specs]
    full = mean_bytes(llm.cache, FULL, examples)
    return sorted((c for c in found if c.kv_bytes < full), key=lambda c: c.kv_bytes)


def mean_bytes(cache: KVCacheManager, spec: str, examples: Sequence[Example]) -> float:
    """Return the mean bytes of KV cache of a request with such a prompt, at the end of its answer."""
    parsed = policies.parse(spec)
    return sum(_request_bytes(cache, parsed, len(e.prompt), len(e.answer)) for e in examples) / len(examples)


def _request_bytes(cache: KVCacheManager, policy: EvictionPolicy, prompt_len: int, answer_len: int) -> int:
    policy = cache.plan_policy(policy, prompt_len)
    length = prompt_len + answer_len
    held = min(length, policy.plan.decode_slots)
    return cache.planner.pages_held(policy, held, length) * cache.page_bytes
