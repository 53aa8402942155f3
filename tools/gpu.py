"""Measurements that need a GPU, and a check of the compiled kernels that needs none. See docs/guide/gpu.md.

    python tools/gpu.py compile                 compile every kernel for sm_90 with Triton's compiler, without a GPU
    python tools/gpu.py all --out FILE          each part below in a process of its own with a limit; tests first
    python tools/gpu.py all --parts pools,step  only these parts
    python tools/gpu.py all --seconds 285 --out FILE --skip-done FILE    go on where the call before ended
    python tools/gpu.py pools mass              decode attention: bandwidth of pools of each dtype; the cost of scoring
    python tools/gpu.py prompts evict           attention of a prompt with and without scores; the choice of victims
    python tools/gpu.py experts states          layers of experts; convolutions and linear attention
    python tools/gpu.py weights                 linear layers with quantized weights
    python tools/gpu.py options                 decode attention compiled in other ways
    python tools/gpu.py step                    a decode step at 1, 32 and 128 requests, with and without overlap
    python tools/gpu.py decode --model random:mpt-7b
    python tools/gpu.py speculate --model random:llama-3.1-8b
    python tools/gpu.py peer --model random:llama-3.1-8b

Every result is a JSON line. Times of kernels are medians of CUDA graphs, and what is compared runs in turns. Before
kernels are timed, a small case is compared with float64: the line has `differences`, and `wrong` if they are large.

To try the parts without a GPU, with tiny shapes and Triton's interpreter:

    python tools/gpu.py all --quick --device cpu --model random:tiny
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that a script finds the package beside it

from tools.gpu_bench.all_parts import KERNEL_PARTS, list_parts, read_lines, run_all
from tools.gpu_bench.timing import KernelBench, Line

ROOT = Path(__file__).parents[1]
MODEL_PARTS = ("step", "decode", "speculate", "peer")
STEP_SIZES = ((1, 256), (32, 256), (128, 256), (32, 4096))  # requests, tokens of their prompts
QUICK_STEP_SIZES = ((1, 64), (4, 64))


def kernel_lines(name: str, args: Namespace) -> Iterator[Line]:
    """Time kernels."""
    from tools.gpu_bench import attention, eviction, experts, looks, states, weights

    if args.device == "cpu":
        from tests.helpers.fast_interpreter import speed_up

        speed_up()
    parts = {
        "pools": attention.bench_pools,
        "mass": attention.bench_mass,
        "prompts": attention.bench_prompts,
        "evict": eviction.bench_evict,
        "weights": weights.bench_weights,
        "experts": experts.bench_experts,
        "states": states.bench_states,
        "looks": looks.bench_looks,
        "options": attention.bench_options,
    }
    return parts[name](KernelBench(torch.device(args.device), args.quick, args.compile_only))


def model_lines(name: str, args: Namespace) -> Iterator[Line]:
    """Time whole models."""
    from tools.gpu_bench import models

    steps = (0, 3) if args.compile_only else (4, 2) if args.quick else (48, 16)
    bench = models.ModelBench(args.model, args.device, args.kv_memory, *steps)
    if name == "step":
        sizes = QUICK_STEP_SIZES if args.quick else STEP_SIZES
        yield from models.bench_step(bench, sizes, args.kv_dtype)
        if args.kv_dtype == "auto":
            yield from models.bench_step(bench, sizes[-1:], "int8")
    elif name == "decode":
        yield from models.bench_decode(bench, args.input_len, args.output_len, read_lines(args.skip_done))
    elif name == "speculate":
        yield from models.bench_speculate(bench, args.speculate_input_len)
    else:
        yield from models.bench_transformers(bench, args.input_len, 64)


def lines_of(name: str, args: Namespace) -> Iterator[Line]:
    """Run one bench."""
    if name == "all":
        chosen = args.parts.split(",") if args.parts else None
        parts = list_parts([sys.executable, __file__], args.device, args.model, args.quick, args.skip_done)
        return run_all(parts, args.seconds, chosen, read_lines(args.skip_done))
    if name == "compile":
        from tools.gpu_bench.compile import compile_kernels

        return compile_kernels(args.arch, args.quick)
    return (kernel_lines if name in KERNEL_PARTS else model_lines)(name, args)


def parse_args() -> Namespace:
    """Read the command line, and end with one line where it asks for what this machine lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", nargs="+", choices=("all", "compile", *KERNEL_PARTS, *MODEL_PARTS))
    parser.add_argument("--model", default="random:llama-3.1-8b")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu; kernels run there with --quick alone")
    parser.add_argument("--kv-memory", help="pool size, such as 8GiB; default: what is free")
    parser.add_argument("--kv-dtype", default="auto", help="of step; default: the model's, then int8 for the last size")
    parser.add_argument("--input-len", type=int, default=8192, help="prompt tokens of decode and peer")
    parser.add_argument("--output-len", type=int, default=8192, help="generated tokens of decode")
    parser.add_argument("--speculate-input-len", type=int, default=32768, help="prompt tokens of speculate")
    parser.add_argument("--arch", type=int, default=90, help="target of compile: 80, 86, 89, 90, ...")
    parser.add_argument("--quick", action="store_true", help="few launch cases of compile, small sizes of the others")
    parser.add_argument("--compile-only", action="store_true", help="launch once what the parts time")
    parser.add_argument("--parts", help="parts of all, with commas between; default: each")
    parser.add_argument("--seconds", type=float, default=470.0, help="limit of all; what comes later is left out")
    parser.add_argument("--skip-done", type=Path, help="lines of earlier calls, whose parts and budgets are left out")
    parser.add_argument("--out", help="a file to which the lines are added, too")
    args = parser.parse_args()
    on_gpu = {*args.bench} - {"compile"} if args.device == "cuda" else set()
    if on_gpu and not torch.cuda.is_available():
        sys.exit("gpu.py: there is no NVIDIA GPU here; use --device cpu, or compile, which needs none")
    interpreted = {*args.bench} & {*KERNEL_PARTS} if args.device == "cpu" else set()
    if interpreted and (not args.quick or "compile" in args.bench):
        sys.exit("gpu.py: without a GPU kernels run in Triton's interpreter: add --quick, and run compile on its own")
    # Triton reads this when the kernels are imported.
    os.environ["TRITON_INTERPRET"] = "1" if interpreted else "0"
    return args


def round_numbers(x: Any) -> Any:
    """Return a line with 4 digits of each number."""
    if isinstance(x, dict):
        return {key: round_numbers(value) for key, value in x.items()}
    if isinstance(x, list):
        return [round_numbers(value) for value in x]
    return float(f"{x:.4g}") if isinstance(x, float) else x


def end_cut_line(file: str) -> None:
    """End the last line of a file, if a call that was killed has cut it."""
    path = Path(file)
    if path.is_file() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        with path.open("a", encoding="utf-8") as f:
            f.write("\n")


def main() -> None:
    """Run the benches of the command line."""
    if importlib.util.find_spec("retain") is None:  # not installed: use the source
        sys.path.insert(0, str(ROOT / "src"))
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    args = parse_args()
    if args.out:
        end_cut_line(args.out)
    for name in args.bench:
        for line in lines_of(name, args):
            text = json.dumps(round_numbers({"bench": name} | line))
            print(text, flush=True)
            if args.out:
                with open(args.out, "a", encoding="utf-8") as f:
                    f.write(text + "\n")


if __name__ == "__main__":
    main()
