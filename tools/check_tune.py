"""Check that what `retain tune` chooses on some prompts holds its bound on others.

python -m tools.check_tune --model smollm2 --data FILE --within kl=0.02 --within kl=0.05 --journal J.jsonl

Every candidate is measured on every prompt, once. Then prompts are split at random, many times: tune chooses on one
part, and the mean over the other part is compared with the bound. A refusal counts as holding.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from retain import LLM
from retain.bench.quality import FULL
from retain.processing.examples import load_examples
from retain.tune.bound import Bound, Interval, parse_bound
from retain.tune.config import TuneConfig
from retain.tune.measure import Journal, Measurer, complete_answers
from retain.tune.tuner import Candidate, find_smallest, make_candidates


def choose(
    measurer: Measurer, candidates: Sequence[Candidate], bound: Bound, items: Sequence[int]
) -> tuple[Candidate | None, int]:
    """Return what tune chooses on these prompts, and how many measurements it takes."""
    pairs: set[tuple[str, int]] = set()
    metrics = measurer.journal.metrics

    def measure(active: Sequence[Candidate], n: int) -> None:
        pairs.update((c.spec, i) for c in active for i in items[:n])

    def estimate(candidate: Candidate, n: int) -> Interval:
        first = items[:n]
        return bound.interval([metrics[candidate.spec][i] for i in first], [metrics[FULL][i] for i in first])

    return find_smallest(candidates, len(items), bound.limit, measure, estimate), len(pairs)


def main() -> None:
    """Measure, split and print a line for each bound."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("--model", "--data", "--journal", "--dtype"):
        parser.add_argument(name, default="bfloat16" if name == "--dtype" else None)
    parser.add_argument("--within", action="append", default=[])
    parser.add_argument("--policies", default="gate h2o reread:share=all,value=norm")
    parser.add_argument("--num-items", type=int, default=80)
    parser.add_argument("--num-chosen-on", type=int, default=32)
    parser.add_argument("--max-prompt-len", type=int, default=500)
    parser.add_argument("--num-splits", type=int, default=40)
    a = parser.parse_args()
    config = TuneConfig(Path(a.data), a.within[0], tuple(a.policies.split()), num_items=a.num_items)
    llm = LLM(a.model, prefix_cache="off", dtype=a.dtype)
    journal = Journal(Path(a.journal) if a.journal else None, {"model": a.model, "max_prompt_len": a.max_prompt_len})
    found = list(load_examples(llm.tokenizer, config.data, 0, a.num_items, a.max_prompt_len))
    examples = complete_answers(llm, found, journal, config.output_len)
    candidates = make_candidates(llm, config, examples)
    with tqdm(total=len(candidates) * len(examples), desc="measuring") as progress:
        measurer = Measurer(llm, examples, journal, "kl", progress.update)
        for n in range(1, len(examples) + 1):
            measurer.measure([c.spec for c in candidates], n)
    for text in a.within:
        bound, rng = parse_bound(text), random.Random(0)
        held, chosen, costs = [], [], []
        for _ in range(a.num_splits):
            items = rng.sample(range(len(examples)), len(examples))
            best, cost = choose(measurer, candidates, bound, items[: a.num_chosen_on])
            rest = items[a.num_chosen_on :]
            full = [journal.metrics[FULL][i] for i in rest]
            others = best and bound.interval([journal.metrics[best.spec][i] for i in rest], full).mean
            held.append(others is None or others <= bound.limit)
            chosen.append(best.spec if best else "none")
            costs.append(cost)
        names = ", ".join(f"{name} {chosen.count(name)}" for name in dict.fromkeys(sorted(chosen)))
        share, cost = np.mean(held), np.mean(costs)
        print(f"{text}: holds on the other {len(rest)} prompts in {share:.0%} of {len(held)} splits;", end=" ")
        print(f"{cost:.0f} measurements instead of {len(candidates) * a.num_chosen_on}; chosen: {names}")


if __name__ == "__main__":
    main()
