"""Tune a KV policy for a model and a user's prompts."""

from __future__ import annotations

from collections.abc import Sequence

from tqdm import tqdm
from xxhash import xxh3_64

from retain.bench.quality import FULL
from retain.llm import LLM
from retain.processing.examples import Example, load_examples
from retain.tune.bound import Bound, Interval
from retain.tune.candidates import Candidate, make_candidates, mean_bytes
from retain.tune.config import TuneConfig
from retain.tune.journal import Journal
from retain.tune.measure import Measurer, complete_answers
from retain.tune.report import Line, Report
from retain.tune.search import count_measurements, find_smallest

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
