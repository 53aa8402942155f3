"""Measure what a step with some fresh tokens of one request costs, beside a step with one: the price of verifying.

    python -m tools.verify_speed smollm2 qwen2.5-coder-1.5b.gguf --context-lens 64,1000

The whole step of the engine counts. Numbers of drafts take turns, so that all of them see the same machine. Drafts are
random tokens, which are nearly always rejected: the context hardly grows.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import ClassVar

from retain.bench.engines import cancel_all, greedy_request, plain_token_ids, random_prompts, run_until_first_tokens
from retain.engine.drafters import DrafterNeeds, TargetModel
from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.llm import LLM

ROWS = (1, 2, 3, 4, 5, 6, 8, 12)


class RandomDrafter:
    """Propose random tokens, as many as `num_drafts` says."""

    k = "16"
    max_draft_tokens = 16
    needs: ClassVar[DrafterNeeds] = DrafterNeeds()

    def __init__(self, vocab_size: int):
        self.ids = plain_token_ids(vocab_size)
        self.num_drafts = 0

    def attach(self, target: TargetModel) -> None:
        """Do nothing: there is no model."""

    def propose(self, draft_limits: Sequence[tuple[Request, int]]) -> None:
        """Set the drafts of each request."""
        for request, _ in draft_limits:
            request.set_drafts([random.choice(self.ids) for _ in range(self.num_drafts)])

    def remove_request(self, request: Request) -> None:
        """Do nothing: there is no state."""


def time_steps(llm: LLM, context_len: int, rows: Sequence[int], rounds: int) -> dict[int, float]:
    """Return the median seconds of a step with so many fresh tokens of one request."""
    prompt = random_prompts(llm.spec.vocab_size, context_len, 1, seed=0)[0]
    drafter = RandomDrafter(llm.spec.vocab_size)
    engine = Engine(llm.engine.runner, llm.cache, drafter, llm.config.prompt_activations)
    engine.add(greedy_request(llm.cache, prompt, llm.policy, 2 * (rounds + 1) * len(rows)))
    run_until_first_tokens(engine)
    seconds: dict[int, list[float]] = {n: [] for n in rows}
    for _ in range(rounds):
        for n in rows:
            drafter.num_drafts = n - 1
            begin = perf_counter()
            engine.step()
            seconds[n].append(perf_counter() - begin)
    cancel_all(engine)
    return {n: median(s) for n, s in seconds.items()}


def main() -> None:
    """Print the milliseconds of each number of rows, and how many steps with one row they cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--weights", default="auto", help="auto, bf16, int8 or int4")
    parser.add_argument("--context-lens", default="64,1000")
    parser.add_argument("--rows", default=",".join(str(n) for n in ROWS))
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    rows, context_lens = ([int(n) for n in text.split(",")] for text in (args.rows, args.context_lens))
    if min(*rows, *context_lens, args.rounds) < 1:
        parser.error("numbers of rows, context lengths and rounds are at least 1")
    longest = max(context_lens) + 2 * (args.rounds + 1) * len(rows) + max(rows)
    for model in args.models:
        llm = LLM(model, weights=args.weights, max_model_len=longest, kv_memory="1GiB")
        for context_len in context_lens:
            seconds = time_steps(llm, context_len, rows, args.rounds)
            cells = [f"{n}: {1000 * s:.1f} ms ({s / seconds[rows[0]]:.2f})" for n, s in seconds.items()]
            print(f"{model} {args.weights}, context {context_len}: {', '.join(cells)}", flush=True)
        llm.close()


if __name__ == "__main__":
    main()
