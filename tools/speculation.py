"""Compare drafters with plain decoding, token for token: real prompts, float32, greedy, alone and together.

    python tools/speculation.py --data-dir DIR [--num-prompts 50] [--output-len 32] [--model gemma3]

SmolLM2 with full and sinks caches, and Gemma 3, whose rings are shorter than its texts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from retain.bench.engines import greedy_request
from retain.bench.speculate import load_prompts
from retain.engine import drafters
from retain.engine.engine import Engine
from retain.kv.eviction import policies
from retain.llm import LLM

DRAFTERS = ("ngram", "ngram:k=4,min=1", "draft:model={},k=3", "self:k=3,budget=128")
CASES = (  # model, policy, workload, longest prompt
    ("smollm2", "full", "humaneval", 300),
    ("smollm2", "sinks:budget=100", "humaneval", 300),
    ("gemma3", "full", "books", 700),
)


def generate(
    llm: LLM, drafter_spec: str | None, prompts: list[list[int]], policy: str, output_len: int, batch_size: int
) -> list[list[int]]:
    """Return the output tokens of all prompts, `batch_size` of them together."""
    drafter = drafters.parse(drafter_spec) if drafter_spec else None
    if drafter:
        drafter.attach(llm.target)
    engine, outputs = Engine(llm.engine.runner, llm.cache, drafter, llm.config.prompt_activations), []
    for i in range(0, len(prompts), batch_size):
        batch = [greedy_request(llm.cache, p, policies.parse(policy), output_len) for p in prompts[i : i + batch_size]]
        engine.add(*batch)
        while engine.has_unfinished_requests:
            engine.step()
        outputs += [r.output_tokens for r in batch]
    return outputs


def main() -> int:
    """Print a line for each comparison; return exit code 1 where one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--model", default="", help="only smollm2 or gemma3")
    parser.add_argument("--num-prompts", type=int, default=50)
    parser.add_argument("--output-len", type=int, default=32)
    args, num_different = parser.parse_args(), 0
    for model, policy, workload, max_prompt_len in CASES:
        if args.model not in ("", model):
            continue
        llm = LLM(model, dtype="float32")
        prompts = load_prompts(llm, workload, args.data_dir, args.num_prompts, max_prompt_len)[: args.num_prompts]
        for batch_size in (1, 8):
            plain = generate(llm, None, prompts, policy, args.output_len, batch_size)
            for spec in (d.format(model) for d in DRAFTERS):
                equal = generate(llm, spec, prompts, policy, args.output_len, batch_size) == plain
                num_different += not equal
                result = "same" if equal else "DIFFERENT"
                print(f"{model} {policy} {workload} batch {batch_size} {spec}: {result}", flush=True)
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
