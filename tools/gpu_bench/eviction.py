"""Time the choice of victims."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tools.gpu_bench.cases import BF16
from tools.gpu_bench.timing import KernelBench, Line, check

VICTIM_CASES = ((1024, 4160, 16), (256, 1088, 16), (1024, 4608, 448))  # lists, slots, victims of each
QUICK_VICTIM_CASES = ((4, 160, 3),)
NUM_PROTECTED = 40  # slots at the end of each list that go last


def bench_evict(bench: KernelBench) -> Iterator[Line]:
    """Time the choice of victims, and torch.topk beside; the last case is a chunk of a streamed prompt.

    The call uploads the lengths of the lists, so it is in no graph; its time is that of its kernels and copies.
    """
    from retain.kernels import triton

    for lists, slots, n in QUICK_VICTIM_CASES if bench.quick else VICTIM_CASES:
        priority = torch.rand(lists, slots, device=bench.device)
        pos = torch.arange(slots, device=bench.device, dtype=torch.int32).repeat(lists, 1)
        pos[:, 5::97] = -1
        lengths = torch.full((lists,), slots - 8, dtype=torch.int32)
        last = slots - NUM_PROTECTED

        def select(
            priority: Tensor = priority, pos: Tensor = pos, lengths: Tensor = lengths, last: int = last, n: int = n
        ) -> Tensor:
            return triton.select_victims(priority, pos, lengths, 4, last, n)

        def topk(priority: Tensor = priority, n: int = n) -> Tensor:
            return priority.topk(n, largest=False).indices

        line = {"lists": lists, "slots": slots, "n": n}
        yield {**line, **check(lambda x=(priority, pos, lengths, last, n): compare_victims(*x))}
        for name, found in bench.time({"select_victims": select, "torch.topk": topk}, in_graphs=False).items():
            yield {**line, "kernel": name, **found}
    yield from bench_punch(bench)


def bench_punch(bench: KernelBench) -> Iterator[Line]:
    """Time a whole eviction: rows of MPT-7B with 4160 slots lose 16 in each layer and head, by their masses."""
    from retain.kernels import triton
    from retain.kernels.api import EvictionLists

    B, L, G, n, victims = (2, 2, 2, 3, 3) if bench.quick else (13, 32, 32, 65, 16)
    S = 64
    kv = triton.allocate(1 + B * L * G * n, S, 16, BF16, 1, bench.device)  # no K and V are read
    pages = 1 + torch.randperm(B * L * G * n, device=bench.device).int().view(B, L, G, n)
    kv.pos[pages.long()] = torch.arange(n * S, device=bench.device, dtype=torch.int32).view(n, S)
    kv.mass.uniform_()
    lists = EvictionLists(
        pages=pages,
        rows=torch.arange(B, device=bench.device, dtype=torch.int32),
        layers=torch.arange(L, device=bench.device, dtype=torch.int32),
        slots_used=torch.full((B, L, G), n * S, device=bench.device, dtype=torch.int32),
        evictable=torch.tensor([[4, n * S - NUM_PROTECTED]], device=bench.device, dtype=torch.int32).repeat(B, 1),
        by_mass=torch.ones(B, device=bench.device, dtype=torch.int32),
        max_slots=n * S,
    )
    holes = torch.zeros(B, L, G, victims, device=bench.device, dtype=torch.int32)
    line = {"lists": B * L * G, "slots": n * S, "n": victims}
    yield {**line, **check(lambda: compare_holes(kv, lists, holes, victims))}
    for name, found in bench.time({"punch": lambda: triton.punch(kv, lists, holes, victims)}).items():
        yield {**line, "kernel": name, **found}


def compare_holes(kv: Any, lists: Any, holes: Tensor, n: int) -> list[float]:
    """Return the share of lists in which `punch` makes other holes than the definition."""
    from retain.kernels import triton
    from retain.kernels.slots.eviction_order import eviction_key

    S = kv.page_size
    slots = (lists.pages.long()[..., None] * S + torch.arange(S, device=kv.device)).flatten(0, 2).flatten(1)
    pos = kv.pos.view(-1)[slots]
    first, last = lists.evictable[0].tolist()
    keys = eviction_key(kv.mass.view(-1)[slots], pos, first, last)
    expected = slots.gather(1, keys.topk(n, largest=False).indices).sort(1).values
    triton.punch(kv, lists, holes, n)
    found = holes.flatten(0, 2).long().sort(1).values
    are_equal = (found == expected).all(1) & (kv.pos.view(-1)[expected] == -1).all(1)
    return [float((~are_equal).float().mean())]


def compare_victims(priority: Tensor, pos: Tensor, lengths: Tensor, last: int, n: int) -> list[float]:
    """Return the share of lists whose victims are not those of the definition."""
    from retain.kernels import triton
    from retain.kernels.slots.eviction_order import eviction_key

    found = triton.select_victims(priority, pos, lengths, 4, last, n)
    keys = eviction_key(priority, pos, 4, last)[:, : int(lengths[0])]
    expected = keys.topk(n, largest=False).indices.gather(1, keys.topk(n, largest=False).values.argsort(1))
    return [float((found != expected).any(1).float().mean())]
