"""Time the attention of a decode step: memory bandwidth, peers, the cost of scoring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tools.gpu_bench.cases import BF16, demoted_pages, keyformer_scoring
from tools.gpu_bench.timing import Line, measure_bandwidth, time_graphs

HEAD_SHAPES = {"llama-3.1-8b": (32, 8, 128), "mpt-7b": (32, 32, 128)}  # H, G, D
CACHE_LENS = (4096, 8192, 16384, 32768, 65536)


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
