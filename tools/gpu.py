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
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from threading import Timer
from time import perf_counter
from typing import Any

import torch

GPU_ONLY = ("attention", "mass")
BENCHES = ("step", "decode", "speculate", "peer")
Line = dict[str, Any]
HEAD_SHAPES = {"llama-3.1-8b": (32, 8, 128), "mpt-7b": (32, 32, 128)}  # H, G, D
CACHE_LENS = (4096, 8192, 16384, 32768, 65536)
BF16, INT4 = torch.bfloat16, torch.int4
TIMED_TAIL_TOKENS = 512  # the speed at the end of an output is measured this many tokens before it
BUDGETS = {  # policy: its budget as a share of the prompt
    "full": 0.0,
    "keyformer:budget=50%": 0.5,
    "keyformer:budget=20%": 0.2,
    "h2o:budget=50%": 0.5,
    "h2o:budget=20%": 0.2,
}


# ---- without a GPU -----------------------------------------------------------------------------------------------


def compile_kernels(arch: int, quick: bool) -> Iterator[Line]:
    """Give the registers, spills and shared memory of every kernel that the launch cases use."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class NoGPU:
        """A driver that names the target of the compiler and nothing else."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", arch, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    driver.set_active(NoGPU())
    lines: dict[int, Line] = {}  # by kernel
    run = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **more)
        if id(kernel) not in lines:
            lines[id(kernel)] = {
                "kernel": self.fn.__name__,
                **kernel_usage(kernel, Path(triton.__file__).parent),
                **kernel_constants(more),
            }

    JITFunction.run = only_compile
    for case in LAUNCH_CASES[: 4 if quick else None]:
        launch_kernels(*case, quick)
    for sizes in STATE_CASES[: 2 if quick else None]:
        launch_state_kernels(*sizes)
    yield from lines.values()


def kernel_constants(options: dict[str, Any]) -> Line:
    """Return the compile-time options that tell the variants of a kernel apart."""
    names = (
        "D",
        "F",
        "M",
        "R",
        "SPLIT",
        "PART",
        "UPDATE_MASS",
        "NOISE",
        "ROPE",
        "DEMOTED_PAGE_BLOCKS",
        "SOFTCAP",
        "SINKS",
        "num_warps",
    )
    return {k: v for k, v in options.items() if k in names}


