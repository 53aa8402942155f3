"""Time products with quantized weights, beside torch's with dense ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tools.gpu_bench.cases import BF16
from tools.gpu_bench.timing import NUM_COPIES, KernelBench, Line, check, cycle_calls, relative_difference

if TYPE_CHECKING:
    from retain.kernels.triton.packed_weight import DeviceWeight
    from retain.kernels.weights.quantized import QuantizedWeight

SHAPES = ((28672, 4096), (14336, 4096), (4096, 14336), (6144, 4096), (128256, 4096))  # [out, in] of Llama-3.1-8B
QUICK_SHAPES = ((80, 96),)
ROWS = (1, 16, 64, 128, 2048)
QUICK_ROWS = (1, 3)
NUMBERS = {  # of each kind: the first, the last, and how far they are from 0
    "Int4": (0, 15, 4), "Int8": (-127, 127, 64), "Int6": (-32, 31, 16), "Int5": (0, 31, 8), "IQ4": (0, 15, 60),
    "MXFP4": (0, 15, 6), "NVFP4": (0, 15, 6),
}  # fmt: skip
KINDS = tuple(NUMBERS)


def bench_weights(bench: KernelBench) -> Iterator[Line]:
    """Time a linear layer with quantized and bfloat16 weights; each is compared with float32 before.

    One shape is timed with all kinds of weights, the others with those that are made while loading.
    """
    from retain.kernels.triton import packed_weight

    bandwidth = bench.measure_bandwidth()
    for out, width in QUICK_SHAPES if bench.quick else SHAPES:
        sizes = QUICK_ROWS if bench.quick else ROWS[:3] if out > 100_000 else ROWS
        packed = {}
        for kind in KINDS if bench.quick or (out, width) == SHAPES[1] else KINDS[:2]:
            weight = random_weight(out, width, kind, bench.device)
            yield {"out": out, "in": width, "kind": kind, **check(partial(compare_products, weight, sizes))}
            packed[kind] = copies_of(pack(weight, BF16))
        dense = [(torch.randn(out, width, device=bench.device) * width**-0.5).to(BF16) for _ in range(NUM_COPIES)]
        for T in sizes:
            inputs = [torch.randn(T, width, device=bench.device).to(BF16) for _ in range(NUM_COPIES)]
            functions = {
                k: cycle_calls(packed_weight.linear, inputs, w, [None] * NUM_COPIES) for k, w in packed.items()
            }
            functions["torch.mm"] = cycle_calls(torch.mm, inputs, [w.T for w in dense])
            num_bytes = {k: w[0].nbytes for k, w in packed.items()} | {"torch.mm": dense[0].nbytes}
            for name, found in bench.time(functions).items():
                line: Line = {"out": out, "in": width, "rows": T, "kernel": name, **found}
                if "us" in found:
                    line |= {"share": num_bytes[name] / found["us"] * 1e6 / bandwidth}
                    line |= {"tflop_s": 2 * T * out * width / found["us"] / 1e6}
                yield line


def random_weight(out: int, width: int, kind: str, device: torch.device) -> QuantizedWeight:
    """Return random numbers in groups with scales, made on the device."""
    from retain.kernels.weights import quantized

    cls: type[QuantizedWeight] = getattr(quantized, kind)
    first, last, spread = NUMBERS[kind]
    groups = out, width // cls.GROUP
    scale = (torch.rand(groups, device=device) * width**-0.5 / spread).half()
    q = torch.randint(first, last + 1, (out, width), device=device, dtype=torch.int8 if first < 0 else torch.uint8)
    if not issubclass(cls, quantized.ShiftedWeight):
        return cls(q, scale)
    shift = (-last / 2 * scale.float() * (0.8 + 0.4 * torch.rand(groups, device=device))).half()
    return cls(q, scale, shift)


def pack(weight: QuantizedWeight, dtype: torch.dtype) -> DeviceWeight:
    """Return a packed matrix, where the other one is."""
    from retain.kernels.triton import packed_weight

    packed = packed_weight.pack_weight(weight, dtype, weight.q.device)
    assert isinstance(packed, packed_weight.DeviceWeight)
    return packed


def copies_of(packed: DeviceWeight) -> list[DeviceWeight]:
    """Return copies of a packed matrix."""
    return [replace(packed, words=packed.words.clone(), scales=packed.scales.clone()) for _ in range(NUM_COPIES)]


def compare_products(weight: QuantizedWeight, sizes: tuple[int, ...]) -> list[float]:
    """Return how far products of some rows are from those in float32, and the same with a bias and an addition."""
    from retain.kernels.triton import packed_weight

    device = weight.q.device
    out, width = weight.shape
    packed, dense = pack(weight, BF16), weight.dequantize()
    differences = []
    for T in sizes:
        x, y, bias = (torch.randn(size, device=device).to(BF16) for size in ((T, width), (T, out), (out,)))
        expected: Tensor = x.float() @ dense.T
        differences.append(relative_difference(packed_weight.linear(x, packed, None), expected))
        expected += bias + y
        differences.append(relative_difference(packed_weight.linear(x, packed, bias, y), expected))
    return differences


QUICK_WEIGHT_CASES = [("Int4", BF16), ("MXFP4", BF16)]
WEIGHT_CASES = [(kind, dtype) for dtype in (BF16, torch.float16, torch.float32) for kind in KINDS]  # dtype of the rows


def launch_weight_kernels(kind: str, dtype: torch.dtype) -> None:
    """Launch the kernels of a packed weight for each block of rows, and for a prompt; and those of two experts."""
    from retain.kernels.triton import packed_weight
    from retain.kernels.triton.experts import GroupedProducts

    weight = random_weight(256, 2048, kind, torch.device("cpu"))
    packed = pack(weight, dtype)
    experts = packed_weight.pack_weight(weight, dtype, torch.device("cpu"), 2)
    for T in (1, 32, 64):
        x, y = (torch.ones(T, n, dtype=dtype) for n in (2048, 256))
        packed_weight.linear(x, packed, None)
        packed_weight.linear(x, packed, y[0], y)
    for T in (1, 32, 64, 128):
        chosen = torch.zeros(T, 2, dtype=torch.int64)
        GroupedProducts(chosen, 2).linear(torch.ones(T, 2048, dtype=dtype), experts, torch.ones(256, dtype=dtype), 2)
    packed_weight.unpack_rows(packed, None, dtype)
    packed_weight.look_up(torch.ones(16, dtype=torch.int64), packed, dtype)
