"""Time short convolutions and linear attention: a decode step, and a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.gpu_bench.cases import BF16
from tools.gpu_bench.timing import KernelBench, Line, check, relative_difference

RING_PAGES = 2
WINDOW = 4  # rows of a convolution


@dataclass(frozen=True)
class StateSizes:
    """The sizes of a layer of linear attention."""

    key_heads: int
    value_heads: int
    dim: int  # numbers of a key, and of a value
    page_size: int

    @property
    def width(self) -> int:
        """The numbers of a row [q | k | v], which the convolution reads."""
        return (2 * self.key_heads + self.value_heads) * self.dim


QWEN3_NEXT = StateSizes(16, 32, 128, 64)
QUICK_SIZES = StateSizes(1, 2, 16, 16)


@dataclass(frozen=True)
class StateInputs:
    """A step of a layer: each request has equally many fresh tokens, the last of `end` tokens."""

    sizes: StateSizes
    x: Tensor  # [T, width]
    gates: Tensor  # [T, 2 value heads]
    groups: list[Any]  # of the convolution, of tokens, of states
    requests: Tensor
    positions: Tensor
    weight: Tensor  # [width, WINDOW]
    params: Any

    def convolve(self) -> Tensor:
        """Return the convolutions of the rows."""
        from retain.kernels.triton import linear_attention

        return linear_attention.convolve(self.x, self.groups[0], self.requests, self.positions, self.weight, None)

    def attend(self) -> Tensor:
        """Return the outputs of linear attention for the rows."""
        from retain.kernels.triton import linear_attention

        _, tokens, states = self.groups
        return linear_attention.attend_linearly(
            self.x, self.gates, tokens, states, self.requests, self.positions, self.params
        )


def bench_states(bench: KernelBench) -> Iterator[Line]:
    """Time a layer of Qwen3-Next: a decode step in the middle of a page, and a prompt of 2048 tokens."""
    yield {"layer": "convolution", **check(lambda: compare_convolution(bench.device))}
    yield {"layer": "linear attention", **check(lambda: compare_linear_attention(bench.device))}
    bandwidth = bench.measure_bandwidth()
    sizes = QUICK_SIZES if bench.quick else QWEN3_NEXT
    S = sizes.page_size
    cases = ((1, 1, 3 * S // 2), (2, S + 5, S + 5)) if bench.quick else ((1, 1, 96), (32, 1, 96), (1, 2048, 2048))
    for batch, tokens, end in cases:
        inputs = make_states(sizes, batch, tokens, end, bench.device, BF16)
        state_bytes = batch * sizes.value_heads * sizes.dim**2 * 4
        functions: dict[str, Callable[[], Tensor]] = {"convolve": inputs.convolve, "attend_linearly": inputs.attend}
        for name, found in bench.time(functions).items():
            line: Line = {"requests": batch, "tokens": tokens, "kernel": name, **found}
            if "us" in found and tokens == 1 and name == "attend_linearly":
                line["share of states"] = state_bytes / found["us"] * 1e6 / bandwidth
            yield line


def make_states(
    sizes: StateSizes, batch: int, tokens: int, end: int, device: torch.device, dtype: torch.dtype
) -> StateInputs:
    """Return random inputs, and caches with what the tokens before them have left."""
    from retain.kernels.linear_attention import LinearAttention
    from retain.kernels.slots.kv_cache_spec import LinearStateSpec, LinearTokensSpec, convolution_spec
    from retain.kernels.triton.plan import request_tiles

    H, D, S = sizes.value_heads, sizes.dim, sizes.page_size
    specs = [convolution_spec(sizes.width, WINDOW), LinearTokensSpec(H, D, D, S), LinearStateSpec(H, D, D, S)]
    groups = [make_group(spec, S, batch, tokens, end, device) for spec in specs]
    keys = groups[1].kv.k
    keys[..., D] = -0.01 * torch.arange(1, keys.shape[1] + 1, device=device)  # sums of log decays
    x = torch.randn(batch * tokens, sizes.width, device=device)
    x[:, : 2 * sizes.key_heads * D] *= D**-0.5
    params = LinearAttention(sizes.key_heads, H, D, D, -torch.rand(H, device=device), torch.randn(H, device=device))
    return StateInputs(
        sizes=sizes,
        x=x.to(dtype),
        gates=torch.randn(batch * tokens, 2 * H, device=device).to(dtype),
        groups=groups,
        requests=request_tiles(groups[0].tables).to(device),
        positions=torch.arange(end - tokens, end, device=device, dtype=torch.int32).repeat(batch),
        weight=torch.randn(sizes.width, WINDOW, device=device) / WINDOW,
        params=params,
    )


def make_group(spec: Any, S: int, batch: int, tokens: int, end: int, device: torch.device) -> Any:
    """Return the cache of a layer as rings of pages, with tokens in the places of those before the step."""
    from retain.kernels import triton
    from retain.kernels.api import GroupInputs, Tables

    G = spec.num_kv_heads
    kv = triton.allocate(1 + batch * G * RING_PAGES, S, spec.k_dim, torch.float32, 1, device, v_dim=spec.v_dim)
    for numbers in (kv.k, kv.v):
        numbers.normal_()
        numbers *= 0.1
    kv.pos.fill_(-1)
    pages = 1 + torch.randperm(batch * G * RING_PAGES, device=device).int().view(batch, G, RING_PAGES)
    first = end - tokens
    for position in range(max(first - RING_PAGES * S, 0), first):
        kv.pos[pages[..., position // S % RING_PAGES].long(), position % S] = position
    fresh = torch.arange(first, end, device=device)
    slots = pages[..., fresh // S % RING_PAGES] * S + fresh % S  # [batch, G, tokens]
    slots = torch.where(fresh >= end - RING_PAGES * S, slots, fresh % S).int()  # the trash page, where there is no room
    tables = Tables(
        pages=pages,
        counts=torch.full((batch, G), RING_PAGES, dtype=torch.int32, device=device),
        windows=torch.full((batch,), S + 1, dtype=torch.int32, device=device),
        rows=torch.arange(batch, dtype=torch.int32),
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32) * tokens,
    )
    return GroupInputs(kv, tables, slots.transpose(0, 1).flatten(1).contiguous())


def compare_convolution(device: torch.device) -> list[float]:
    """Return how far the convolution of a short text is from float64."""
    inputs = make_states(QUICK_SIZES, 1, 37, 37, device, torch.float32)
    x = F.pad(inputs.x.double().T, (WINDOW - 1, 0))
    expected = F.conv1d(x[None], inputs.weight.double()[:, None], groups=len(x))[0].T
    return [relative_difference(inputs.convolve(), expected)]


def compare_linear_attention(device: torch.device) -> list[float]:
    """Return how far the outputs of a short text are from its recurrence in float64 (arXiv 2412.06464)."""
    inputs = make_states(QUICK_SIZES, 1, 37, 37, device, torch.float32)
    sizes, p = inputs.sizes, inputs.params
    H, D = sizes.value_heads, sizes.dim
    q, k, v = inputs.x.double().split([sizes.key_heads * D, sizes.key_heads * D, H * D], 1)
    a, b = inputs.gates.double().split(H, 1)
    decays = (p.decay.double() * F.softplus(a + p.time_bias.double())).exp()
    expected = torch.empty(37, H, D, dtype=torch.float64, device=device)
    for h in range(H):
        key_head = slice(h // (H // sizes.key_heads) * D, (h // (H // sizes.key_heads) + 1) * D)
        state = torch.zeros(D, D, dtype=torch.float64, device=device)
        for t in range(37):
            state = decays[t, h] * state
            u = b[t, h].sigmoid() * (v[t, h * D : (h + 1) * D] - k[t, key_head] @ state)
            state = state + k[t, key_head][:, None] * u
            expected[t, h] = q[t, key_head] @ state
    return [relative_difference(inputs.attend(), expected.flatten(1))]