def kernel_usage(kernel: Any, triton: Path) -> Line:
    """Return the resources of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(kernel.asm["cubin"])
        f.flush()
        tool = triton / "backends/nvidia/bin/cuobjdump"
        out = subprocess.run([str(tool), "-res-usage", f.name], capture_output=True, text=True, check=True)
    used = re.search(r"REG:(\d+) STACK:(\d+)", out.stdout + out.stderr)
    assert used, out
    ptx = kernel.asm["ptx"]
    return {
        "registers": int(used[1]), "spills": int(used[2]), "shared_memory_bytes": kernel.metadata.shared,
        "mma": len(re.findall(r"\bw?g?mma\.", ptx)), "async copies": ptx.count("cp.async.c"),
        "fused": ptx.count("fma.rn.f32"),
    }  # fmt: skip


# D, R, dtype, fresh tokens of each request, with masses, ALiBi instead of rope, with demoted tokens
LAUNCH_CASES: list[tuple[int, int, torch.dtype, tuple[int, ...], bool, bool, bool]] = [
    (128, 4, BF16, (1, 1), True, False, False),
    (128, 4, BF16, (200, 1), False, False, False),
    (64, 3, torch.uint8, (1, 200), True, False, False),
    (64, 3, BF16, (1, 200), True, False, True),
    (128, 4, torch.int8, (200, 9), False, False, True),
    (256, 4, BF16, (1, 200), True, True, True),
    (128, 1, BF16, (1, 200), True, True, False),
    (128, 4, BF16, (200, 9), True, False, False),
    (256, 4, BF16, (200, 9), False, False, False),
    (64, 3, torch.float32, (200, 9), True, False, False),
    (80, 1, torch.float16, (200, 9), False, False, False),
    (64, 3, torch.int8, (1, 2), True, False, False),
    (128, 2, torch.int8, (200, 9), True, True, False),
    (64, 3, INT4, (1, 200), True, False, False),
    (128, 4, INT4, (200, 9), False, True, False),
    (576, 16, BF16, (1, 9), True, False, False),
]
VALUE_SIZES = {576: 512}  # where a value is not as large as a key


def launch_kernels(
    D: int,
    R: int,
    dtype: torch.dtype,
    fresh: tuple[int, ...],
    with_masses: bool,
    alibi: bool,
    demotes: bool,
    quick: bool,
) -> None:
    """Launch a step of two kv heads, and every other kernel of the backend.

    With demoted tokens it attends with a softcap and sink logits, too: `quick` with nothing else.
    """
    from retain.kernels import triton
    from retain.kernels.api import DemotedTables, Tables
    from retain.kernels.attention_params import AttentionParams
    from retain.kernels.rope import Rope
    from retain.kernels.triton import fresh_tokens

    G, B, T, n = 2, len(fresh), sum(fresh), 40
    kv = triton.allocate(1 + B * G * n, 64, D, dtype, v_dim=VALUE_SIZES.get(D))
    ones = torch.ones(B, dtype=torch.int32)
    tables = Tables(
        pages=torch.arange(1, 1 + B * G * n, dtype=torch.int32).view(B, G, n),
        counts=torch.full((B, G), n, dtype=torch.int32),
        windows=ones * 2**30,
        rows=torch.arange(B, dtype=torch.int32),
        query_start_loc=torch.tensor([0, *fresh]).cumsum(0).int(),
        dense=ones,
        max_pages=n,
    )
    if demotes:
        tables = replace(tables, demoted=DemotedTables(demoted_pages(kv), tables.pages, tables.counts, n))
    q_dtype = BF16 if dtype in (torch.int8, torch.uint8, INT4) else dtype
    q, pos, slots = torch.ones(T, G * R, D, dtype=q_dtype), torch.ones(T).int(), torch.ones(G, T, dtype=torch.int32)
    slopes = torch.ones(G * R) if alibi else None
    scoring = keyformer_scoring(T, B) if with_masses else None
    if not (quick and demotes):
        triton.attend(q, kv, tables, pos, AttentionParams(0.1, alibi_slopes=slopes), scoring=scoring, layer=1)
    if demotes:
        capped = AttentionParams(0.1, slopes, softcap=30.0, sink_logits=torch.ones(G * R))
        triton.attend(q, kv, tables, pos, capped, scoring=scoring, layer=1)
    rope = None if alibi else Rope(torch.ones(D // 2))
    fresh_tokens.write(kv, slots, q[:, :G], q[:, :G, : kv.v_dim], pos, rope)
    triton.copy(kv, torch.tensor([1]), torch.tensor([2]))
    priority, lengths = torch.ones(3, 4096), torch.full((3,), 4096).int()
    triton.select_victims(priority, priority.int(), lengths, first_evictable=4, last_evictable=4000, n=16)
    launch_program(kv, tables, R, slopes, q_dtype)


def launch_program(kv: Any, tables: Any, R: int, slopes: Any, dtype: torch.dtype) -> None:
    """Launch the kernels of a program of one layer."""
    from retain.kernels.api import GroupInputs
    from retain.kernels.attention_params import AttentionParams
    from retain.kernels.experts import Experts, Router
    from retain.kernels.rope import Rope
    from retain.kernels.triton import forward
    from retain.kernels.triton.plan import plan_attention

    D, G, T = kv.k_dim, tables.pages.shape[1], int(tables.query_start_loc[-1])
    p = forward.TritonProgram(dtype, torch.device("cpu"))
    x, y = p.buffer("x", 4096), p.buffer("y", 2048)
    p.norm(x, x, torch.ones(4096), None, 1e-5, subtract_mean=False)
    p.norm(x, x, torch.ones(4096), torch.ones(4096), 1e-5, subtract_mean=True)
    p.activation(x, y, "silu", 2048, gated=True)
    p.activation(y, y, "gelu_tanh", 2048)
    scores = p.buffer("scores", 8)
    p.experts(y, scores, y, Experts(8, torch.ones(8 * 256, 2048), torch.ones(8 * 2048, 128), Router(2), "silu"))
    qkv, out = p.buffer("qkv", (R + 1) * G * D + G * kv.v_dim), p.buffer("o", R * G * kv.v_dim)
    rope = Rope(torch.ones(D // 2)) if slopes is None else None
    p.attend(qkv, out, 0, (R * G, G, D), AttentionParams(0.1, slopes, torch.zeros(G, D)), rope)
    pos = torch.ones(T, dtype=torch.int32)
    step = forward.DeviceStep(
        groups=[GroupInputs(kv, as_single_layer(tables), torch.ones(1, G, T, dtype=torch.int32))],
        layers=[(0, 0)],
        plans=[plan_attention(tables, R, D, kv, None)],
        requests=pos,
        input_ids=pos,
        positions=pos,
        logits_indices=pos,
    )
    widths = 4096, (R + 1) * G * D + G * kv.v_dim
    step.buffers[x], step.buffers[qkv] = (torch.ones(T, n, dtype=dtype) for n in widths)
    step.buffers[scores] = torch.ones(T, 8, dtype=dtype)
    for to, compute in p._ops:
        step.buffers[to] = compute(step)


# Numbers of a key and of a value, slots of a page, dtype of the rows
STATE_CASES: list[tuple[int, int, int, torch.dtype]] = [
    (128, 128, 16, BF16),
    (128, 128, 64, BF16),
    (128, 128, 32, BF16),
    (64, 48, 16, torch.float32),
    (256, 256, 16, BF16),
]


def launch_state_kernels(k_dim: int, v_dim: int, page_size: int, dtype: torch.dtype) -> None:
    """Launch the kernels of a convolution and of linear attention, for two key heads and four value heads."""
    from retain.kernels import triton
    from retain.kernels.api import GroupInputs, Tables
    from retain.kernels.kv_cache_spec import ConvolutionSpec, LinearStateSpec, LinearTokensSpec
    from retain.kernels.linear_attention import LinearAttention
    from retain.kernels.triton import forward

    T, H = 40, 4
    params = LinearAttention(2, H, k_dim, v_dim, -torch.ones(H), torch.ones(H))
    width = params.qkv_width
    specs = (
        ConvolutionSpec(4, width // 8, width // 8, 4),
        LinearTokensSpec(H, k_dim, v_dim, page_size),
        LinearStateSpec(H, k_dim, v_dim, page_size),
    )
    groups = []
    for spec in specs:
        G = spec.num_kv_heads
        kv = triton.allocate(2, page_size, spec.k_dim, torch.float32, v_dim=spec.v_dim)
        pages, counts, windows = (torch.ones(shape, dtype=torch.int32) for shape in ((1, 1, G, 3), (1, 1, G), (1, 1)))
        tables = Tables(pages, counts, windows, torch.zeros(1).int(), torch.tensor([0, T]).int())
        groups.append(GroupInputs(kv, tables, torch.ones(1, G, T, dtype=torch.int32)))
    p = forward.TritonProgram(dtype, torch.device("cpu"))
    x, gates, out = p.buffer("x", width), p.buffer("gates", 2 * H), p.buffer("out", H * v_dim)
    p.convolve(x, x, 0, torch.ones(width, 4), torch.ones(width))
    p.linear_attention(x, gates, out, (1, 2), params)
    pos = torch.ones(T, dtype=torch.int32)
    step = forward.DeviceStep(
        groups=groups,
        layers=[(0, 0), (1, 0), (2, 0)],
        plans=[None, None, None],
        requests=torch.ones(1, 6, dtype=torch.int32),
        input_ids=pos,
        positions=pos,
        logits_indices=pos,
    )
    step.buffers[x], step.buffers[gates] = (torch.ones(T, n, dtype=dtype) for n in (width, 2 * H))
    for to, compute in p._ops:
        step.buffers[to] = compute(step)


def as_single_layer(tables: Any) -> Any:
    """Return the tables of one layer as the tables of all layers."""
    d = tables.demoted and replace(tables.demoted, pages=tables.demoted.pages[None], counts=tables.demoted.counts[None])
    pages, counts, windows = tables.pages[None], tables.counts[None], tables.windows[None]
    return replace(tables, pages=pages, counts=counts, windows=windows, demoted=d)


def demoted_pages(kv: Any) -> Any:
    """Return the pages of a pool as pages of slots of 4 bits."""
    from retain.kernels import triton
    from retain.kernels.pool_dtypes import slots_in_page
    from retain.kernels.reinterpret import PageFormat

    num_slots = slots_in_page(kv.page_size, kv.k_dim, kv.dtype, INT4)
    return triton.reinterpret(kv, PageFormat(num_slots, INT4, kv.k_dim, kv.v_dim))


def keyformer_scoring(T: int, B: int, device: str = "cpu") -> Any:
    """Return Keyformer's scoring of every query."""
    from retain.kernels.scoring import GUMBEL, AttentionScoring

    ones = torch.ones(B, dtype=torch.int32, device=device)
    return AttentionScoring(
        weights=torch.ones(T, device=device),
        temperature=torch.full((T,), 1.5, device=device),
        decay=torch.ones(B, device=device),
        noise=ones * GUMBEL,
        seed=ones,
        redraw_noise=ones,
    )


