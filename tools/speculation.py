"""Every drafter says what plain decoding says, token for token: real prompts, float32, greedy, alone and together.

    python tools/speculation.py --data DIR [--items 50] [--new 32] [--only gemma3]

For SmolLM2 with full and sinks caches, and for Gemma 3, whose rings are shorter than its texts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from retain.bench.speculate import load_prompts
from retain.engine import drafters
from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kv.eviction import policies
from retain.llm import LLM
from retain.sampling_params import SamplingParams

DRAFTERS = ("ngram", "ngram:k=4,min=1", "draft:model={},k=3", "self:k=3,budget=128")
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def generate_answers(
    llm: LLM, drafter_spec: str | None, texts: list[list[int]], policy: str, output_len: int, batch_size: int
) -> list[list[int]]:
    """Of all texts, so many at once."""
    drafter = drafters.parse(drafter_spec) if drafter_spec else None
    if drafter:
        drafter.attach(llm.target)
    engine, found = Engine(llm.engine.runner, llm.cache, llm.config.max_batched_tokens, drafter), []
    for i in range(0, len(texts), batch_size):
        made = [Request(t, GREEDY, policies.parse(policy), output_len) for t in texts[i : i + batch_size]]
        engine.add(*made)
        while engine.has_unfinished_requests:
            engine.step()
        found += [r.output_tokens for r in made]
    return found


def main() -> int:
    """Prints a line for each comparison; 1 where one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", default="", help="smollm2 or gemma3")
    parser.add_argument("--items", type=int, default=50)
    parser.add_argument("--new", type=int, default=32)
    args, bad = parser.parse_args(), 0
    for model, policy, workload, context in (
        ("smollm2", "full", "humaneval", 300),
        ("smollm2", "sinks:budget=100", "humaneval", 300),
        ("gemma3", "full", "books", 700),
    ):
        if args.only not in ("", model):
            continue
        llm = LLM(model, dtype="float32")
        texts = load_prompts(llm, workload, args.data, args.items, context)[: args.items]
        for batch in (1, 8):
            plain = generate_answers(llm, None, texts, policy, args.new, batch)
            for name in DRAFTERS:
                named = name.format(model)
                same = generate_answers(llm, named, texts, policy, args.new, batch) == plain
                bad += not same
                said = "same" if same else "DIFFERENT"
                print(f"{model} {policy} {workload} batch {batch} {named}: {said}", flush=True)
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
