"""CUDA graphs of steps that repeat: all requests have equally many fresh tokens, and all of them need logits.

Batches are padded to a few sizes, so that few graphs serve all. A padding request has no tokens in its tiles; its fresh
tokens have position -1 and go to the trash page. Everything that varies lies in one buffer, copied to the device at
once. On a CPU, and while kernels are compiled, there are no graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.api import Batch, GroupInputs
from retain.kernels.reference.program import ProgramOutput
from retain.kernels.slots.scoring import AttentionScoring
from retain.kernels.transfers import ALIGNMENT, pin
from retain.kernels.triton import plan
from retain.kernels.triton.plan import AttentionPlan, MassBuffers, TileList
from retain.kernels.triton.step_inputs import DeviceStep, FreshTokens, fresh_token_arrays, insert_pending_tokens

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CAPTURE_AFTER = 2  # a shape is captured when it comes for this time; before, its steps run operation by operation
MAX_GRAPHS = 48  # each graph has memory of its own for its logits; the least recently used is dropped
GraphKey = tuple[Any, ...]


def pad_batch_size(n: int) -> int | None:
    """Return the batch size that n requests are padded to, or None if n is too large."""
    return next((size for size in BATCH_SIZES if size >= n), None)


@dataclass(frozen=True)
class GroupShape:
    """What a graph is captured for in the layers of a KV cache group."""

    L: int
    G: int
    H: int  # query heads; 0 where no attention reads the layers, and no pages count
    max_pages: int  # pages of a head, at most
    max_demoted_pages: int  # the same of demoted tokens; 0 if the step has none


@dataclass(frozen=True)
class GraphShape:
    """What a graph is captured for."""

    B: int  # requests, padding included
    F: int  # fresh tokens of each request
    groups: tuple[GroupShape, ...]
    noise_mode: int | None  # how scores are changed, a constant of noise.py; None without scoring
    looks: bool  # whether some tokens look at few slots
    hidden_size: int  # numbers of the hidden states that the step loads; 0 if it loads none
    has_adapters: bool  # whether some tokens have adapters

    @property
    def T(self) -> int:
        """Return the fresh tokens of the step, padding included."""
        return self.B * self.F


def inputs_of(shape: GraphShape) -> dict[str, NDArray[Any]]:
    """Return the inputs of a graph whose requests are all padding: no tokens, and no masses that change."""
    T, B = shape.T, shape.B

    def int32(n: int, value: int = 0) -> NDArray[np.int32]:
        return np.full(n, value, np.int32)

    inputs: dict[str, NDArray[Any]] = {
        "input_ids": np.zeros(T, np.int64),
        "sources": int32(T, -1),  # of pending tokens
        "positions": int32(T, -1),
        "rows": int32(T),
        "last_positions": int32(T),
        "hole_indices": int32(len(shape.groups) * T, -1),
        "tiles": int32(6 * B),
    }
    if shape.has_adapters:
        inputs["adapters"] = int32(T, -1)
    if shape.looks:
        inputs |= {"dense_tiles": int32(6 * B), "look_tiles": int32(6 * T), "looks": int32(T)}
    if shape.noise_mode is not None:
        inputs |= {"weights": np.zeros(T, np.float32), "temperature": np.ones(T, np.float32)}
        inputs |= {"decay": np.ones(B, np.float32), "noise": int32(B), "seed": int32(B), "noise_period": int32(B)}
    return inputs


class GraphInputs:
    """The inputs of a graph: one buffer of 32-bit words on the host, its copy on the device, and slot mappings."""

    def __init__(self, shape: GraphShape, device: torch.device):
        inputs = inputs_of(shape)
        self.device = device
        starts = np.cumsum([0, *(-(-x.nbytes // ALIGNMENT) * (ALIGNMENT // 4) for x in inputs.values())]).tolist()
        self.host_buffer = np.zeros(starts[-1], np.int32)
        self.device_buffer = torch.zeros(len(self.host_buffer), dtype=torch.int32, device=device)
        self.slot_mappings = [torch.zeros(g.L, g.G, shape.T, dtype=torch.int32, device=device) for g in shape.groups]
        self.hidden_states = torch.zeros(shape.B, shape.hidden_size, device=device)
        self.host: dict[str, NDArray[Any]] = {}
        self.device_views: dict[str, Tensor] = {}
        for (name, x), begin in zip(inputs.items(), starts, strict=False):
            end = begin + x.nbytes // 4
            self.host[name] = self.host_buffer[begin:end].view(x.dtype)
            self.host[name][:] = x
            self.device_views[name] = self.device_buffer[begin:end].view(torch.from_numpy(x).dtype)
        self._upload()

    @property
    def scoring(self) -> AttentionScoring:
        """Return the scoring on the device."""
        return AttentionScoring(**{f.name: self.device_views[f.name] for f in fields(AttentionScoring)})

    def tiles(self, name: str = "tiles") -> Tensor:
        """Return tiles on the device, int32 [n, 6]: of each request, or those of another name."""
        return self.device_views[name].view(-1, 6)

    def fill(self, batch: Batch) -> None:
        """Copy the inputs of a step to the device; padding requests get no tokens."""
        host = self.host
        T = len(batch.input_ids)
        pending = batch.pending_tokens
        host["input_ids"][:T] = batch.input_ids.numpy()
        host["positions"][:T] = batch.positions.numpy()
        host["positions"][T:] = -1
        if pending:
            host["sources"][:T] = pending.sources.numpy()
            host["sources"][T:] = -1
        if batch.adapters is not None:
            host["adapters"][:T] = batch.adapters.numpy()
            host["adapters"][T:] = -1
        for name, x in vars(batch.scoring).items() if batch.scoring else ():
            host[name][: len(x)] = x.numpy()
        self._fill_tiles(batch)
        if any(group.slot_rule for group in batch.groups):
            self._fill_slot_inputs(batch)
        self._upload()
        views = self.device_views
        if batch.hidden_states is not None:
            self.hidden_states[: len(batch.rows)].copy_(batch.hidden_states, non_blocking=True)
        if pending:
            insert_pending_tokens(views["input_ids"], views["sources"], pending.sampled)
        fresh = FreshTokens(views["rows"], views["positions"], views["last_positions"])
        holes = views["hole_indices"].view(len(batch.groups), -1)
        for slots, group, hole_indices in zip(self.slot_mappings, batch.groups, holes, strict=True):
            if group.slot_rule:
                fresh.map_slots(group.slot_rule, hole_indices, group.kv.page_size, slots)
            else:
                slots[..., :T].copy_(group.slot_mapping, non_blocking=True)
                slots[..., T:] = 0

    def _fill_slot_inputs(self, batch: Batch) -> None:
        """Fill what the slots of fresh tokens follow from."""
        T = len(batch.input_ids)
        self.host["rows"][:T], self.host["last_positions"][:T] = fresh_token_arrays(batch)
        holes = self.host["hole_indices"].reshape(len(batch.groups), -1)
        for own, group in zip(holes, batch.groups, strict=True):
            if group.slot_rule and group.slot_rule.hole_indices is not None:
                own[:T] = group.slot_rule.hole_indices.numpy()

    def _fill_tiles(self, batch: Batch) -> None:
        rows = batch.rows.numpy()
        starts = batch.query_start_loc.numpy()
        B = len(rows)
        tiles = self.host["tiles"].reshape(-1, 6)
        tiles[:B, 0] = np.arange(B)
        tiles[:B, 1] = rows
        tiles[:B, 2] = starts[:-1]
        tiles[:B, 3] = starts[1:] - starts[:-1]
        tiles[B:, 2] = np.arange(B, len(tiles)) * (len(self.host["positions"]) // len(tiles))
        tiles[B:, 3] = 0
        tiles[:B, 5] = starts[:-1]
        if "looks" in self.host:
            self._fill_looks(batch, tiles)

    def _fill_looks(self, batch: Batch, tiles: NDArray[np.int32]) -> None:
        """Fill the tiles of tokens that look, and those of the others, of which a request may have both."""
        tables = next(group.tables for group in batch.groups if group.tables.looks is not None)
        assert tables.looks is not None
        looks = tables.looks.numpy()
        self.host["looks"][: len(looks)] = looks
        dense = self.host["dense_tiles"].reshape(-1, 6)
        dense[:] = tiles
        dense[: len(batch.rows), 3] = plan.count_dense_tokens(tables)
        own = self.host["look_tiles"].reshape(-1, 6)
        own[:] = 0
        own[: len(looks), 1] = batch.token_rows.numpy()
        own[: len(looks), 2] = np.arange(len(looks))
        own[: len(looks), 3] = looks > 0

    def _upload(self) -> None:
        """Copy the buffer through pinned memory of this step alone: the copy before may still wait for its step."""
        host = pin(torch.from_numpy(self.host_buffer), self.device)
        self.device_buffer.copy_(host, non_blocking=True)


@dataclass(frozen=True)
class CapturedStep:
    """A captured step: fill the inputs, then replay it to get the output of T tokens."""

    inputs: GraphInputs
    replay: Callable[[], ProgramOutput]


class CUDAGraphRunner:
    """Captures and replays the steps of one program, given the program's forward pass.

    Where it does not capture, a step is computed again instead of replayed.
    """

    def __init__(self, forward: Callable[[DeviceStep], ProgramOutput], device: torch.device, captures: bool):
        self.forward, self.device, self.captures = forward, device, captures
        self.num_calls: dict[GraphKey, int] = {}
        self.graphs: dict[GraphKey, CapturedStep | None] = {}  # None if there was no memory; least recently used first
        self.memory_pool: Any = None  # shared by all graphs, because only one runs at a time
        self.capture_stream: torch.cuda.Stream | None = None

    def run(self, batch: Batch, num_heads: Sequence[int]) -> ProgramOutput | None:
        """Return the output of all tokens, valid until the next step, or None if the step has no graph (yet).

        `num_heads` are the query heads that attend to each group; 0 for groups that no attention reads.
        """
        shape = self._graph_shape(batch, num_heads)
        if shape is None:
            return None
        tensors = [x for group in batch.groups for x in _addressed_tensors(group)]
        key = (shape, *(0 if x is None else x.data_ptr() for x in tensors))
        if key not in self.graphs:
            self.num_calls[key] = self.num_calls.get(key, 0) + 1
            if self.num_calls[key] < CAPTURE_AFTER:
                return None
            try:
                self.graphs[key] = self._capture(shape, batch)
            except torch.OutOfMemoryError:
                self.graphs[key] = None
        self.graphs[key] = captured = self.graphs.pop(key)
        if len(self.graphs) > MAX_GRAPHS:
            self.graphs.pop(next(iter(self.graphs)))
        if captured is None:
            return None
        captured.inputs.fill(batch)
        return captured.replay().first(len(batch.input_ids))

    def _graph_shape(self, batch: Batch, num_heads: Sequence[int]) -> GraphShape | None:
        """Return the shape of the graph that serves a step, or None if the step cannot be a graph."""
        T, B = len(batch.input_ids), len(batch.rows)
        batch_size = pad_batch_size(B)
        if not B or T % B or batch_size is None or len(batch.logits_indices) != T:
            return None
        if not bool((batch.query_start_loc.diff() == T // B).all()):
            return None
        if T // B > plan.MAX_DECODE_ROWS:  # a step without attention has no tiles that limit it
            return None
        groups = []
        for group, H in zip(batch.groups, num_heads, strict=True):
            tables = group.tables
            L, _, G, n = tables.pages.shape
            if not H:
                groups.append(GroupShape(L, G, 0, 0, 0))
                continue
            if T // B * (H // G) > plan.max_decode_rows(group.kv.k_dim):
                return None
            max_pages = min(triton.next_power_of_2(tables.max_pages or n), n)
            demoted = plan.max_demoted_pages(tables)
            if demoted and tables.demoted:
                demoted = min(triton.next_power_of_2(demoted), tables.demoted.pages.shape[-1])
            groups.append(GroupShape(L, G, H, max_pages, demoted))
        noise_mode = plan.noise_mode_of(batch.scoring) if batch.scoring else None
        looks = any(x is not None and bool((x > 0).any()) for x in (group.tables.looks for group in batch.groups))
        hidden_size = 0 if batch.hidden_states is None else batch.hidden_states.shape[1]
        has_adapters = batch.adapters is not None
        return GraphShape(batch_size, T // B, tuple(groups), noise_mode, looks, hidden_size, has_adapters)

    def _capture(self, shape: GraphShape, batch: Batch) -> CapturedStep:
        inputs = GraphInputs(shape, self.device)
        groups = [
            GroupInputs(group.kv, replace(group.tables, max_pages=own.max_pages), slots)
            for group, own, slots in zip(batch.groups, shape.groups, inputs.slot_mappings, strict=True)
        ]

        def forward() -> ProgramOutput:
            step = DeviceStep(
                groups=groups,
                caches=batch.caches,
                plans=[_plan_group(shape, *x, inputs) for x in zip(shape.groups, groups, strict=True)],
                requests=inputs.tiles(),
                input_ids=inputs.device_views["input_ids"],
                positions=inputs.device_views["positions"],
                logits_indices=torch.arange(shape.T, device=self.device),
                hidden_states=inputs.hidden_states if shape.hidden_size else None,
                adapters=inputs.device_views.get("adapters"),
            )
            return self.forward(step)

        if not self.captures:
            return CapturedStep(inputs, forward)
        stream = self.capture_stream = self.capture_stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles kernels and initializes libraries; the inputs are all padding
            forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self.memory_pool = self.memory_pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self.memory_pool, capture_error_mode="thread_local"):
            output = forward()

        def replay() -> ProgramOutput:
            graph.replay()
            return output

        return CapturedStep(inputs, replay)


def _plan_group(shape: GraphShape, own: GroupShape, group: GroupInputs, inputs: GraphInputs) -> AttentionPlan | None:
    """Return the plan of the layers of a group, if attention reads them: one decode tile for each request."""
    if not own.H:
        return None
    kv = group.kv
    blocks = plan.decode_blocks(kv)
    num_splits = blocks.max_splits(own.max_pages * kv.page_size)
    num_rows = shape.F * own.H // own.G
    has_looks = shape.looks and kv.sketches is not None
    tiles_of_requests = inputs.tiles("dense_tiles" if has_looks else "tiles")
    tiles = TileList(tiles_of_requests, plan.pad_rows(num_rows), num_splits, num_rows)
    mass_buffers = None
    if shape.noise_mode is not None:
        buffers = plan.allocate_mass_buffers(kv, own.max_pages, shape.T, own.H, shape.T)
        mass_buffers = MassBuffers(inputs.scoring, shape.noise_mode, *buffers)
    whole = AttentionPlan([tiles], [], [], mass_buffers, blocks, own.max_pages)
    whole = plan.add_demoted(whole, group.tables, own.max_demoted_pages)
    if not has_looks:
        return whole
    return plan.add_looks(whole, inputs.tiles("look_tiles"), inputs.device_views["looks"], kv, (own.H // own.G, own.G))


def _addressed_tensors(group: GroupInputs) -> list[Tensor | None]:
    """Return the tensors whose addresses a graph holds."""
    t = group.tables
    tensors = [group.kv.k, group.kv.pos, t.pages, t.counts, t.windows, t.dense]
    return [*tensors, t.demoted.pages, t.demoted.kv.pos] if t.demoted else tensors
