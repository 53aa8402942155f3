"""Steps that repeat, as CUDA graphs: every request has as many fresh tokens, and all of their logits are wanted.

Requests are padded to a ladder of numbers, so that a few graphs serve all: who pads has no tokens in the tables, and
its own go to the trash page, at position -1. What varies lies in one stretch of memory, which is brought to the device
in one go. Where there are no graphs (a CPU), a recorded step computes anew what it would replay.
What is not known here: what a step computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import triton
from torch import Tensor

from retain.kernels import KV, Observe, Tables
from retain.kernels.triton import attention
from retain.kernels.triton.attention import FEW, Jobs, Seen, Work
from retain.kernels.triton.step import Call, Step

LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
OFTEN = 2  # a step is recorded when it comes for this time; before, it goes one operation at a time
MOST = 48  # recorded steps: each has memory of its own for its logits
Key = tuple[Any, ...]


def rung(n: int) -> int | None:
    """The number of requests that n are padded to; None: there is none so large."""
    return next((r for r in LADDER if r >= n), None)


def ints(n: int, value: int = 0) -> Tensor:
    """int32 [n], all of them this."""
    return torch.full((n,), value, dtype=torch.int32)


def nothing(T: int, B: int) -> Observe:
    """What padding leaves."""
    return Observe(torch.zeros(T), torch.ones(T), torch.ones(B), ints(B), ints(B), ints(B))


def cut(words: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """32-bit words as tensors of these lengths and types."""
    parts = words.split([len(x) for x in like.values()])
    return {name: part.view(x.dtype) for (name, x), part in zip(like.items(), parts, strict=True)}


@dataclass(frozen=True)
class Shape:
    """Of recorded steps: B requests of F fresh tokens, tables of L layers and G heads, at most so many pages of a head;
    which noise is drawn (None: nothing is observed).
    """

    B: int
    F: int
    L: int
    G: int
    most: int
    drawn: int | None

    @property
    def T(self) -> int:
        """Fresh tokens."""
        return self.B * self.F


class Inputs:
    """What varies from step to step: 32-bit words on the host, and the same on the device."""

    def __init__(self, s: Shape, device: torch.device):
        told = {"ids": ints(s.T), "pos": ints(s.T, -1), "jobs": ints(6 * s.B)}
        told |= {} if s.drawn is None else vars(nothing(s.T, s.B))
        cuda = device.type == "cuda"
        self.host = torch.cat([x.view(torch.int32) for x in told.values()])
        self.host = self.host.pin_memory() if cuda else self.host
        self.device = torch.zeros_like(self.host, device=device)
        self.slots = torch.zeros(s.L, s.G, s.T, dtype=torch.int32, device=device)
        self.copied = torch.cuda.Event() if cuda else None
        self.here, self.there = (cut(words, told) for words in (self.host, self.device))
        self._send()

    @property
    def asked(self) -> Observe:
        """What is left, on the device."""
        return Observe(**{f.name: self.there[f.name] for f in fields(Observe)})

    def fill(self, c: Call) -> None:
        """Those of a step; who pads has none."""
        if self.copied:
            self.copied.synchronize()
        tables, B, T, here = c.tables, len(c.tables.rows), len(c.ids), self.here
        for name, x in {"ids": c.ids, "pos": c.pos, **(vars(c.observe) if c.observe else {})}.items():
            here[name][: len(x)] = x
        here["pos"][T:] = -1
        jobs = here["jobs"].view(-1, 6)
        jobs[:, 3] = 0
        jobs[:B, 0], jobs[:B, 1] = torch.arange(B, dtype=torch.int32), tables.rows
        jobs[:B, 2], jobs[:B, 3] = tables.starts[:-1], tables.starts[1:] - tables.starts[:-1]
        jobs[:B, 5] = tables.starts[:-1]
        self._send()
        self.slots[..., :T].copy_(c.slots, non_blocking=True)
        self.slots[..., T:] = 0

    def _send(self) -> None:
        self.device.copy_(self.host, non_blocking=True)
        if self.copied:
            self.copied.record()


class Graphs:
    """Recorded steps of one program, `compute`."""

    def __init__(self, compute: Callable[[Step], Tensor], device: torch.device):
        self.compute, self.device = compute, device
        self.seen: dict[Key, int] = {}
        self.recorded: dict[Key, tuple[Inputs, Callable[[], None], Tensor] | None] = {}  # None: there was no room
        self.pool: Any = None  # of memory: graphs run one at a time, and share it
        self.side: torch.cuda.Stream | None = None  # where they are tried first

    def run(self, c: Call, R: int) -> Tensor | None:
        """The logits [T, V], good until the next step; None: this step is no such step, or came too seldom."""
        kv, tables, T, B = c.kv, c.tables, len(c.ids), len(c.tables.rows)
        fresh = tables.starts.diff()
        padded = rung(B)
        if not B or T % B or padded is None or len(c.wanted) != T or not bool((fresh == T // B).all()):
            return None
        if T // B * R > FEW:
            return None
        layers, _, G, n = tables.pages.shape
        most = min(triton.next_power_of_2(tables.most or n), n)
        shape = Shape(padded, T // B, layers, G, most, attention.drawn(c.observe) if c.observe else None)
        where = (kv.k, tables.pages, tables.counts, tables.windows, tables.sinks, tables.dense)
        key = (shape, *(0 if x is None else x.data_ptr() for x in where))
        if key not in self.recorded:
            self.seen[key] = self.seen.get(key, 0) + 1
            if self.seen[key] < OFTEN:
                return None
            try:
                self.recorded[key] = self._record(shape, kv, tables, R)
            except torch.OutOfMemoryError:
                self.recorded[key] = None
        self.recorded[key] = found = self.recorded.pop(key)  # now the newest
        if len(self.recorded) > MOST:
            self.recorded.pop(next(iter(self.recorded)))
        if found is None:
            return None
        inputs, replay, logits = found
        inputs.fill(c)
        replay()
        return logits[:T]

    def _record(self, shape: Shape, kv: KV, tables: Tables, R: int) -> tuple[Inputs, Callable[[], None], Tensor]:
        inputs = Inputs(shape, self.device)
        x, blocks = inputs.there, shape.most * (kv.page_size // attention.block_of(kv))
        width = shape.F * R
        jobs = Jobs(x["jobs"].view(-1, 6), attention.rows_of(width), attention.stretches_of(blocks), width)

        def compute() -> Tensor:
            seen = None
            if shape.drawn is not None:
                room = attention.room(kv, shape.most, shape.T, shape.G * R, shape.T)
                seen = Seen(inputs.asked, shape.drawn, *room)
            work = Work([jobs], None, None, seen, attention.block_of(kv), shape.most)
            step = Step(kv, replace(tables, most=shape.most), work, inputs.slots, x["ids"], x["pos"], None)
            return self.compute(step)

        if self.device.type != "cuda":
            logits = compute()

            def again() -> None:
                logits.copy_(compute())

            return inputs, again, logits
        side = self.side = self.side or torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels are compiled, libraries wake up; everybody in it only pads
            compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            logits = compute()
        return inputs, graph.replay, logits
