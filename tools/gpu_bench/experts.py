"""Time the experts of a layer, dense and in several formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tools.gpu_bench.cases import BF16
from tools.gpu_bench.timing import NUM_COPIES, KernelBench, Line, check, cycle_calls, relative_difference
from tools.gpu_bench.weights import random_weight

if TYPE_CHECKING:
    from retain.kernels.triton.experts import DeviceExperts
    from retain.kernels.weights.quantized import QuantizedWeight

KINDS = ("dense", "Int4", "Int8", "MXFP4", "Int6")


def bench_experts(bench: KernelBench) -> Iterator[Line]:
    """Time the experts of a layer of Qwen3-30B-A3B, beside a dense layer of as many operations.

    `share` is that of the bandwidth, by the bytes of the chosen experts.
    """
    width, size, num_experts, top_k = (64, 32, 8, 2) if bench.quick else (2048, 768, 128, 8)
    for kind in KINDS:
        yield {"experts": num_experts, "kind": kind, **check(lambda kind=kind: compare_experts(bench, kind))}
    bandwidth = bench.measure_bandwidth()
    layers = {k: load_experts(make_matrices(width, size, num_experts, k, bench.device), top_k, BF16) for k in KINDS}
    for T in (1, 3) if bench.quick else (1, 32, 2048):
        inputs = [torch.randn(T, width, device=bench.device).to(BF16) for _ in range(NUM_COPIES)]
        scores = [torch.randn(T, num_experts, device=bench.device).to(BF16) for _ in range(NUM_COPIES)]
        chosen = sum(count_experts(s, top_k) for s in scores) / len(scores)
        num_bytes = {k: chosen * expert_bytes(w) for k, w in layers.items()}
        num_bytes["dense layer"] = top_k * expert_bytes(layers["dense"])
        functions = {k: cycle_calls(mix, inputs, scores, [w] * NUM_COPIES) for k, w in layers.items()}
        functions["dense layer"] = dense_layer(inputs, width, size * top_k, bench.device)
        flops = 2 * T * top_k * 3 * width * size
        for name, found in bench.time(functions).items():
            line: Line = {"rows": T, "kernel": name, **found}
            if "us" in found:
                share = num_bytes[name] / found["us"] * 1e6 / bandwidth
                line |= {"share": share, "tflop_s": flops / found["us"] / 1e6}
            yield line


def make_matrices(
    width: int, size: int, num_experts: int, kind: str, device: torch.device
) -> tuple[Tensor | QuantizedWeight, Tensor | QuantizedWeight]:
    """Return the random matrices of experts, of a kind of weights."""
    shapes = (num_experts * 2 * size, width), (num_experts * width, size)
    if kind != "dense":
        gate_up, down = (random_weight(*shape, kind, device) for shape in shapes)
        return gate_up, down
    dense_gate_up, dense_down = (torch.randn(shape, device=device) * shape[1] ** -0.5 for shape in shapes)
    return dense_gate_up, dense_down


def load_experts(
    matrices: tuple[Tensor | QuantizedWeight, Tensor | QuantizedWeight], top_k: int, dtype: torch.dtype
) -> DeviceExperts:
    """Return experts on the device of their matrices."""
    from retain.kernels.experts import Router
    from retain.kernels.triton.experts import DeviceExperts
    from retain.kernels.triton.packed_weight import pack_weight

    gate_up, down = matrices
    size = down.shape[1]
    num_experts = gate_up.shape[0] // (2 * size)
    device = gate_up.device if isinstance(gate_up, Tensor) else gate_up.q.device
    own_gate_up, own_down = (pack_weight(w, dtype, device, num_experts) for w in matrices)
    return DeviceExperts(num_experts, size, Router(top_k), "silu", True, own_gate_up, own_down, None, None)


def mix(x: Tensor, scores: Tensor, experts: DeviceExperts) -> Tensor:
    """Return the sums of the chosen experts."""
    from retain.kernels.triton.experts import mix_experts

    return mix_experts(x, scores, experts)


def expert_bytes(experts: DeviceExperts) -> float:
    """Return the bytes of one expert."""
    return (experts.gate_up.nbytes + experts.down.nbytes) / experts.num_experts


def count_experts(scores: Tensor, top_k: int) -> int:
    """Return how many experts some rows choose together."""
    return len(scores.float().topk(top_k, -1).indices.unique())


def dense_layer(inputs: list[Tensor], width: int, size: int, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that multiplies rows with the matrices of a gated layer, a layer of its own at each call."""
    shapes = ((2 * size, width), (width, size))
    weights = [[torch.randn(shape, device=device).to(BF16) for shape in shapes] for _ in inputs]

    def compute(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = x @ up.T
        return torch.nn.functional.silu(hidden[:, :size]) * hidden[:, size:] @ down.T

    return cycle_calls(compute, inputs, [up for up, _ in weights], [down for _, down in weights])


def compare_experts(bench: KernelBench, kind: str) -> list[float]:
    """Return how far a small layer of experts is from float32, for few rows and for many."""
    from retain.kernels.experts import Experts, Router
    from retain.kernels.reference.experts import mix_experts

    dtype = BF16 if bench.is_gpu else torch.float32  # the interpreter multiplies bfloat16 as integers
    matrices = make_matrices(64, 32, 8, kind, bench.device)
    small = load_experts(matrices, 2, dtype)
    gate_up, down = ((w.to(dtype).float() if isinstance(w, Tensor) else w.dequantize()).cpu() for w in matrices)
    exact = Experts(8, gate_up, down, Router(2), "silu")
    differences = []
    for T in (5, 70):
        x, scores = (torch.randn(T, n, device=bench.device).to(dtype) for n in (64, 8))
        expected = mix_experts(x.float().cpu(), scores.float().cpu(), exact)
        differences.append(relative_difference(mix(x, scores, small).cpu(), expected))
    return differences
