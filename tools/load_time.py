"""Time the start of a model whose file lies in the page cache.

    python tools/load_time.py qwen2.5-coder-1.5b.gguf
    python tools/load_time.py smollm2

Prints JSON: seconds to import torch and all of the package, to pack the weights, until `LLM()` returns, and to the
first token after that; gigabytes of the file a second; and the process's peak memory. Each round first writes to as
much memory as the model takes, because virtual machines get memory from their host at the first touch.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
from statistics import median
from time import perf_counter

import torch

from retain import LLM, SamplingParams, kernels, model_loader
from retain.formats.checkpoint import list_model_files
from retain.models.resolve import resolve_model

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0)
TIMED = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"


def main() -> None:
    """Load the model as often as asked, and print medians and the fastest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as for `retain run --model`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--weights", default="auto")
    args = parser.parse_args()
    path = resolve_model(args.model)
    size = sum(file.stat().st_size for file in list_model_files(path))
    backend = kernels.load("cpu")
    start_mib = peak_mib()
    pack_s, load_s, token_s, packed = [], [], [], 0
    for _ in range(args.rounds):
        touch_memory(size)
        started = perf_counter()
        packed = model_loader.load_model(path, backend, torch.bfloat16, args.weights).runner.program.weight_bytes
        pack_s.append(perf_counter() - started)
        touch_memory(size)
        llm = LLM(str(path), weights=args.weights, kv_memory="256MiB")
        load_s.append(llm.load_s)
        started = perf_counter()
        llm.generate("Hello", ONE_TOKEN)
        token_s.append(perf_counter() - started)
        llm.close()
        del llm
    row = {
        "import_torch_s": round(import_seconds("import torch"), 2),
        "import_s": round(import_seconds("from retain import LLM"), 2),
        "file_mib": size >> 20,
        "packed_mib": packed >> 20,
        "weights_s": round(median(pack_s), 3),
        "weights_s_min": round(min(pack_s), 3),
        "llm_s": round(median(load_s), 3),
        "llm_s_min": round(min(load_s), 3),
        "first_token_s": round(median(token_s), 3),
        "file_gb_per_s": round(size / median(load_s) / 1e9, 2),
        "start_mib": start_mib,
        "peak_mib": peak_mib(),
    }
    print(json.dumps(row))


def import_seconds(statement: str) -> float:
    """Return the median of three processes that import something."""
    command = [sys.executable, "-c", TIMED.format(statement)]
    return median(float(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(3))


def touch_memory(size: int) -> None:
    """Free the models of earlier rounds, write to `size` bytes of memory and free them."""
    gc.collect()
    torch.ones(size, dtype=torch.uint8)


def peak_mib() -> int:
    """Return the largest memory of the process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


if __name__ == "__main__":
    main()
