"""What only a GPU can show, and what can be shown of it without one. See docs/guide/gpu.md.

    python tools/gpu.py compile                 every kernel, by Triton's compiler for sm_90: no GPU is needed
    python tools/gpu.py attention mass          decode attention: share of the memory's bandwidth, peers, masses
    python tools/gpu.py decode --model random:mpt-7b
    python tools/gpu.py speculate --model random:llama-3.1-8b
    python tools/gpu.py peer --model random:llama-3.1-8b

Every figure is a JSON line. Kernels' times are medians, by CUDA's events; what is compared runs in turns. What runs a
whole model can be tried without a GPU: `--device cpu --model random:tiny --prompt 1024 --new 1024 --long 512`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch

Line = dict[str, Any]
HEAD_SHAPES = {"llama-3.1-8b": (32, 8, 128), "mpt-7b": (32, 32, 128)}  # H, G, D
CACHE_LENS = (4096, 8192, 16384, 32768, 65536)
BF16 = torch.bfloat16
TIMED_TAIL_TOKENS = 512  # the last tokens of an answer, in which its end is timed
BUDGETS = {  # and their share of a prompt
    "full": 0.0,
    "keyformer:budget=50%": 0.5,
    "keyformer:budget=20%": 0.2,
    "h2o:budget=50%": 0.5,
    "h2o:budget=20%": 0.2,
}


# ---- without a GPU -----------------------------------------------------------------------------------------------


def compile_kernels(arch: int, quick: bool) -> Iterator[Line]:
    """Registers, spills and shared memory of every kernel that some scenes launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class NoGPU:
        """A driver that only knows what it would compile for."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", arch, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    driver.set_active(NoGPU())
    found: dict[int, Line] = {}
    run = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **more)
        if id(kernel) not in found:
            found[id(kernel)] = {
                "kernel": self.fn.__name__,
                **kernel_usage(kernel, Path(triton.__file__).parent),
                **kernel_constants(more),
            }

    JITFunction.run = only_compile
    for scene in LAUNCH_CASES[: 2 if quick else None]:
        launch_kernels(*scene)
    yield from found.values()


def kernel_constants(options: dict[str, Any]) -> Line:
    """What a kernel was made for."""
    return {
        k: v for k, v in options.items() if k in ("D", "M", "R", "SPLIT", "UPDATE_MASS", "NOISE", "ROPE", "num_warps")
    }


def kernel_usage(kernel: Any, triton: Path) -> Line:
    """What it takes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(kernel.asm["cubin"])
        f.flush()
        tool = triton / "backends/nvidia/bin/cuobjdump"
        out = subprocess.run([str(tool), "-res-usage", f.name], capture_output=True, text=True, check=True)
    used = re.search(r"REG:(\d+) STACK:(\d+)", out.stdout + out.stderr)
    assert used, out
    ptx = kernel.asm["ptx"]
    return {
        "registers": int(used[1]), "spilled": int(used[2]), "shared": kernel.metadata.shared,
        "mma": len(re.findall(r"\bw?g?mma\.", ptx)), "async copies": ptx.count("cp.async.c"),
    }  # fmt: skip


# D, R, dtype, fresh tokens, masses, ALiBi, turned
LAUNCH_CASES: list[tuple[int, int, torch.dtype, tuple[int, ...], bool, bool]] = [
    (128, 4, BF16, (1, 1), True, False),
    (128, 4, BF16, (200, 1), False, False),
    (128, 1, BF16, (1, 200), True, True),
    (128, 4, BF16, (200, 9), True, False),
    (256, 4, BF16, (200, 9), False, False),
    (64, 3, torch.float32, (200, 9), True, False),
    (80, 1, torch.float16, (200, 9), False, False),
]


