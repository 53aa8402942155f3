"""Measure what a step of linear attention costs beside reading its states and pages.

    python -m tools.linear_attention_speed

One layer of Qwen3.5's sizes computes a token of each request. What the same program takes without the layer is
subtracted. Beside it, in turns: a dot product of vectors with as many bytes as the states and the pages of tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import mean, median
from time import perf_counter

import torch

from retain.kernels import cpu, ops
from retain.kernels.linear_attention import LinearAttention
from retain.kernels.ops import Buffer, Operation
from retain.kernels.slots.kv_cache_spec import LinearStateSpec, LinearTokensSpec
from tests.helpers.state_caches import Chunk, StateCaches

HEADS = 16, 16  # of keys and of values
SIZE = 128  # of a key, and of a value
PROMPT = 40  # tokens of each text before the measured ones
STEPS = 64  # four pages: each step in so many tokens folds


def build_caches(num_requests: int, has_layer: bool) -> StateCaches:
    """Return a program with one layer, or with what is around it."""
    params = LinearAttention(*HEADS, SIZE, SIZE, torch.full((HEADS[1],), -0.3), torch.zeros(HEADS[1]))
    rows = torch.randn(num_requests, PROMPT + STEPS, params.qkv_width) / SIZE**0.5

    def emit(x: Buffer, out: Buffer) -> Iterator[Operation]:
        gates = Buffer("gates", params.gates_width)
        yield ops.MatMul(x, gates, torch.zeros(params.gates_width, params.qkv_width))
        if has_layer:
            yield ops.AttendLinearly(x, gates, out, (0, 1), params)

    specs = [LinearTokensSpec(HEADS[1], SIZE, SIZE), LinearStateSpec(HEADS[1], SIZE, SIZE)]
    return StateCaches(cpu, specs, emit, rows, HEADS[1] * SIZE)


def time_step(caches: StateCaches) -> float:
    """Return the seconds of a step with a token of each request."""
    begin = perf_counter()
    caches.run(*(Chunk(i, 1) for i in range(caches.num_requests)))
    return perf_counter() - begin


def time_dot(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the seconds of a dot product."""
    begin = perf_counter()
    torch.dot(a, b)
    return perf_counter() - begin


def main() -> None:
    """Print the cost of the layer, and of reading what it reads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    args = parser.parse_args()
    page = 16 * (SIZE + 8 + SIZE)
    num_floats = args.requests * HEADS[1] * (SIZE * SIZE + page)
    a, b = (torch.ones(num_floats // 2) for _ in range(2))
    both = [build_caches(args.requests, has_layer) for has_layer in (True, False)]
    for caches in both:
        caches.run(*(Chunk(i, PROMPT) for i in range(args.requests)))
    with_layer, without = both
    layers = []
    reads = []
    for _ in range(STEPS):
        layers.append(time_step(with_layer) - time_step(without))
        reads.append(time_dot(a, b))
    reading = median(reads)
    print(f"{args.requests} requests, {4 * num_floats / 1e6:.0f} MB read in {1000 * reading:.2f} ms")
    for what, layer in (("median step", median(layers)), ("mean, with folds", mean(layers))):
        print(f"the layer, {what}: {1000 * layer:.2f} ms, ratio {layer / reading:.2f}")


if __name__ == "__main__":
    main()
