"""Time what layers launch beside attention: the choice of victims, experts, short convolutions, linear attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from tools.gpu_bench.cases import BF16
from tools.gpu_bench.timing import KernelBench, Line, check, relative_difference

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
    from retain.kernels.eviction_order import eviction_key

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
    from retain.kernels.eviction_order import eviction_key

    found = triton.select_victims(priority, pos, lengths, 4, last, n)
    keys = eviction_key(priority, pos, 4, last)[:, : int(lengths[0])]
    expected = keys.topk(n, largest=False).indices.gather(1, keys.topk(n, largest=False).values.argsort(1))
    return [float((found != expected).any(1).float().mean())]


def bench_experts(bench: KernelBench) -> Iterator[Line]:
    """Time the experts of a layer of Qwen3-30B-A3B, beside a dense layer of as many operations."""
    width, size, num_experts, top_k = (64, 32, 8, 2) if bench.quick else (2048, 768, 128, 8)
    yield {"experts": num_experts, **check(lambda: compare_experts(bench))}
    bandwidth = bench.measure_bandwidth()
    weights = make_experts(width, size, num_experts, top_k, bench.device)
    for T in (1, 3) if bench.quick else (1, 32, 2048):
        # A graph launches each of several choices, so that no cache holds the weights that it reads.
        inputs = [torch.randn(T, width, device=bench.device).to(BF16) for _ in range(4)]
        scores = [torch.randn(T, num_experts, device=bench.device).to(BF16) for _ in range(4)]
        chosen = sum(count_experts(s, top_k) for s in scores) / len(scores)
        expert_bytes = 3 * width * size * 2
        functions = {
            "experts": cycle_calls(weights.mix, inputs, scores),
            "dense": dense_layer(inputs, width, size * top_k, bench.device),
        }
        flops = 2 * T * top_k * 3 * width * size
        for name, found in bench.time(functions).items():
            line: Line = {"rows": T, "kernel": name, **found}
            if "us" in found:
                num_bytes = expert_bytes * (chosen if name == "experts" else top_k)
                line |= {"share": num_bytes / found["us"] * 1e6 / bandwidth, "tflop_s": flops / found["us"] / 1e6}
            yield line


@dataclass(frozen=True)
class RandomExperts:
    """The weights of a layer of experts."""

    weights: Any

    def mix(self, x: Tensor, scores: Tensor) -> Tensor:
        """Return the sums of the chosen experts."""
        from retain.kernels.triton.experts import mix_experts

        return mix_experts(x, scores, self.weights)


def make_experts(
    width: int, size: int, num_experts: int, top_k: int, device: torch.device, dtype: torch.dtype = BF16
) -> RandomExperts:
    """Return experts with random weights."""
    from retain.kernels.experts import Experts, Router
    from retain.kernels.reference.experts import ExpertWeights

    gate_up = (torch.randn(num_experts * 2 * size, width, device=device) * width**-0.5).to(dtype)
    down = (torch.randn(num_experts * width, size, device=device) * size**-0.5).to(dtype)
    experts = Experts(num_experts, gate_up, down, Router(top_k), "silu")
    return RandomExperts(ExpertWeights(experts, gate_up, down, None, None))


def count_experts(scores: Tensor, top_k: int) -> int:
    """Return how many experts some rows choose together."""
    return len(scores.float().topk(top_k, -1).indices.unique())


def cycle_calls(function: Callable[..., Tensor], *arguments: list[Tensor]) -> Callable[[], Tensor]:
    """Return a function whose calls take the arguments in turns."""
    turns = cycle(zip(*arguments, strict=True))
    return lambda: function(*next(turns))


def dense_layer(inputs: list[Tensor], width: int, size: int, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that multiplies rows with the matrices of a gated layer, a layer of its own at each call."""
    shapes = ((2 * size, width), (width, size))
    weights = [[torch.randn(shape, device=device).to(BF16) for shape in shapes] for _ in inputs]

    def compute(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = x @ up.T
        return torch.nn.functional.silu(hidden[:, :size]) * hidden[:, size:] @ down.T

    return cycle_calls(compute, inputs, [up for up, _ in weights], [down for _, down in weights])


def compare_experts(bench: KernelBench) -> list[float]:
    """Return how far a small layer of experts is from float32."""
    from retain.kernels.reference.experts import ExpertWeights, mix_experts

    dtype = BF16 if bench.is_gpu else torch.float32  # the interpreter multiplies bfloat16 as integers
    small = make_experts(64, 32, 8, 2, bench.device, dtype)
    x, scores = (torch.randn(21, n, device=bench.device).to(dtype) for n in (64, 8))
    w = small.weights
    exact = ExpertWeights(w.experts, w.gate_up.float().cpu(), w.down.float().cpu(), None, None)
    expected = mix_experts(x.float().cpu(), scores.float().cpu(), exact)
    return [relative_difference(small.mix(x, scores).cpu(), expected)]