def launch_kernels(D: int, R: int, dtype: torch.dtype, fresh: tuple[int, ...], with_masses: bool, alibi: bool) -> None:
    """A step of two kv heads, and everything else that there is a kernel for."""
    from retain.kernels import triton
    from retain.kernels.api import Tables
    from retain.kernels.triton import attention, forward

    G, B, T, n = 2, len(fresh), sum(fresh), 40
    kv = triton.allocate(1 + B * G * n, 64, D, dtype)
    i = torch.ones(B, dtype=torch.int32)
    pages = torch.arange(1, 1 + B * G * n, dtype=torch.int32).view(B, G, n)
    starts = torch.tensor([0, *fresh]).cumsum(0).int()
    tables = Tables(
        pages, i[:, None] * torch.full((G,), n).int(), i * 2**30, i * 0, i.cumsum(0).int() - 1, starts, i, n
    )
    q, pos = torch.ones(T, G * R, D, dtype=dtype), torch.ones(T, dtype=torch.int32)
    asked = keyformer_scoring(T, B) if with_masses else None
    triton.attend(q, kv, tables, pos, 0.1, torch.ones(G * R) if alibi else None, asked, 1)
    turn = attention.RopeParams(torch.ones(D // 2), 1.0, alibi)
    attention.write(kv, torch.ones(G, T, dtype=torch.int32), q[:, :G], q[:, :G], pos, None if alibi else turn)
    triton.copy(kv, torch.tensor([1]), torch.tensor([2]))
    triton.select_victims(
        torch.ones(3, 4096), torch.ones(3, 4096, dtype=torch.int32), torch.full((3,), 4096).int(), 4, 4000, 16
    )
    p = forward.TritonProgram(dtype, torch.device("cpu"))
    x, y = p.buffer("x", 4096), p.buffer("y", 2048)
    p.norm(x, x, torch.ones(4096), None, 1e-5, subtract_mean=False)
    p.norm(x, x, torch.ones(4096), torch.ones(4096), 1e-5, subtract_mean=True)
    p.activation(x, y, "silu", 2048, gated=True)
    p.activation(y, y, "gelu_tanh", 2048)
    qkv, out = p.buffer("qkv", (R + 2) * G * D), p.buffer("o", R * G * D)
    if not alibi:
        p.rope(qkv, torch.ones(D // 2), 1.0, False, (R + 1) * G, D)
    p.attend(qkv, out, 0, (R * G, G, D), 0.1, torch.ones(R * G) if alibi else None)
    work, every = attention.plan_attention(tables, R, D, kv, None), torch.ones(1, G, T, dtype=torch.int32)
    step = forward.DeviceStep(kv, as_single_layer(tables), work, every, pos, pos, None)
    step.buffers[x], step.buffers[qkv] = torch.ones(T, 4096, dtype=dtype), torch.ones(T, (R + 2) * G * D, dtype=dtype)
    for op in p._ops:
        op(step)


def as_single_layer(tables: Any) -> Any:
    """The same tables for all of one layer."""
    return replace(tables, pages=tables.pages[None], counts=tables.counts[None], windows=tables.windows[None])


def keyformer_scoring(T: int, B: int, device: str = "cpu") -> Any:
    """Keyformer's, of every query."""
    from retain.kernels.api import GUMBEL, AttentionScoring

    i = torch.ones(B, dtype=torch.int32)
    parts = torch.ones(T), torch.full((T,), 1.5), torch.ones(B), i * GUMBEL, i, i
    return AttentionScoring(*(x.to(device) for x in parts))


# ---- kernels -----------------------------------------------------------------------------------------------------


def time_graphs(functions: Sequence[Callable[[], Any]], repeats: int = 20) -> list[float]:
    """Milliseconds of each, as a graph, in turns."""
    graphs = []
    for work in functions:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                work()
        graphs.append(graph)
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for graph, each in zip(graphs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            each.append(begin.elapsed_time(end) / 4)
    return [median(each) for each in times]


def measure_bandwidth() -> float:
    """Bytes a second that the device reads."""
    x = torch.ones(2**30, device="cuda")
    (ms,) = time_graphs([lambda: x.sum()])
    return x.nbytes / ms * 1e3


def bench_attention(with_masses: bool) -> Iterator[Line]:
    """A decode step of one layer, over caches that are larger than what stays near the cores."""
    from retain.kernels import triton
    from retain.kernels.api import NO_WINDOW, Tables
    from retain.kernels.triton import attention as a

    device, peak = torch.device("cuda"), measure_bandwidth()
    yield {"bandwidth_gb_s": peak / 1e9, "gpu": torch.cuda.get_device_name()}
    for name, (H, G, D) in HEAD_SHAPES.items():
        for slots in CACHE_LENS:
            B = max(2**31 // (slots * G * D * 4), 1)  # 2 GiB of K and V
            n = slots // 64
            kv = triton.allocate(1 + B * G * n, 64, D, BF16, 1, device)
            for x in (kv.k, kv.v):
                x.normal_()
            pages = 1 + torch.randperm(B * G * n, device=device).int().view(B, G, n)
            kv.pos[pages.long()] = torch.arange(slots, device=device, dtype=torch.int32).view(n, 64)
            full = torch.full((B, G), n, dtype=torch.int32, device=device)
            one, rows = torch.ones(B, dtype=torch.int32, device=device), torch.arange(B, dtype=torch.int32)
            starts = torch.arange(B + 1, dtype=torch.int32)
            sparse = Tables(pages, full, one * NO_WINDOW, one * 0, rows, starts, None, n)
            dense = replace(sparse, dense=one)
            q, pos = torch.randn(B, H, D, device=device, dtype=BF16), one * (slots - 1)
            size, line = 2 * B * slots * G * D * 2, {"shape": name, "slots": slots, "batch": B}

            def ours(tables: Tables, asked: Any = None, q: Any = q, kv: Any = kv, pos: Any = pos) -> Callable[[], Any]:
                work = a.plan_attention(tables, q.shape[1] // tables.pages.shape[1], q.shape[2], kv, asked)
                return lambda: a.attend(q, kv, tables, work, pos, 0.1, None, 0)

            if with_masses:
                names, works = ["plain", "h2o", "keyformer"], [ours(sparse)]
                for asked in (keyformer_scoring(B, B), keyformer_scoring(B, B)):
                    h2o = len(works) == 1
                    asked = (
                        replace(asked, noise=asked.noise * 0, temperature=asked.temperature * 0 + 1) if h2o else asked
                    )
                    works.append(ours(sparse, asked))
                times = time_graphs(works)
                yield {**line, **{f"{k}_over_plain": t / times[0] for k, t in zip(names, times, strict=True)}}
                continue
            peers = peer_kernels(q, kv, pages, slots, G)
            times = time_graphs([ours(dense), ours(sparse), *peers.values()])
            for k, t in zip(["dense", "positions", *peers], times, strict=True):
                yield {**line, "kernel": k, "ms": t, "gb_s": size / t / 1e6, "of_bandwidth": size / t * 1e3 / peak}


def peer_kernels(q: Any, kv: Any, pages: Any, slots: int, G: int) -> dict[str, Callable[[], Any]]:
    """The same work by those who are there: torch over memory without pages, FlashInfer over pages of all heads."""
    (B, H, D), found = q.shape, {}
    k, v = (torch.randn(B, G, slots, D, device="cuda", dtype=BF16) for _ in range(2))
    found["torch"] = lambda: torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=H > G)
    try:
        import flashinfer
    except ImportError:
        return found
    n, room = slots // 64, torch.empty(2**27, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(room, "HND", use_tensor_cores=H > G)
    starts = torch.arange(B + 1, dtype=torch.int32) * n
    last = torch.full((B,), 64, dtype=torch.int32)
    wrapper.plan(starts, torch.randperm(B * n).int(), last, H, G, D, 64, q_data_type=BF16, kv_data_type=BF16)
    both = torch.randn(B * n, 2, G, 64, D, device="cuda", dtype=BF16)
    found["flashinfer"] = lambda: wrapper.run(q, both)
    return found


# ---- models ------------------------------------------------------------------------------------------------------


def bench_decode(model: str, device: str, memory: str | None, prompt_len: int, output_len: int) -> Iterator[Line]:
    """Tokens a second of answers of `new` tokens, by steps at their beginning and their end: steps grow evenly, and
    those of a budget, which is a share of the prompt, do not.

    Everything kept, and budgets of half and a fifth: alone, with the largest batch for which the full cache has room,
    and with their own largest.
    """
    from retain.bench.budget import time_side_by_side
    from retain.llm import LLM

    sizes = {
        "context": prompt_len + output_len,
        "max_running_requests": 256,
        "max_batched_tokens": min(8192, prompt_len),
        "kv_memory": memory,
    }
    llm = LLM(model, device=device, prefix="off", **sizes)
    S, total = (
        llm.cache.page_size,
        llm.cache.total_pages // (llm.spec.num_layers * llm.spec.num_kv_heads),
    )  # pages of a head
    pages = -(-(prompt_len + output_len) // S)  # of an answer that keeps all
    whole = min(total // pages, 64)
    if not whole:
        sys.exit(f"gpu.py: no room for one answer of {prompt_len} + {output_len} tokens")
    plain: dict[int, float] = {}
    for policy, share in BUDGETS.items():
        # Two are in their prompts; each of the others has its budget, a page that fills, and one that is kept for it.
        own = min(int((total - 2 * pages) / (prompt_len * share / S + 2)), 256) if share else whole
        lengths = (prompt_len,) if share else (prompt_len, prompt_len + output_len - TIMED_TAIL_TOKENS)
        for batch in sorted({1, whole, max(own, whole)}):
            # Without the first steps, which are recorded. Means: what forgetting takes now and then is part of them.
            times = [mean(time_side_by_side(llm, [policy], length, batch, 40)[0][8:]) for length in lengths]
            speed = batch / mean(times)
            plain.setdefault(batch, speed)
            line = {"model": model, "policy": policy, "batch": batch, "tok_s": speed}
            yield {**line, "over_full": speed / plain[min(batch, whole)]}


def bench_speculate(model: str, device: str, prompt_len: int) -> Iterator[Line]:
    """A long text, answered with and without drafts of the model itself on a few pages."""
    from retain.desk import GenerateRequest
    from retain.llm import LLM
    from retain.sampling_params import SamplingParams

    params, plain = SamplingParams(max_tokens=128, temperature=0, ignore_eos=True), 0.0
    for drafter in (None, "self:k=4", "self:k=4,budget=1024", "self"):
        llm = LLM(
            model, device=device, context=prompt_len + 256, max_running_requests=2, speculate=drafter, prefix="off"
        )
        text = torch.randint(
            300, llm.spec.vocab_size, (prompt_len,), generator=torch.Generator().manual_seed(0)
        ).tolist()
        answer = llm.generate_from_requests([GenerateRequest(text, params)])[0]
        speed, plain = answer.decode_tok_s, plain or answer.decode_tok_s
        line = {
            "model": model,
            "prompt": prompt_len,
            "drafter": drafter or "none",
            "tok_s": speed,
            "over": speed / plain,
        }
        yield line | (answer.speculate or {})
        llm.close()
        del llm
        gc.collect()  # its rooms know each other
        if device == "cuda":
            torch.cuda.empty_cache()


def bench_transformers(model: str, device: str, prompt_len: int, output_len: int) -> Iterator[Line]:
    """transformers' own generation on the same shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from retain.models.resolve import resolve_model

    config = AutoConfig.from_pretrained(resolve_model(model))
    with torch.device(device):
        theirs = AutoModelForCausalLM.from_config(config, dtype=BF16).eval()
    for batch in (1, 4):
        ids = torch.randint(300, config.vocab_size, (batch, prompt_len), device=device)
        times = []
        for n in (1, output_len + 1):
            began = perf_counter()
            with torch.no_grad():
                theirs.generate(ids, max_new_tokens=n, min_new_tokens=n, do_sample=False).tolist()  # waits for it
            times.append(perf_counter() - began)
        speed = batch * output_len / (times[1] - times[0])
        yield {"engine": "transformers", "model": model, "prompt": prompt_len, "batch": batch, "tok_s": speed}


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=("compile", "attention", "mass", "decode", "speculate", "peer"))
    parser.add_argument("--model", default="random:llama-3.1-8b")
    parser.add_argument("--device", default="cuda", help="of decode, speculate and peer")
    parser.add_argument("--kv-memory", help="of decode: as much as there is, or a size such as 8GiB")
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--new", type=int, default=8192)
    parser.add_argument("--long", type=int, default=32768, help="of speculate")
    parser.add_argument("--arch", type=int, default=90, help="of compile: 80, 86, 89, 90, ...")
    parser.add_argument("--quick", action="store_true", help="compile: what decoding and prefill need, no more")
    args = parser.parse_args()
    works: dict[str, Callable[[], Iterator[Line]]] = {
        "compile": lambda: compile_kernels(args.arch, args.quick),
        "attention": lambda: bench_attention(False),
        "mass": lambda: bench_attention(True),
        "decode": lambda: bench_decode(args.model, args.device, args.kv_memory, args.prompt, args.new),
        "speculate": lambda: bench_speculate(args.model, args.device, args.long),
        "peer": lambda: bench_transformers(args.model, args.device, args.prompt, 64),
    }
    needs = {"attention", "mass"} | ({"decode", "speculate", "peer"} if args.device == "cuda" else set())
    if needs & set(args.what) and not torch.cuda.is_available():
        sys.exit("gpu.py: there is no NVIDIA GPU here; `compile` needs none")
    for what in args.what:
        for line in works[what]():
            print(json.dumps({"what": what, **line}), flush=True)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main()
