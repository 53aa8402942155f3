"""Time attention of tokens that look at few slots, beside attention to all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tools.gpu_bench.attention import MEMORY, POOLS, compare
from tools.gpu_bench.cases import BF16, QUICK_SHAPES, SHAPES, AttentionInputs, make_inputs, requests_in
from tools.gpu_bench.timing import KernelBench, Line, check, relative_difference

SHARES = (0.25, 0.125, 0.0625)  # of the slots, that a token chooses
ALLOWED_BYTES = {"bf16", "int8", "int4"}


def bench_looks(bench: KernelBench) -> Iterator[Line]:
    """Time looks at shares of short and long caches, of one request and of a batch, over attention to all slots.

    A line has the bytes that its kernels read of K, V and sketches, over those of attention to all slots.
    """
    sizes = QUICK_SHAPES["llama"] if bench.quick else SHAPES["llama"]
    yield from check_looks(bench)
    for slots in (256,) if bench.quick else (4096, 32768):
        for name, dtype in POOLS.items():
            if name not in ALLOWED_BYTES:
                continue
            for batch in (1, 2 if bench.quick else requests_in(MEMORY, sizes, slots, dtype)):
                inputs = with_sketches(make_inputs(sizes, slots, batch, dtype, bench.device, holes=0))
                functions = {"all slots": inputs.attend()}
                functions |= {f"{share:.2%}": look_at(inputs, int(share * slots)) for share in SHARES}
                ratios = [1.0, *(bytes_read(inputs, share) for share in SHARES)]
                lines = compare(bench, functions, {"pool": name, "slots": slots, "batch": batch})
                for line, ratio in zip(lines, ratios, strict=True):
                    yield {**line, "bytes_over_first": ratio}


def with_sketches(inputs: AttentionInputs) -> AttentionInputs:
    """Return the inputs with sketches of all slots of the tables."""
    from retain.kernels.slots.reinterpret import PageFormat
    from retain.kernels.triton import sketches

    kv = inputs.kv
    format = PageFormat(kv.page_size, kv.dtype, kv.k_dim, kv.v_dim, has_sketches=True)
    kv = kv.with_sketches(format.sketch_bytes)
    places = torch.arange(kv.page_size, device=kv.device, dtype=torch.int32)
    for pages in inputs.tables.pages.flatten().split(1024):
        sketches.write(kv, (pages[:, None] * kv.page_size + places).view(1, -1))
    return replace(inputs, kv=kv)


def look_at(inputs: AttentionInputs, num_slots: int) -> Callable[[], Tensor]:
    """Return a function in which each token looks at so many slots of a head."""
    looks = torch.full((len(inputs.q),), num_slots, dtype=torch.int32)
    return inputs.attend(tables=replace(inputs.tables, looks=looks))


def bytes_read(inputs: AttentionInputs, share: float) -> float:
    """Return the bytes of sketches and of a share of the slots, over those of all slots."""
    kv = inputs.kv
    slots = sum(x[0].numel() * x.itemsize for x in (kv.k, kv.v))
    keys = kv.k[0].numel() if kv.k.dtype == torch.uint8 else 0  # of 4 bits: they are read for the choice, too
    return share + (kv.sketch_bytes + keys) / slots


def check_looks(bench: KernelBench) -> Iterator[Line]:
    """Compare a look at half of the slots with the reference; `wrong` where it is more than rounding."""
    from retain.kernels import reference
    from retain.kernels.attention_params import AttentionParams

    sizes = QUICK_SHAPES["llama"] if bench.quick else SHAPES["llama"]
    inputs = with_sketches(make_inputs(sizes, 512, 2, BF16, bench.device))

    def compare_with_reference() -> list[float]:
        found = look_at(inputs, 256)()
        kv, tables = inputs.kv, inputs.tables
        k, v = kv.k.cpu(), kv.v.cpu()
        on_host = replace(kv, k=k, v=v, pos=kv.pos.cpu(), mass=kv.mass.cpu(), sketches=None).with_sketches(
            kv.sketch_bytes
        )
        slots = torch.arange(kv.page_size, kv.num_pages * kv.page_size)
        reference.requantize(on_host, slots, on_host, slots, on_host.pos.view(-1)[slots])
        looks = torch.full((len(inputs.q),), 256, dtype=torch.int32)
        own = replace(
            tables,
            pages=tables.pages.cpu(),
            counts=tables.counts.cpu(),
            windows=tables.windows.cpu(),
            dense=None,
            looks=looks,
        )
        params = AttentionParams(kv.k_dim**-0.5)
        expected = reference.attend(inputs.q.cpu(), on_host, own, inputs.positions.cpu(), params)
        return [relative_difference(found.cpu(), expected.double())]

    yield {"case": "half of the slots", **check(partial(compare_with_reference))}
