"""Time the loading of a GGUF file that lies in the page cache.

    python tools/load_time.py qwen2.5-coder-1.5b.gguf

Prints JSON: seconds to pack the weights, seconds until a model answers, and the process's peak memory. Each round first
writes to as much memory as the model takes, because virtual machines get memory from their host at the first touch.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from retain import LLM, factory, kernels


def main() -> None:
    """Load the file as often as asked, and print medians and the fastest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--weights", default="auto")
    args = parser.parse_args()
    size, backend = args.file.stat().st_size, kernels.load("cpu")
    start_mib = peak_mib()
    pack_s, load_s, packed = [], [], 0
    for _ in range(args.rounds):
        touch_memory(size)
        started = perf_counter()
        packed = factory.load_model(args.file, backend, torch.bfloat16, args.weights).weight_bytes
        pack_s.append(perf_counter() - started)
        touch_memory(size)
        llm = LLM(str(args.file), weights=args.weights, kv_memory="256MiB")
        load_s.append(llm.load_s)
        llm.close()
        del llm
    row = {
        "file_mib": size >> 20,
        "packed_mib": packed >> 20,
        "weights_s": round(median(pack_s), 3),
        "weights_s_min": round(min(pack_s), 3),
        "llm_s": round(median(load_s), 3),
        "llm_s_min": round(min(load_s), 3),
        "start_mib": start_mib,
        "peak_mib": peak_mib(),
    }
    print(json.dumps(row))


def touch_memory(size: int) -> None:
    """Free the models of earlier rounds, write to `size` bytes of memory and free them."""
    gc.collect()
    torch.ones(size, dtype=torch.uint8)


def peak_mib() -> int:
    """Return the largest memory of the process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


if __name__ == "__main__":
    main()
