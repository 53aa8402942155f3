"""Time decode attention alone: the cpu backend on SmolLM2's shape, 30 layers, one request, 4096 slots, bfloat16.

    python tools/attention.py

The time includes Python's share of the calls. The cache manager places the pages, as for a prompt computed 512 tokens
a step.
"""

from __future__ import annotations

import os
from statistics import median
from time import perf_counter

os.environ.setdefault("OMP_PROC_BIND", "true")  # before torch: threads stay on their cores, as in `retain`
import numpy as np
import torch

from retain import factory, kernels
from retain.kernels.attention_params import AttentionParams
from retain.kernels.slots.kv_cache_spec import KVCacheSpec, uniform_layers
from retain.kv.capacity import CacheConfig
from retain.kv.eviction import policies

SLOTS, CHUNK, LAYERS = 4096, 512, 30


def measure_step_ms(page_size: int, num_steps: int = 300) -> tuple[float, float]:
    """Return the median and the best time of a decode step, in milliseconds."""
    cpu = kernels.load("cpu")
    spec = KVCacheSpec(uniform_layers(3, 64, (None,) * LAYERS))
    config = CacheConfig(page_size, max_running_requests=1, max_model_len=8192, max_batched_tokens=CHUNK)
    cache = factory.build_cache(spec, config, cpu, torch.bfloat16, 2**30)
    row = cache.open(policies.parse("full"), SLOTS)
    for start in range(0, SLOTS, CHUNK):
        row.reserve(start + CHUNK)
        places = np.arange(start, start + CHUNK, dtype=np.int32)
        for slots in cache.slot_mapping(np.full(CHUNK, row.index, np.int32), places)[0]:
            k, v = torch.randn(2, CHUNK, 3, 64).bfloat16()
            cpu.write(cache.kv, slots, k, v, torch.from_numpy(places))
    rows, starts = torch.tensor([row.index], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    (tables,) = cache.build_tables(rows, starts)
    layers = [tables.for_layer(layer) for layer in range(LAYERS)]
    q, q_pos = torch.randn(1, 9, 64).bfloat16(), torch.tensor([SLOTS - 1], dtype=torch.int32)
    times = []
    for _ in range(num_steps):
        started = perf_counter()
        for layer in layers:
            cpu.attend(q, cache.kv, layer, q_pos, AttentionParams(0.125))
        times.append(1e3 * (perf_counter() - started))
    return median(times), min(times)


if __name__ == "__main__":
    for size in (64, 32, 64, 32):
        print("pages of {}: median {:.2f} ms, best {:.2f} ms".format(size, *measure_step_ms(size)))
