"""Decode attention alone: the cpu backend on SmolLM2's shape, 30 layers, one request, 4096 slots, bf16.

    .venv/bin/python tools/attention.py

Python's share of the calls is counted. Pages lie where pool and cache put them for a prompt paid 512 tokens at a time.
"""

from __future__ import annotations

import os
from time import perf_counter

os.environ.setdefault("OMP_PROC_BIND", "true")
import numpy as np
import torch

from retain import kernels
from retain.kv.capacity import KVCacheSpec
from retain.kv.eviction import policies
from retain.kv.memory.cache import Cache

SLOTS, CHUNK = 4096, 512


def measure_step_ms(page_size: int) -> tuple[float, float]:
    """Median and best of 300 steps, in milliseconds."""
    cpu = kernels.load("cpu")
    cache = Cache(KVCacheSpec(3, 64, (None,) * 30), cpu, torch.bfloat16, 2**30, page_size, 1, 8192, CHUNK)
    row = cache.open(policies.parse("full"), SLOTS)
    for start in range(0, SLOTS, CHUNK):
        cache.reserve(row, start + CHUNK)
        pos = np.arange(start, start + CHUNK, dtype=np.int32)
        for slots in cache.compute_slot_mapping(np.full(CHUNK, row, np.int32), pos):
            k, v = torch.randn(2, CHUNK, 3, 64).bfloat16()
            cpu.write(cache.kv, torch.from_numpy(slots), k, v, torch.from_numpy(pos))
    rows, starts = torch.tensor([row], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    tables = [cache.tables(rows, starts).of(layer) for layer in range(30)]
    q, q_pos = torch.randn(1, 9, 64).bfloat16(), torch.tensor([SLOTS - 1], dtype=torch.int32)
    times = []
    for _ in range(300):
        started = perf_counter()
        for t in tables:
            cpu.attend(q, cache.kv, t, q_pos, 0.125)
        times.append(1e3 * (perf_counter() - started))
    return sorted(times)[150], min(times)


if __name__ == "__main__":
    for size in (64, 32, 64, 32):
        print("pages of {}: median {:.2f} ms, best {:.2f} ms".format(size, *measure_step_ms(size)))
