"""Time the attention of one layer: pools of every dtype, the cost of scoring, prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.gpu_bench.cases import (
    BF16,
    FP8,
    INT4,
    QUICK_SHAPES,
    SHAPES,
    AttentionInputs,
    attend_in_float64,
    h2o_scoring,
    keyformer_scoring,
    make_inputs,
    pools,
    requests_in,
)
from tools.gpu_bench.library_prompts import compare_library_prompts
from tools.gpu_bench.timing import KernelBench, Line, check, relative_difference

KEYFORMER_PROMPTS = {"keyformer": 1, "keyformer, noise of 16 positions": 16, "keyformer, noise drawn once": 0}
POOLS = {"bf16": BF16, "int8": torch.int8, "k8v4": torch.uint8, "int4": INT4, "fp8": FP8}
OTHER_OPTIONS = [  # how a launch may be compiled
    {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
    for warps, stages, registers in ((4, 3, 96), (2, 3, 168), (2, 5, 168), (4, 5, 96), (4, 3, 128))
]
MEMORY = 2**30  # bytes of K and V of a step, more than the caches of a GPU hold


def bench_pools(bench: KernelBench) -> Iterator[Line]:
    """Time the attention of a decode step as a share of the read bandwidth, by the bytes of K, V and scales.

    After pools of each dtype come heads of different lengths, then short and long caches.
    """
    shapes = QUICK_SHAPES if bench.quick else SHAPES
    slots = 128 if bench.quick else 4096
    yield from check_attention(bench)
    bandwidth = bench.measure_bandwidth()
    yield {"bandwidth_gb_s": bandwidth / 1e9, "device": device_name(bench)}
    for shape, sizes in shapes.items():
        for name, dtype in POOLS.items():
            batch = 2 if bench.quick else requests_in(MEMORY, sizes, slots, dtype)
            inputs = make_inputs(sizes, slots, batch, dtype, bench.device)
            yield from time_attention(bench, inputs, bandwidth, {"shape": shape, "pool": name, "slots": slots})
        batch = 2 if bench.quick else requests_in(MEMORY, sizes, slots, BF16)
        inputs = make_inputs(sizes, slots, batch, BF16, bench.device, demoted=True)
        yield from time_attention(bench, inputs, bandwidth, {"shape": shape, "pool": "half demoted", "slots": slots})
    for shape, sizes in shapes.items():
        batch = 2 if bench.quick else requests_in(MEMORY, sizes, slots, BF16)
        inputs = make_inputs(sizes, slots, batch, BF16, bench.device, is_uneven=True)
        yield from time_attention(bench, inputs, bandwidth, {"shape": shape, "pool": "bf16", "slots": "uneven"})
    for slots, batch in ((64, 2),) if bench.quick else ((256, 32), (256, 128), (4096, 1), (65536, 4)):
        inputs = make_inputs(shapes["llama"], slots, batch, BF16, bench.device, holes=0)
        yield from time_attention(bench, inputs, bandwidth, {"shape": "llama", "pool": "bf16, dense", "slots": slots})


def time_attention(bench: KernelBench, inputs: AttentionInputs, bandwidth: float, line: Line) -> Iterator[Line]:
    """Time the attention of a step, and torch's over as many slots without pages."""
    functions = {"retain": inputs.attend()}
    if inputs.kv.dtype == BF16 and not inputs.tables.demoted and line["slots"] != "uneven":
        functions["torch SDPA"] = torch_attention(inputs)
    for name, found in bench.time(functions).items():
        share = {"share": inputs.num_bytes / found["us"] * 1e6 / bandwidth} if "us" in found else {}
        yield {**line, "batch": len(inputs.tables.rows), "kernel": name, **found, **share}


def torch_attention(inputs: AttentionInputs) -> Callable[[], Tensor]:
    """Return a function that attends with torch to as many slots, in memory without pages."""
    q = inputs.q
    (B, H, D), G = q.shape, inputs.tables.pages.shape[1]
    slots = inputs.tables.max_pages * inputs.kv.page_size
    k, v = (torch.randn(B, G, slots, D, device=q.device, dtype=BF16) for _ in range(2))
    return lambda: F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=H > G)


