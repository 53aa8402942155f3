"""Measure perplexity on a text, to compare weights, dtypes and activations.

    python tools/perplexity.py TEXT --model smollm2 [--weights auto] [--dtype bfloat16] [--max-tokens 20000]

The text is cut into chunks of 1024 tokens, each a prompt of its own; the second half of every chunk is scored.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

os.environ.setdefault("OMP_PROC_BIND", "true")  # before torch: threads stay on their cores, as in `retain`
from retain.llm import LLM
from retain.processing.input import GenerateRequest
from retain.sampling_params import SamplingParams

CHUNK_TOKENS = 1024


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt-activations", default="int8")
    parser.add_argument("--max-tokens", type=int, default=20000)
    args = parser.parse_args()
    options = {"weights": args.weights, "dtype": args.dtype, "prompt_activations": args.prompt_activations}
    llm = LLM(args.model, prefix_cache="off", **options)
    ids = llm.encode(args.text.read_text()[: 8 * args.max_tokens])[: args.max_tokens]
    log_probs: list[float] = []
    for start in range(0, len(ids) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        log_probs += score_prompt(llm, ids[start : start + CHUNK_TOKENS])[CHUNK_TOKENS // 2 - 1 :]
    perplexity = math.exp(-sum(log_probs) / len(log_probs))
    shown = ", ".join(f"{name} {value}" for name, value in options.items())
    print(f"{args.model}, {shown}: perplexity {perplexity:.4f} over {len(log_probs)} tokens")


def score_prompt(llm: LLM, ids: list[int]) -> list[float]:
    """Return the log-probability of every token of a prompt but the first."""
    params = SamplingParams(max_tokens=1, temperature=0)
    (state,) = llm.input_processor.process(GenerateRequest(ids, params, needs_prompt_logits=True))
    llm.output_processor.add([state])
    while llm.engine.has_unfinished_requests:
        llm.output_processor.process(llm.engine.step())
    return [p.logprob for p in state.prompt_logprobs]


if __name__ == "__main__":
    main()
