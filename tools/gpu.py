"""Measurements that need a GPU, and a check of the compiled kernels that needs none. See docs/guide/gpu.md.

    python tools/gpu.py compile                 compile every kernel for sm_90 with Triton's compiler, without a GPU
    python tools/gpu.py all                     each part below in a process of its own with a limit; tests first
    python tools/gpu.py attention mass          decode attention: memory bandwidth, peers; the cost of scoring
    python tools/gpu.py step                    a decode step at 1, 32 and 128 requests, with and without overlap
    python tools/gpu.py decode --model random:mpt-7b
    python tools/gpu.py speculate --model random:llama-3.1-8b
    python tools/gpu.py peer --model random:llama-3.1-8b

Every result is a JSON line. Kernel times are medians of CUDA events; the kernels of a comparison run in turns. The
benches of whole models also run without a GPU:

    python tools/gpu.py decode --device cpu --model random:tiny --input-len 1024 --output-len 1024
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer
from time import perf_counter

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that a script finds the package beside it

from tools.gpu_bench.timing import Line

GPU_ONLY = ("attention", "mass")
BENCHES = ("step", "decode", "speculate", "peer")
TESTS = (
    *("tests/kernels/test_triton.py", "tests/kernels/test_backends.py", "tests/kernels/test_attention_mass.py"),
    *("tests/kernels/test_demoted.py", "tests/kernels/test_value_sizes.py", "tests/models/test_programs.py"),
    "tests/invariants/test_fake_device.py",
)


def run_all(device: str, model: str, quick: bool) -> Iterator[Line]:
    """Run the parts, most important first, each in a process of its own that ends at its limit.

    Yields the lines of a part as they come, and then one with its exit status and seconds. `quick`: small sizes, to try
    the parts themselves.
    """
    bench = [sys.executable, __file__, "--device", device, "--model", model]
    small = ["--input-len", "128", "--output-len", "64", "--speculate-input-len", "256"] if quick else []
    large = ["--input-len", "1024", "--output-len", "1024"] if quick else []
    mpt = model if quick else "random:mpt-7b"
    parts: dict[str, tuple[list[str], int]] = {  # its command, and its limit in seconds
        "tests": ([sys.executable, "-m", "pytest", "-n", "8", "-k", "triton or device", "--tb=short", *TESTS], 150),
        "step": ([*bench, "--input-len", "256", "step"], 120),
        "attention": ([*bench, "attention", "mass"], 90),
        "decode": ([*bench, *large, "--model", mpt, "decode"], 150),
        "speculate": ([*bench, *small, "speculate"], 120),
        "peer": ([*bench, *small, "peer"], 60),
    }
    if device == "cpu":
        del parts["tests"], parts["attention"]
    for name, (command, limit) in parts.items():
        started = perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        timer = Timer(limit, process.kill)
        timer.start()
        assert process.stdout
        tail = deque[str](maxlen=20)  # of what is no result
        for text in process.stdout:
            if text.startswith("{"):
                yield json.loads(text)
            else:
                tail.append(text.rstrip())
        status = process.wait()
        timer.cancel()
        yield {"bench": "all", "part": name, "exit": status, "seconds": perf_counter() - started, "tail": list(tail)}


def main() -> None:
    """Run the benches of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", nargs="+", choices=("all", "compile", *GPU_ONLY, *BENCHES))
    parser.add_argument("--model", default="random:llama-3.1-8b")
    parser.add_argument("--device", default="cuda", help="device of all but attention and mass: cuda or cpu")
    parser.add_argument("--kv-memory", help="pool size of decode, such as 8GiB; default: what is free")
    parser.add_argument("--input-len", type=int, default=8192, help="prompt tokens of decode and peer")
    parser.add_argument("--output-len", type=int, default=8192, help="generated tokens of decode")
    parser.add_argument("--speculate-input-len", type=int, default=32768, help="prompt tokens of speculate")
    parser.add_argument("--arch", type=int, default=90, help="target of compile: 80, 86, 89, 90, ...")
    parser.add_argument("--quick", action="store_true", help="few launch cases of compile, small sizes of all")
    args = parser.parse_args()
    from tools.gpu_bench import attention, compile, models

    benches: dict[str, Callable[[], Iterator[Line]]] = {
        "all": lambda: run_all(args.device, args.model, args.quick),
        "compile": lambda: compile.compile_kernels(args.arch, args.quick),
        "attention": lambda: attention.bench_attention(False),
        "mass": lambda: attention.bench_attention(True),
        "step": lambda: models.bench_step(
            args.model, args.device, (1, 4) if args.quick else (1, 32, 128), args.input_len
        ),
        "decode": lambda: models.bench_decode(args.model, args.device, args.kv_memory, args.input_len, args.output_len),
        "speculate": lambda: models.bench_speculate(args.model, args.device, args.speculate_input_len),
        "peer": lambda: models.bench_transformers(args.model, args.device, args.input_len, 64),
    }
    need_gpu = {*GPU_ONLY, *(BENCHES if args.device == "cuda" else ())}
    if need_gpu & set(args.bench) and not torch.cuda.is_available():
        sys.exit("gpu.py: there is no NVIDIA GPU here; use --device cpu, or compile, which needs none")
    for name in args.bench:
        for line in benches[name]():
            print(json.dumps({"bench": name} | line), flush=True)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main()
