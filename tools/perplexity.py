"""Perplexity on a text: what weights and dtype cost in quality.

    .venv/bin/python tools/perplexity.py TEXT --model smollm2 [--weights auto] [--dtype bfloat16] [--tokens 20000]

The text is cut into pieces of 1024 tokens, each computed alone; the second half of every piece is scored.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

os.environ.setdefault("OMP_PROC_BIND", "true")
import numpy as np
import torch

from retain.engine.batch import Batch
from retain.llm import LLM

CHUNK_TOKENS = 1024


def token_losses(llm: LLM, ids: list[int]) -> torch.Tensor:
    """Nats of each token of the second half of a piece, [PIECE / 2]."""
    cache, n = llm.cache, llm.config.max_batched_tokens
    row = cache.open(llm.policy, len(ids))
    found = []
    for start in range(0, len(ids) - 1, n):
        part = ids[start : min(start + n, len(ids) - 1)]
        assert cache.reserve(row, start + len(part))
        pos = np.arange(start, start + len(part), dtype=np.int32)
        slots = torch.from_numpy(cache.compute_slot_mapping(np.full(len(part), row, np.int32), pos))
        rows, starts = torch.tensor([row], dtype=torch.int32), torch.tensor([0, len(part)], dtype=torch.int32)
        scored = torch.arange(max(0, CHUNK_TOKENS // 2 - 1 - start), len(part))
        batch = Batch(torch.tensor(part), torch.from_numpy(pos), rows, starts, slots, scored)
        if len(scored):
            logits = llm.engine.runner.forward(batch)
            wanted = torch.tensor(ids)[start + scored + 1]
            found.append(torch.nn.functional.cross_entropy(logits, wanted, reduction="none").clone())
        else:
            llm.engine.runner.forward(batch)
    cache.close(row)
    return torch.cat(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=20000)
    a = parser.parse_args()
    llm = LLM(a.model, weights=a.weights, dtype=a.dtype)
    ids = llm.encode(a.text.read_text()[: 8 * a.tokens])[: a.tokens]
    pieces = [ids[i : i + CHUNK_TOKENS] for i in range(0, len(ids) - CHUNK_TOKENS + 1, CHUNK_TOKENS)]
    nats = torch.cat([token_losses(llm, piece) for piece in pieces])
    print(
        f"{a.model} weights {a.weights} dtype {a.dtype}: perplexity {math.exp(nats.mean()):.4f} over {len(nats)} tokens"
    )
