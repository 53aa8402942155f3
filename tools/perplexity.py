"""Measure perplexity on a text, to compare weights and dtypes.

    python tools/perplexity.py TEXT --model smollm2 [--weights auto] [--dtype bfloat16] [--max-tokens 20000]

The text is cut into chunks of 1024 tokens, each computed alone; the second half of every chunk is scored.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

os.environ.setdefault("OMP_PROC_BIND", "true")  # before torch: threads stay on their cores, as in `retain`
from retain.llm import LLM

CHUNK_TOKENS = 1024


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-tokens", type=int, default=20000)
    args = parser.parse_args()
    llm = LLM(args.model, weights=args.weights, dtype=args.dtype, prefix_cache="off")
    ids = llm.encode(args.text.read_text()[: 8 * args.max_tokens])[: args.max_tokens]
    half, log_probs = CHUNK_TOKENS // 2, list[float]()
    for start in range(0, len(ids) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        middle, end = start + half, start + CHUNK_TOKENS
        log_probs += llm.score([ids[start:middle]], [ids[middle:end]])[0]
    perplexity = math.exp(-sum(log_probs) / len(log_probs))
    print(
        f"{args.model} weights {args.weights} dtype {args.dtype}: "
        f"perplexity {perplexity:.4f} over {len(log_probs)} tokens"
    )


if __name__ == "__main__":
    main()