# ---- kernels -----------------------------------------------------------------------------------------------------


def time_graphs(functions: Sequence[Callable[[], Any]], repeats: int = 20) -> list[float]:
    """Return the milliseconds of each function, run as CUDA graphs in turns."""
    graphs = []
    for function in functions:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # which still writes the inputs
        with torch.cuda.stream(stream):
            function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                function()
        graphs.append(graph)
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for graph, graph_times in zip(graphs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            graph_times.append(begin.elapsed_time(end) / 4)
    return [median(graph_times) for graph_times in times]


def measure_bandwidth() -> float:
    """Return the bytes a second that the device reads."""
    x = torch.ones(2**30, device="cuda")
    (ms,) = time_graphs([lambda: x.sum()])
    return x.nbytes / ms * 1e3


def bench_attention(with_masses: bool) -> Iterator[Line]:
    """Time the attention of a decode step in one layer, over caches larger than the GPU's own caches."""
    from retain.kernels import triton
    from retain.kernels.api import NO_WINDOW, DemotedTables, Tables
    from retain.kernels.attention_params import AttentionParams
    from retain.kernels.triton import attention
    from retain.kernels.triton.plan import plan_attention

    device, bandwidth = torch.device("cuda"), measure_bandwidth()
    yield {"bandwidth_gb_s": bandwidth / 1e9, "gpu": torch.cuda.get_device_name()}
    for name, (H, G, D) in HEAD_SHAPES.items():
        for slots in CACHE_LENS:
            B = max(2**31 // (slots * G * D * 4), 1)  # 2 GiB of K and V
            n = slots // 64
            kv = triton.allocate(1 + B * G * n, 64, D, BF16, 1, device)
            for x in (kv.k, kv.v):
                x.normal_()
            pages = 1 + torch.randperm(B * G * n, device=device).int().view(B, G, n)
            kv.pos[pages.long()] = torch.arange(slots, device=device, dtype=torch.int32).view(n, 64)
            ones = torch.ones(B, dtype=torch.int32, device=device)
            sparse = Tables(
                pages=pages,
                counts=torch.full((B, G), n, dtype=torch.int32, device=device),
                windows=ones * NO_WINDOW,
                rows=torch.arange(B, dtype=torch.int32),
                query_start_loc=torch.arange(B + 1, dtype=torch.int32),
                max_pages=n,
            )
            q, pos = torch.randn(B, H, D, device=device, dtype=BF16), ones * (slots - 1)
            size, line = 2 * B * slots * G * D * 2, {"shape": name, "slots": slots, "batch": B}
            int4 = demoted_pages(kv)  # of half of the pages: nearly the same bytes, and twice the tokens
            int4.pos.copy_(torch.arange(int4.page_size, device=device))
            half = sparse.counts // 2
            demoted = DemotedTables(int4, pages[..., n // 2 :], half, n // 2)
            mixed = replace(sparse, counts=half, max_pages=n // 2, demoted=demoted)

            def attend(tables: Tables, scoring: Any = None, q: Any = q, kv: Any = kv, pos: Any = pos) -> Any:
                R = q.shape[1] // tables.pages.shape[1]
                plan = plan_attention(tables, R, q.shape[2], kv, scoring)
                return partial(attention.attend, q, kv, tables, plan, pos, AttentionParams(0.1), 0)

            if with_masses:
                keyformer = keyformer_scoring(B, B)
                h2o = replace(keyformer, noise=keyformer.noise * 0, temperature=torch.ones(B))
                functions = {
                    "plain": attend(sparse),
                    "h2o": attend(sparse, h2o),
                    "keyformer": attend(sparse, keyformer),
                    "demoted": attend(mixed),
                    "demoted, h2o": attend(mixed, h2o),
                }
                times = time_graphs(list(functions.values()))
                yield {**line, **{f"{k}_over_plain": t / times[0] for k, t in zip(functions, times, strict=True)}}
                continue
            functions = {"dense": attend(replace(sparse, dense=ones)), "positions": attend(sparse)}
            functions |= {"half of the pages demoted": attend(mixed)} | peer_kernels(q, slots, G)
            for k, t in zip(functions, time_graphs(list(functions.values())), strict=True):
                utilization = size / t * 1e3 / bandwidth
                yield {**line, "kernel": k, "ms": t, "gb_s": size / t / 1e6, "bandwidth_utilization": utilization}


def peer_kernels(q: Any, slots: int, G: int) -> dict[str, Callable[[], Any]]:
    """Return the same work in torch, over memory without pages, and in FlashInfer, over pages of all heads."""
    (B, H, D), peers = q.shape, {}
    k, v = (torch.randn(B, G, slots, D, device="cuda", dtype=BF16) for _ in range(2))
    peers["torch"] = lambda: torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=H > G)
    try:
        import flashinfer
    except ImportError:
        return peers
    n, workspace = slots // 64, torch.empty(2**27, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=H > G)
    starts = torch.arange(B + 1, dtype=torch.int32) * n
    last = torch.full((B,), 64, dtype=torch.int32)
    wrapper.plan(starts, torch.randperm(B * n).int(), last, H, G, D, 64, q_data_type=BF16, kv_data_type=BF16)
    kv = torch.randn(B * n, 2, G, 64, D, device="cuda", dtype=BF16)
    peers["flashinfer"] = lambda: wrapper.run(q, kv)
    return peers


# ---- models ------------------------------------------------------------------------------------------------------


def bench_decode(model: str, device: str, memory: str | None, prompt_len: int, output_len: int) -> Iterator[Line]:
    """Measure decode speed at full cache and at budgets of a half and a fifth of the prompt.

    Batch sizes: 1, the most requests whose full caches fit, and the most that fit with the budget. Steps of the full
    cache slow down evenly, so its speed is the mean of the output's begin and end; steps of a budget do not.
    """
    from retain.bench.budget import time_side_by_side
    from retain.llm import LLM

    max_model_len = prompt_len + output_len
    llm = LLM(
        model,
        device=device,
        prefix_cache="off",
        kv_memory=memory,
        max_model_len=max_model_len,
        max_running_requests=256,
        max_batched_tokens=min(8192, prompt_len),
    )
    heads = llm.spec.num_layers * llm.spec.kv_cache.only_group.num_kv_heads
    S, pages = llm.cache.page_size, llm.cache.total_pages // heads  # of a head
    full_pages = -(-max_model_len // S)  # pages that a request with a full cache needs
    full_batch = min(pages // full_pages, 64)
    if not full_batch:
        sys.exit(f"gpu.py: no memory for one request of {prompt_len} + {output_len} tokens; raise --kv-memory")
    full_speed: dict[int, float] = {}  # by batch size
    for policy, share in BUDGETS.items():
        # Two requests are in prefill. Each of the others has its budget, a page that fills, and one in reserve.
        budget_batch = min(int((pages - 2 * full_pages) / (prompt_len * share / S + 2)), 256) if share else full_batch
        lengths = (prompt_len,) if share else (prompt_len, max_model_len - TIMED_TAIL_TOKENS)
        for batch in sorted({1, full_batch, max(budget_batch, full_batch)}):
            # The first steps capture graphs. The mean includes the evictions that some steps make.
            times = [mean(time_side_by_side(llm, [policy], length, batch, 40)[0][8:]) for length in lengths]
            speed = batch / mean(times)
            full_speed.setdefault(batch, speed)
            line = {"model": model, "policy": policy, "batch": batch, "tok_s": speed}
            yield {**line, "speedup_over_full": speed / full_speed[min(batch, full_batch)]}


def bench_step(model: str, device: str, batch_sizes: Sequence[int], prompt_len: int) -> Iterator[Line]:
    """Time decode steps of a full cache, with one and with two pending steps (see Engine.launch).

    `gpu_ms` is what the kernels of a step take; the rest of `wall_ms` the device is idle.
    """
    from retain.bench.engines import greedy_request, random_prompts
    from retain.kv.eviction import policies
    from retain.llm import LLM

    max_batch = max(batch_sizes)
    llm = LLM(
        model,
        device=device,
        prefix_cache="off",
        max_model_len=prompt_len + 256,
        max_running_requests=max_batch,
        max_batched_tokens=max(2048, max_batch + 1),
    )
    for batch in batch_sizes:
        for depth in (1, 2):
            llm.engine.depth = depth
            prompts = random_prompts(llm.spec.vocab_size, prompt_len, batch, seed=0)
            requests = [greedy_request(llm.cache, prompt, policies.parse("full"), 200) for prompt in prompts]
            llm.engine.add(*requests)
            while any(not request.output_tokens for request in requests):
                llm.engine.step()
            for _ in range(16):  # captures graphs
                llm.engine.step()
            times = [time_call(llm.engine.step) for _ in range(48)]
            line = {"model": model, "batch": batch, "depth": depth, "wall_ms": 1e3 * mean(times)}
            if device == "cuda":
                line["gpu_ms"] = kernel_ms(llm.engine.step, 8)
            yield line
            for request in requests:
                llm.engine.cancel(request)
            while llm.engine.has_unfinished_requests:
                llm.engine.step()
    llm.close()


def time_call(function: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    started = perf_counter()
    function()
    return perf_counter() - started


def kernel_ms(function: Callable[[], Any], repeats: int) -> float:
    """Return the milliseconds of the device in a call: the sum over its kernels and copies."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            function()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 1e3 / repeats


def bench_speculate(model: str, device: str, prompt_len: int) -> Iterator[Line]:
    """Measure decode speed after a long prompt, with and without drafts of the model itself on a few pages."""
    from retain.llm import LLM
    from retain.processing.input import GenerateRequest
    from retain.sampling_params import SamplingParams

    params, plain = SamplingParams(max_tokens=128, temperature=0, ignore_eos=True), 0.0
    for drafter in (None, "self:k=4", "self:k=4,budget=1024", "self:k=4,dtype=int4", "self"):
        llm = LLM(
            model,
            device=device,
            max_model_len=prompt_len + 256,
            max_running_requests=2,
            speculate=drafter,
            prefix_cache="off",
        )
        rng = torch.Generator().manual_seed(0)
        prompt = torch.randint(300, llm.spec.vocab_size, (prompt_len,), generator=rng).tolist()
        output = llm.generate_from_requests([GenerateRequest(prompt, params)])[0]
        speed = output.decode_tok_s
        plain = plain or speed
        line = {"model": model, "prompt": prompt_len, "drafter": drafter or "none", "tok_s": speed}
        yield line | {"speedup": speed / plain} | (output.speculate or {})
        llm.close()
        del llm
        gc.collect()  # the engine's objects refer to each other
        if device == "cuda":
            torch.cuda.empty_cache()


def bench_transformers(model: str, device: str, prompt_len: int, output_len: int) -> Iterator[Line]:
    """Measure the decode speed of transformers on the same shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from retain.models.resolve import resolve_model

    config = AutoConfig.from_pretrained(resolve_model(model))
    with torch.device(device):
        peer = AutoModelForCausalLM.from_config(config, dtype=BF16).eval()
    for batch in (1, 4):
        ids = torch.randint(300, config.vocab_size, (batch, prompt_len), device=device)
        times = []
        for n in (1, output_len + 1):
            started = perf_counter()
            with torch.no_grad():
                peer.generate(ids, max_new_tokens=n, min_new_tokens=n, do_sample=False).tolist()  # tolist waits
            times.append(perf_counter() - started)
        speed = batch * output_len / (times[1] - times[0])
        yield {"engine": "transformers", "model": model, "prompt": prompt_len, "batch": batch, "tok_s": speed}


# ---- all parts ---------------------------------------------------------------------------------------------------

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
    benches: dict[str, Callable[[], Iterator[Line]]] = {
        "all": lambda: run_all(args.device, args.model, args.quick),
        "compile": lambda: compile_kernels(args.arch, args.quick),
        "attention": lambda: bench_attention(False),
        "mass": lambda: bench_attention(True),
        "step": lambda: bench_step(args.model, args.device, (1, 4) if args.quick else (1, 32, 128), args.input_len),
        "decode": lambda: bench_decode(args.model, args.device, args.kv_memory, args.input_len, args.output_len),
        "speculate": lambda: bench_speculate(args.model, args.device, args.speculate_input_len),
        "peer": lambda: bench_transformers(args.model, args.device, args.input_len, 64),
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
