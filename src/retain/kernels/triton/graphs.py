"""Steps that repeat, as CUDA graphs: every request has as many fresh tokens, and all of their logits are wanted.

Requests are padded to a ladder of numbers, so that a few graphs serve all: who pads has no tokens in the tables, and
its own go to the trash page, at position -1. What varies lies in one stretch of memory, which is brought to the device
in one go. Where there are no graphs (a CPU), a recorded step computes anew what it would replay.
What is not known here: what a step computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from retain.kernels import KV, Observe, Tables
from retain.kernels.triton import attention
from retain.kernels.triton.attention import FEW, Jobs, Seen, Work

if TYPE_CHECKING:
    from retain.kernels.triton.forward import Step

LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
OFTEN = 2  # a step is recorded when it comes for this time; before, it goes one operation at a time
MOST = 48  # recorded steps: each has memory of its own for its logits
Key = tuple[Any, ...]


def rung(n: int) -> int | None:
    """The number of requests that n are padded to; None: there is none so large."""
    return next((r for r in LADDER if r >= n), None)


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
        words = {"ids": s.T, "pos": s.T, "jobs": 6 * s.B}
        if s.drawn is not None:
            words |= {"weights": s.T, "tau": s.T} | dict.fromkeys(("decay", "noise", "seed", "anew"), s.B)
        cuda = device.type == "cuda"
        self.host = torch.zeros(sum(words.values()), dtype=torch.int32, pin_memory=cuda)
        self.device = torch.zeros_like(self.host, device=device)
        self.slots = torch.zeros(s.L, s.G, s.T, dtype=torch.int32, device=device)
        self.copied = torch.cuda.Event() if cuda else None
        self.here, self.there = (self._named(x, words) for x in (self.host, self.device))
        self.here["pos"].fill_(-1)
        for x in ("tau", "decay") if s.drawn is not None else ():
            self.here[x].fill_(1)
        self._send()

    @staticmethod
    def _named(x: Tensor, words: dict[str, int]) -> dict[str, Tensor]:
        parts = dict(zip(words, x.split(list(words.values())), strict=True))
        return {k: v.view(torch.float32) if k in ("weights", "tau", "decay") else v for k, v in parts.items()}

    def fill(self, tables: Tables, slots: Tensor, ids: Tensor, pos: Tensor, observe: Observe | None) -> None:
        """Those of a step; who pads has none."""
        if self.copied:
            self.copied.synchronize()
        B, T, here = len(tables.rows), len(ids), self.here
        told = {"ids": ids, "pos": pos}
        if observe:
            told |= {k: getattr(observe, k) for k in ("weights", "tau", "decay", "noise", "seed", "anew")}
        for name, x in told.items():
            here[name][: len(x)] = x
        here["pos"][T:] = -1
        jobs = here["jobs"].view(-1, 6)
        jobs[:, 3] = 0
        jobs[:B, 0], jobs[:B, 1] = torch.arange(B, dtype=torch.int32), tables.rows
        jobs[:B, 2], jobs[:B, 3] = tables.starts[:-1], tables.starts[1:] - tables.starts[:-1]
        jobs[:B, 5] = tables.starts[:-1]
        self._send()
        self.slots[..., :T].copy_(slots, non_blocking=True)
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

    def run(
        self,
        kv: KV,
        tables: Tables,
        slots: Tensor,
        ids: Tensor,
        pos: Tensor,
        wanted: Tensor,
        observe: Observe | None,
        R: int,
    ) -> Tensor | None:
        """The logits [T, V], good until the next step; None: this step is no such step, or came too seldom."""
        T, B = len(ids), len(tables.rows)
        fresh = tables.starts.diff()
        padded = rung(B)
        if not B or T % B or padded is None or len(wanted) != T or not bool((fresh == T // B).all()):
            return None
        if T // B * R > FEW:
            return None
        layers, _, G, n = tables.pages.shape
        most = min(triton.next_power_of_2(tables.most or n), n)
        shape = Shape(padded, T // B, layers, G, most, attention.drawn(observe) if observe else None)
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
        inputs.fill(tables, slots, ids, pos, observe)
        replay()
        return logits[:T]

    def _record(self, shape: Shape, kv: KV, tables: Tables, R: int) -> tuple[Inputs, Callable[[], None], Tensor]:
        from retain.kernels.triton.forward import Step

        inputs = Inputs(shape, self.device)
        x, blocks = inputs.there, shape.most * (kv.page_size // attention.block_of(kv))
        M = max(16, triton.next_power_of_2(shape.F * R))
        jobs = Jobs(x["jobs"].view(-1, 6), M, attention.stretches_of(blocks), shape.F * R)

        def compute() -> Tensor:
            seen = None
            if shape.drawn is not None:
                asked = Observe(*(x[name] for name in ("weights", "tau", "decay", "noise", "seed", "anew")))
                seen = Seen(asked, shape.drawn, *attention.room(kv, shape.most, shape.T, shape.G * R, shape.T))
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
