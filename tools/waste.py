"""Replay a trace of request lengths through scheduler and cache, without a model: how many owned slots hold no token?

    .venv/bin/python tools/waste.py TRACE.jsonl [--model smollm2|gemma3] [--requests N] [--page-size S]

A record has input_length and output_length; lengths are scaled so that the longest request has `--longest` tokens.
Requests queue in the order of the trace and 64 run at once. Counted after every step, over all heads of all layers:
slots that running requests own, those of them that hold a token, and those that hold a token which some later query
still sees.
"""

from __future__ import annotations

import argparse
import json
from time import perf_counter

import numpy as np
import torch

from retain import kernels
from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kv.capacity import KVCacheSpec
from retain.kv.eviction import policies
from retain.kv.memory.cache import Cache
from retain.sampling_params import SamplingParams

KV_SPECS = {  # layers, kv heads and head dim of the embedded models; windows as in their files
    "smollm2": KVCacheSpec(3, 64, (None,) * 30),
    "gemma3": KVCacheSpec(1, 256, tuple(512 if (i + 1) % 6 else None for i in range(18))),
}


class NullRunner:
    """A runner that computes nothing."""

    def forward(self, batch):
        """Logits of zero."""
        return torch.zeros(len(batch.last), 2)


def main() -> None:
    """Print one line."""
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("trace")
    args.add_argument("--model", choices=KV_SPECS, default="smollm2")
    args.add_argument("--requests", type=int, default=10**9)
    args.add_argument("--longest", type=int, default=8192)
    args.add_argument("--page-size", type=int, default=64)
    a = args.parse_args()
    with open(a.trace, encoding="utf-8") as lines:
        pairs = [(r["input_length"], r["output_length"]) for r in map(json.loads, lines)]
    scale = a.longest / max(map(sum, pairs))
    cache = Cache(
        KV_SPECS[a.model],
        kernels.load("cpu"),
        torch.bfloat16,
        2**36,
        a.page_size,
        max_running_requests=64,
        max_model_len=a.longest,
        max_batched_tokens=512,
    )
    engine = Engine(NullRunner(), cache, 512)  # type: ignore[arg-type]
    params, policy = SamplingParams(temperature=0), policies.parse("full")
    for prompt, new in pairs[: a.requests]:
        new = max(1, int(new * scale))
        engine.add(Request([0] * min(max(1, int(prompt * scale)), a.longest - new), params, policy, new))
    owned = holding = alive = steps = 0
    started = perf_counter()
    while engine.has_unfinished_requests:
        engine.step()
        steps += 1
        for r in engine.scheduler.running:
            slots = cache.counts[r.row].astype(np.int64) * a.page_size  # [L, G]
            owned += int(slots.sum())
            holding += int(np.minimum(slots, r.num_computed_tokens - cache.ring_base[r.row][:, None]).sum())
            alive += int(np.minimum(slots, np.minimum(r.num_computed_tokens, cache.window[r.row][:, None])).sum())
    cache.check()
    assert cache.free_pages == cache.total_pages
    print(
        f"{a.model}, pages of {a.page_size}: {len(pairs[: a.requests])} requests, {steps} steps, "
        f"{perf_counter() - started:.0f} s; "
        f"slots owned and not holding a token {100 * (1 - holding / owned):.2f} %, holding none that can still be seen "
        f"{100 * (1 - alive / owned):.2f} %; peak {cache.pool.peak_used * cache.page_bytes / 2**30:.2f} GiB"
    )


if __name__ == "__main__":
    main()
