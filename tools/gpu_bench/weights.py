"""Time products with quantized weights, beside torch's with dense ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tools.gpu_bench.cases import BF16
from tools.gpu_bench.layers import cycle_calls
from tools.gpu_bench.timing import KernelBench, Line, check, relative_difference

if TYPE_CHECKING:
    from retain.kernels.quantized import Int4, Int8, QuantizedWeight
    from retain.kernels.triton.packed_weight import PackedMatrix

SHAPES = ((28672, 4096), (14336, 4096), (4096, 14336), (6144, 4096), (128256, 4096))  # [out, in] of Llama-3.1-8B
QUICK_SHAPES = ((80, 96),)
ROWS = (1, 16, 64, 128, 2048)
QUICK_ROWS = (1, 3)
NUM_COPIES = 4  # a graph launches each of several matrices, so that no cache holds what it reads


def bench_weights(bench: KernelBench) -> Iterator[Line]:
    """Time a linear layer with int4, int8 and bfloat16 weights; each is compared with float32 before."""
    from retain.kernels.triton import packed_weight

    bandwidth = bench.measure_bandwidth()
    for out, width in QUICK_SHAPES if bench.quick else SHAPES:
        sizes = QUICK_ROWS if bench.quick else ROWS[:3] if out > 100_000 else ROWS
        packed = {}
        for bits in (4, 8):
            weight = random_weight(out, width, bits, bench.device)
            yield {"out": out, "in": width, "bits": bits, **check(partial(compare_products, weight, sizes))}
            packed[bits] = copies_of(pack(weight, BF16))
        dense = [(torch.randn(out, width, device=bench.device) * width**-0.5).to(BF16) for _ in range(NUM_COPIES)]
        for T in sizes:
            inputs = [torch.randn(T, width, device=bench.device).to(BF16) for _ in range(NUM_COPIES)]
            functions = {f"int{b}": cycle_calls(packed_weight.linear, inputs, w, [None] * 4) for b, w in packed.items()}
            functions["torch.mm"] = cycle_calls(torch.mm, inputs, [w.T for w in dense])
            num_bytes = {f"int{b}": w[0].nbytes for b, w in packed.items()} | {"torch.mm": dense[0].nbytes}
            for name, found in bench.time(functions).items():
                line: Line = {"out": out, "in": width, "rows": T, "kernel": name, **found}
                if "us" in found:
                    line |= {"share": num_bytes[name] / found["us"] * 1e6 / bandwidth}
                    line |= {"tflop_s": 2 * T * out * width / found["us"] / 1e6}
                yield line


def random_weight(out: int, width: int, bits: int, device: torch.device) -> Int4 | Int8:
    """Return random numbers in groups with scales, made on the device."""
    from retain.kernels.quantized import GROUP_SIZE, Int4, Int8

    groups = out, width // GROUP_SIZE
    scale = (torch.rand(groups, device=device) * width**-0.5 / (4 if bits == 4 else 64)).half()
    if bits == 8:
        return Int8(torch.randint(-127, 128, (out, width), device=device, dtype=torch.int8), scale)
    shift = (-7.5 * scale.float() * (0.8 + 0.4 * torch.rand(groups, device=device))).half()
    return Int4(torch.randint(0, 16, (out, width), device=device, dtype=torch.uint8), scale, shift)


def pack(weight: QuantizedWeight, dtype: torch.dtype) -> PackedMatrix:
    """Return a packed matrix, where the other one is."""
    from retain.kernels.triton import packed_weight

    packed = packed_weight.pack_weight(weight, dtype, weight.q.device)
    assert isinstance(packed, packed_weight.PackedMatrix)
    return packed


def copies_of(packed: PackedMatrix) -> list[PackedMatrix]:
    """Return copies of a packed matrix."""
    return [replace(packed, words=packed.words.clone(), scales=packed.scales.clone()) for _ in range(NUM_COPIES)]


def compare_products(weight: Int4 | Int8, sizes: tuple[int, ...]) -> list[float]:
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


KINDS = ("Int4", "Int8", "Int6", "Int5", "IQ4", "MXFP4", "NVFP4")
WEIGHT_CASES = [(kind, dtype) for dtype in (BF16, torch.float16, torch.float32) for kind in KINDS]  # dtype of the rows


def launch_weight_kernels(kind: str, dtype: torch.dtype) -> None:
    """Launch the kernels of a packed weight for each block of rows, and for a prompt."""
    from retain.kernels import quantized
    from retain.kernels.triton import packed_weight

    cls: type[quantized.QuantizedWeight] = getattr(quantized, kind)
    names = ("scale", "shift") if issubclass(cls, quantized.ShiftedWeight) else ("scale",)
    q = torch.zeros(256, 2048, dtype=torch.int8 if kind in ("Int6", "Int8") else torch.uint8)
    packed = pack(cls(q, **{name: torch.ones(256, 2048 // cls.GROUP, dtype=torch.float16) for name in names}), dtype)
    for T in (1, 32, 64):
        x, y = (torch.ones(T, n, dtype=dtype) for n in (2048, 256))
        packed_weight.linear(x, packed, None)
        packed_weight.linear(x, packed, y[0], y)
    packed_weight.unpack_rows(packed, None, dtype)
    packed_weight.look_up(torch.ones(16, dtype=torch.int64), packed, dtype)
