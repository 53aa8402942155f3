"""Replay a trace of request lengths through scheduler and cache, without a model, and count slots that hold no token.

    python tools/waste.py TRACE.jsonl [--model smollm2|gemma3] [--requests N] [--max-model-len N] [--page-size S]

A record has input_length and output_length; lengths are scaled so that the longest request has `--max-model-len`
tokens. Requests queue in the order of the trace and 64 run together. Counted after every step, over all heads of all
layers: slots that running requests own, those of them that hold a token, and those that hold a token which a later
query can still see.
"""

from __future__ import annotations

import argparse
import json
from time import perf_counter

import numpy as np
import torch

from retain import factory, kernels
from retain.bench.engines import greedy_request
from retain.engine.engine import Engine
from retain.kernels.api import Batch
from retain.kernels.slots.kv_cache_spec import KVCacheSpec, uniform_layers
from retain.kv.capacity import CacheConfig
from retain.kv.eviction import policies

KV_SPECS = {  # kv heads, head dim and windows of the embedded models
    "smollm2": KVCacheSpec(uniform_layers(3, 64, (None,) * 30)),
    "gemma3": KVCacheSpec(uniform_layers(1, 256, [512 if (i + 1) % 6 else None for i in range(18)])),
}
POOL_BYTES = 2**36


class NullRunner:
    """A runner that computes nothing."""

    hidden_states = None
    state_size = 0

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return logits of zero."""
        return torch.zeros(len(batch.logits_indices), 2)


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("--model", choices=KV_SPECS, default="smollm2")
    parser.add_argument("--requests", type=int, default=10**9)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--page-size", type=int, default=64)
    args = parser.parse_args()
    S, limit = args.page_size, args.max_model_len
    with open(args.trace, encoding="utf-8") as lines:
        lengths = [(r["input_length"], r["output_length"]) for r in map(json.loads, lines)]
    scale = limit / max(map(sum, lengths))
    config = CacheConfig(S, max_running_requests=64, max_model_len=limit, max_batched_tokens=512)
    cache = factory.build_cache(KV_SPECS[args.model], config, kernels.load("cpu"), torch.bfloat16, POOL_BYTES)
    tables, engine = cache.tables, Engine(NullRunner(), cache)
    for input_length, output_length in lengths[: args.requests]:
        output_len = max(1, int(output_length * scale))
        prompt_len = min(max(1, int(input_length * scale)), limit - output_len)
        engine.add(greedy_request(cache, [0] * prompt_len, policies.parse("full"), output_len))
    owned = holding = visible = num_steps = 0
    started = perf_counter()
    while engine.has_unfinished_requests:
        engine.step()
        num_steps += 1
        for r, row in engine.scheduler.running.items():
            slots = tables.counts[row.index].astype(np.int64) * S  # [L, G]
            owned += int(slots.sum())
            holding += int(np.minimum(slots, r.num_computed_tokens - tables.ring_base[row.index][:, None]).sum())
            in_window = np.minimum(r.num_computed_tokens, tables.window[row.index][:, None])
            visible += int(np.minimum(slots, in_window).sum())
    cache.check()
    assert cache.free_pages == cache.total_pages
    print(
        f"{args.model}, pages of {S}: {len(lengths[: args.requests])} requests, {num_steps} steps, "
        f"{perf_counter() - started:.0f} s; owned slots that hold no token {100 * (1 - holding / owned):.2f} %, "
        f"that hold none a query can still see {100 * (1 - visible / owned):.2f} %; "
        f"peak {cache.pool.peak_used * cache.page_bytes / 2**30:.2f} GiB"
    )


if __name__ == "__main__":
    main()
