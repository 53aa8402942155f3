"""Print what it costs to go on from an evicted cache: a chat's last turn beside its whole prompt computed anew.

    python -m tools.resume_quality --model smollm2 --data-dir DIR [--policies 'h2o:budget=25%;gate:budget=50%']

Each item is a text in turns: a beginning, then answers and messages of fixed lengths. All tokens are the text's own.
Under a budget every turn is a request, which goes on from what the last one kept; `anew` computes the whole prompt of
the last turn under the same budget. Both are compared with the full cache over the tokens that follow: KL and loss, in
nats a token, with 95 % intervals (bootstrap over items).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from retain import LLM
from retain.bench.tasks import ForcedItem, ItemMetrics, load_records, teacher_force

POLICIES = (
    "sinks:budget=50%;sinks:budget=25%;h2o:budget=50%;h2o:budget=25%;h2o:budget=25%,demote=int4:50%;"
    "h2o:budget=512,prefill=stream;gate:budget=50%;gate:budget=25%"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each policy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--items", type=int, default=12)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--lengths", default="600,40,120,64", help="beginning, answer, message, scored tokens")
    args = parser.parse_args(argv)
    begin, answer, message, scored = map(int, args.lengths.split(","))
    last = begin + (args.turns - 1) * (answer + message)
    specs = args.policies.split(";")
    llm = LLM(args.model, max_model_len=8192, allow_policy=tuple(specs))
    records = load_records(args.data_dir, "paul_graham_essays")
    texts = [llm.encode(r["text"][: 8 * last]) for r in records]
    texts = [text for text in texts if len(text) >= last + scored][: args.items]
    items = [ForcedItem(text[:last], text[last : last + scored]) for text in texts]
    full, log_probs = teacher_force(llm, items, ["full"], None, compares_full=True)
    print(f"{args.model}: {len(items)} texts, {args.turns} turns, {last} tokens; full cache: loss {mean(full, 'loss')}")
    print("policy | KL resumed | KL anew | loss resumed - anew | cached tokens")
    for spec in specs:
        anew, _ = teacher_force(llm, items, [f"{spec},resume=off"], log_probs, compares_full=True)
        resumed, cached = run_turns(llm, items, spec, log_probs, (begin, answer, message))
        losses = [a["loss"] - b["loss"] for a, b in zip(resumed, anew, strict=True)]
        print(f"{spec} | {mean(resumed, 'kl')} | {mean(anew, 'kl')} | {interval(losses)} | {cached}", flush=True)
    return 0


def run_turns(
    llm: LLM, items: Sequence[ForcedItem], spec: str, log_probs: Sequence[Tensor], lengths: tuple[int, int, int]
) -> tuple[list[ItemMetrics], int]:
    """Run the turns of each item under a policy. Returns the last turn's metrics, and the tokens that it reused."""
    begin, answer, message = lengths
    found = []
    cached = 0
    for item, full in zip(items, log_probs, strict=True):
        llm.cache.prefix_cache.tree.clear()  # pages of the whole text, which the full cache left
        ends = range(begin, len(item.prompt), answer + message)
        for end in ends:
            llm.score([item.prompt[:end]], [item.prompt[end : end + answer]], spec)
        before = sum(llm.cache.pool_stats().prefix_hit_tokens.values())
        found += teacher_force(llm, [item], [spec], [full], compares_full=True)[0]
        cached += sum(llm.cache.pool_stats().prefix_hit_tokens.values()) - before
    return found, cached // max(len(items), 1)


def mean(rows: Sequence[ItemMetrics], name: str) -> str:
    """Return the mean of a metric with its interval."""
    return interval([row[name] for row in rows])


def interval(values: Sequence[float]) -> str:
    """Return the mean of values and its 95 % interval, by bootstrap."""
    x = np.array(values)
    means = np.random.default_rng(0).choice(x, (2000, len(x))).mean(-1)
    low, high = np.quantile(means, [0.025, 0.975])
    return f"{x.mean():.4f} [{low:.4f}, {high:.4f}]"


if __name__ == "__main__":
    raise SystemExit(main())