def bench_options(bench: KernelBench) -> Iterator[Line]:
    """Time decode attention compiled in other ways, and with one split a program, beside what the engine does."""
    from retain.kernels.triton import launches

    slots, sizes = (128, QUICK_SHAPES["llama"]) if bench.quick else (4096, SHAPES["llama"])
    for name, dtype in POOLS.items():
        batch = 2 if bench.quick else requests_in(MEMORY // 2, sizes, slots, dtype)
        attend = make_inputs(sizes, slots, batch, dtype, bench.device).attend()
        ways: dict[str, dict[str, Any]] = {"one split a program": {"ENOUGH_PROGRAMS": 2**30}}
        for options in OTHER_OPTIONS[:1] if bench.quick else OTHER_OPTIONS:
            way = ", ".join(f"{key} {n}" for key, n in options.items())
            ways[way] = {"decode_options": lambda *_, options=options: options}
        functions = {"retain": attend}
        functions |= {way: partial(call_with, launches, changes, attend) for way, changes in ways.items()}
        expected = attend().double()
        for way, function in functions.items():
            found = check(lambda function=function, expected=expected: [relative_difference(function(), expected)])
            yield {"case": way, "pool": name, **found}
        yield from compare(bench, functions, {"shape": "llama", "pool": name, "slots": slots, "batch": batch})


def call_with(module: Any, changes: Mapping[str, Any], function: Callable[[], Any]) -> Any:
    """Call a function while names of a module have other values."""
    with patch.multiple(module, **changes):
        return function()


def bench_mass(bench: KernelBench) -> Iterator[Line]:
    """Time attention that scores over attention that does not; both over demoted tokens, too."""
    shapes = QUICK_SHAPES if bench.quick else SHAPES
    slots = 128 if bench.quick else 4096
    for shape, sizes in shapes.items():
        batch = 2 if bench.quick else 32 if shape == "llama" else 16
        inputs = make_inputs(sizes, slots, batch, BF16, bench.device)
        h2o = h2o_scoring(batch, batch)
        functions = {
            "plain": inputs.attend(),
            "h2o": inputs.attend(h2o),
            "keyformer": inputs.attend(keyformer_scoring(batch, batch)),
        }
        yield from compare(bench, functions, {"shape": shape, "slots": slots, "batch": batch})
        inputs = make_inputs(sizes, slots, batch, BF16, bench.device, demoted=True)
        functions = {"plain": inputs.attend(), "h2o": inputs.attend(h2o)}
        yield from compare(bench, functions, {"shape": shape, "slots": "half demoted", "batch": batch})


def compare(bench: KernelBench, functions: Mapping[str, Callable[[], Any]], line: Line) -> Iterator[Line]:
    """Time functions, and divide their times by that of the first."""
    times = bench.time(functions)
    first = next(iter(times.values())).get("us")
    for name, found in times.items():
        ratio = {"over_first": found["us"] / first} if first and "us" in found else {}
        yield {**line, "kernel": name, **found, **ratio}


def bench_prompts(bench: KernelBench) -> Iterator[Line]:
    """Time the attention of a prompt of 8192 tokens in one layer, and of its last 2048, with and without scores."""
    prompt_len, chunk = (192, 64) if bench.quick else (8192, 2048)
    yield from check_prompts(bench)
    for sizes in (QUICK_SHAPES if bench.quick else SHAPES).values():
        yield from compare_library_prompts(bench, sizes, prompt_len)
    for shape, sizes in (QUICK_SHAPES if bench.quick else SHAPES).items():
        for tokens in (prompt_len, chunk):
            inputs = make_inputs(sizes, prompt_len, 1, BF16, bench.device, tokens=tokens, holes=0)
            functions = {
                "plain": inputs.attend(),
                "torch SDPA, causal": torch_prompt(inputs),
                "h2o": inputs.attend(h2o_scoring(tokens, 1)),
            }
            for kind, period in KEYFORMER_PROMPTS.items():
                functions[kind] = inputs.attend(keyformer_scoring(tokens, 1, temperature=1.0, noise_period=period))
            H, _, D = sizes
            flops = 4 * H * D * tokens * (prompt_len - tokens / 2)  # a query sees half of its own chunk
            for line in compare(bench, functions, {"shape": shape, "tokens": tokens, "slots": prompt_len}):
                yield {**line, **({"tflop_s": flops / line["us"] / 1e6} if "us" in line else {})}


def torch_prompt(inputs: AttentionInputs) -> Callable[[], Tensor]:
    """Return a function that attends causally with torch to as many tokens, in memory without pages."""
    from torch.nn.attention.bias import causal_lower_right

    q = inputs.q.transpose(0, 1)[None]
    (_, H, T, D), G = q.shape, inputs.tables.pages.shape[1]
    slots = inputs.tables.max_pages * inputs.kv.page_size
    k, v = (torch.randn(1, G, slots, D, device=q.device, dtype=BF16) for _ in range(2))
    if T == slots:
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H > G)
    k, v = (x.repeat_interleave(H // G, 1) for x in (k, v))  # this mask allows no shared heads
    mask = causal_lower_right(T, slots)
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


# ---- checks ------------------------------------------------------------------------------------------------------


def check_attention(bench: KernelBench) -> Iterator[Line]:
    """Compare the attention of a small step with float64, for each pool and scoring."""
    sizes = QUICK_SHAPES["llama"] if bench.quick else SHAPES["llama"]
    slots = 128 if bench.quick else 1536
    for name, dtype in POOLS.items():
        inputs = make_inputs(sizes, slots, 2, dtype, bench.device, is_uneven=True)
        yield from compare_with_float64(bench, name, inputs, ("plain",))
    inputs = make_inputs(sizes, slots, 2, BF16, bench.device, is_uneven=True)
    yield from compare_with_float64(bench, "bf16", inputs, ("h2o", "keyformer"))
    inputs = make_inputs(sizes, slots, 2, BF16, bench.device, demoted=True)
    yield from compare_with_float64(bench, "half demoted", inputs, ("plain", "h2o"))


def check_prompts(bench: KernelBench) -> Iterator[Line]:
    """Compare the attention of a short prompt, and of its end, with float64."""
    sizes = QUICK_SHAPES["llama"] if bench.quick else SHAPES["llama"]
    slots = 128 if bench.quick else 1536
    for tokens in (slots, slots // 2 - 5):
        inputs = make_inputs(sizes, slots, 1, BF16, bench.device, tokens=tokens, holes=0)
        yield from compare_with_float64(bench, f"{tokens} of {slots} tokens", inputs, ("plain", "h2o", "keyformer"))


def compare_with_float64(
    bench: KernelBench, name: str, inputs: AttentionInputs, scorings: tuple[str, ...]
) -> Iterator[Line]:
    """Yield how far outputs are from float64, and changes of masses; `wrong` where it is more than rounding."""
    T, B = len(inputs.q), len(inputs.tables.rows)
    scored = {"plain": None, "h2o": h2o_scoring(T, B), "keyformer": keyformer_scoring(T, B)}
    for kind in scorings:
        found = check(partial(compare_attention, bench, inputs, scored[kind]))
        yield {"case": name, "scoring": kind, **found}


def compare_attention(bench: KernelBench, inputs: AttentionInputs, scoring: Any) -> list[float]:
    """Return how far the output is from float64, and, of each pool, the change of the masses."""
    masses = [kv.mass for kv, _, _ in pools(inputs)]
    for mass in masses:
        mass.zero_()
    out = inputs.attend(scoring)()
    bench.synchronize()
    expected, changes = attend_in_float64(inputs, scoring)
    differences = [relative_difference(out, expected)]
    if scoring:
        differences += [relative_difference(m, c) for m, c in zip(masses, changes, strict=True)]
    return differences


def device_name(bench: KernelBench) -> str:
    """Return the name of the GPU, or that there is none."""
    return torch.cuda.get_device_name() if bench.is_gpu else "none: Triton's interpreter"
