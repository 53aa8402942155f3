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

from retain.kernels.api import KV, AttentionScoring, Tables
from retain.kernels.triton import attention
from retain.kernels.triton.attention import MAX_DECODE_ROWS, AttentionPlan, MassBuffers, TileList
from retain.kernels.triton.step import DeviceStep, HostStep

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CAPTURE_AFTER = 2  # a step is recorded when it comes for this time; before, it goes one operation at a time
MAX_GRAPHS = 48  # recorded steps: each has memory of its own for its logits
GraphKey = tuple[Any, ...]


def pad_batch_size(n: int) -> int | None:
    """The number of requests that n are padded to; None: there is none so large."""
    return next((r for r in BATCH_SIZES if r >= n), None)


def full_int32(n: int, value: int = 0) -> Tensor:
    """int32 [n], all of them this."""
    return torch.full((n,), value, dtype=torch.int32)


def no_scoring(T: int, B: int) -> AttentionScoring:
    """What padding leaves."""
    return AttentionScoring(torch.zeros(T), torch.ones(T), torch.ones(B), full_int32(B), full_int32(B), full_int32(B))


def unpack(words: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """32-bit words as tensors of these lengths and types."""
    parts = words.split([len(x) for x in like.values()])
    return {name: part.view(x.dtype) for (name, x), part in zip(like.items(), parts, strict=True)}


@dataclass(frozen=True)
class GraphShape:
    """Of recorded steps: B requests of F fresh tokens, tables of L layers and G heads, at most so many pages of a head;
    which noise is drawn (None: nothing is observed).
    """

    B: int
    F: int
    L: int
    G: int
    max_pages: int
    noise_mode: int | None

    @property
    def T(self) -> int:
        """Fresh tokens."""
        return self.B * self.F


class GraphInputs:
    """What varies from step to step: 32-bit words on the host, and the same on the device."""

    def __init__(self, s: GraphShape, device: torch.device):
        told = {"ids": full_int32(s.T), "pos": full_int32(s.T, -1), "jobs": full_int32(6 * s.B)}
        told |= {} if s.noise_mode is None else vars(no_scoring(s.T, s.B))
        cuda = device.type == "cuda"
        self.host_buffer = torch.cat([x.view(torch.int32) for x in told.values()])
        self.host_buffer = self.host_buffer.pin_memory() if cuda else self.host_buffer
        self.device_buffer = torch.zeros_like(self.host_buffer, device=device)
        self.slot_mapping = torch.zeros(s.L, s.G, s.T, dtype=torch.int32, device=device)
        self.copy_done = torch.cuda.Event() if cuda else None
        self.host_views, self.device_views = (unpack(words, told) for words in (self.host_buffer, self.device_buffer))
        self._upload()

    @property
    def scoring(self) -> AttentionScoring:
        """What is left, on the device."""
        return AttentionScoring(**{f.name: self.device_views[f.name] for f in fields(AttentionScoring)})

    def fill(self, step: HostStep) -> None:
        """Those of a step; who pads has none."""
        if self.copy_done:
            self.copy_done.synchronize()
        tables, B, T, here = step.tables, len(step.tables.rows), len(step.input_ids), self.host_views
        for name, x in {
            "ids": step.input_ids,
            "pos": step.positions,
            **(vars(step.scoring) if step.scoring else {}),
        }.items():
            here[name][: len(x)] = x
        here["pos"][T:] = -1
        jobs = here["jobs"].view(-1, 6)
        jobs[:, 3] = 0
        jobs[:B, 0], jobs[:B, 1] = torch.arange(B, dtype=torch.int32), tables.rows
        jobs[:B, 2], jobs[:B, 3] = tables.query_start_loc[:-1], tables.query_start_loc[1:] - tables.query_start_loc[:-1]
        jobs[:B, 5] = tables.query_start_loc[:-1]
        self._upload()
        self.slot_mapping[..., :T].copy_(step.slot_mapping, non_blocking=True)
        self.slot_mapping[..., T:] = 0

    def _upload(self) -> None:
        self.device_buffer.copy_(self.host_buffer, non_blocking=True)
        if self.copy_done:
            self.copy_done.record()


class CUDAGraphRunner:
    """Recorded steps of one program, `compute`."""

    def __init__(self, forward: Callable[[DeviceStep], Tensor], device: torch.device):
        self.forward, self.device = forward, device
        self.num_calls: dict[GraphKey, int] = {}
        self.graphs: dict[
            GraphKey, tuple[GraphInputs, Callable[[], None], Tensor] | None
        ] = {}  # None: there was no room
        self.memory_pool: Any = None  # of memory: graphs run one at a time, and share it
        self.capture_stream: torch.cuda.Stream | None = None  # where they are tried first

    def run(self, step: HostStep, R: int) -> Tensor | None:
        """The logits [T, V], good until the next step; None: this step is no such step, or came too seldom."""
        kv, tables, T, B = step.kv, step.tables, len(step.input_ids), len(step.tables.rows)
        fresh = tables.query_start_loc.diff()
        padded = pad_batch_size(B)
        if not B or T % B or padded is None or len(step.logits_indices) != T or not bool((fresh == T // B).all()):
            return None
        if T // B * R > MAX_DECODE_ROWS:
            return None
        layers, _, G, n = tables.pages.shape
        most = min(triton.next_power_of_2(tables.max_pages or n), n)
        shape = GraphShape(
            padded, T // B, layers, G, most, attention.noise_mode_of(step.scoring) if step.scoring else None
        )
        where = (kv.k, tables.pages, tables.counts, tables.windows, tables.sinks, tables.dense)
        key = (shape, *(0 if x is None else x.data_ptr() for x in where))
        if key not in self.graphs:
            self.num_calls[key] = self.num_calls.get(key, 0) + 1
            if self.num_calls[key] < CAPTURE_AFTER:
                return None
            try:
                self.graphs[key] = self._capture(shape, kv, tables, R)
            except torch.OutOfMemoryError:
                self.graphs[key] = None
        self.graphs[key] = found = self.graphs.pop(key)  # now the newest
        if len(self.graphs) > MAX_GRAPHS:
            self.graphs.pop(next(iter(self.graphs)))
        if found is None:
            return None
        inputs, replay, logits = found
        inputs.fill(step)
        replay()
        return logits[:T]

    def _capture(
        self, shape: GraphShape, kv: KV, tables: Tables, R: int
    ) -> tuple[GraphInputs, Callable[[], None], Tensor]:
        inputs = GraphInputs(shape, self.device)
        x, blocks = inputs.device_views, shape.max_pages * (kv.page_size // attention.choose_block_n(kv))
        width = shape.F * R
        jobs = TileList(x["jobs"].view(-1, 6), attention.pad_rows(width), attention.max_splits(blocks), width)

        def compute() -> Tensor:
            seen = None
            if shape.noise_mode is not None:
                room = attention.allocate_mass_buffers(kv, shape.max_pages, shape.T, shape.G * R, shape.T)
                seen = MassBuffers(inputs.scoring, shape.noise_mode, *room)
            work = AttentionPlan([jobs], None, None, seen, attention.choose_block_n(kv), shape.max_pages)
            step = DeviceStep(
                kv, replace(tables, max_pages=shape.max_pages), work, inputs.slot_mapping, x["ids"], x["pos"], None
            )
            return self.forward(step)

        if self.device.type != "cuda":
            logits = compute()

            def again() -> None:
                logits.copy_(compute())

            return inputs, again, logits
        side = self.capture_stream = self.capture_stream or torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels are compiled, libraries wake up; everybody in it only pads
            compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self.memory_pool = self.memory_pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self.memory_pool, capture_error_mode="thread_local"):
            logits = compute()
        return inputs, graph.replay, logits
