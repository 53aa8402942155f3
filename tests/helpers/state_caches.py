"""Rings of slots for operations that cache states: a program of one operation, run over the texts of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from retain.kernels import ops
from retain.kernels.api import CPU, KV, Backend, Batch, GroupInputs, Tables
from retain.kernels.ops import Buffer, Operation
from retain.kernels.slots.kv_cache_spec import ConvolutionSpec, LinearStateSpec, LinearTokensSpec, SlidingWindowSpec
from retain.kernels.slots.reinterpret import PageFormat, shared_page_bytes
from tests.helpers.programs import load_program

Emit = Callable[[Buffer, Buffer], Iterable[Operation]]
Spec = SlidingWindowSpec | ConvolutionSpec | LinearTokensSpec | LinearStateSpec


@dataclass(frozen=True)
class Chunk:
    """What a request computes in a step: tokens that stay, and drafts behind them that are rejected."""

    request: int
    num_tokens: int
    num_drafts: int = 0


class StateCaches:
    """A program with one operation over caches, and rings of pages of every request, cache and head.

    The program embeds token ids as rows `input_width` wide; `emit(x, out)` gives the operations. `run` returns
    the rows that it wrote. The token at position p has the slot p % S of page p // S % ring_pages.
    """

    def __init__(
        self,
        backend: Backend,
        specs: Sequence[Spec],
        emit: Emit,
        table: Tensor,
        out_width: int,
        *,
        page_size: int = 16,
        ring_pages: int = 2,
        device: torch.device = CPU,
    ):
        """`table` float32 [num_requests, length, input_width] has the rows of each text; a draft has another row."""
        self.page_size = page_size
        self.ring_pages = ring_pages
        self.device = device
        self.num_requests, self.length, _ = table.shape
        self.computed = [0] * self.num_requests
        rng = torch.Generator().manual_seed(7)
        counts = [self.num_requests * spec.num_kv_heads * ring_pages for spec in specs]
        free = (torch.randperm(sum(counts), generator=rng) + 1).int()
        self.kvs = allocate_pools(backend, specs, page_size, 1 + len(free), device)
        self.pages = [
            pages.view(self.num_requests, spec.num_kv_heads, ring_pages)
            for pages, spec in zip(free.split(counts), specs, strict=True)
        ]
        x = Buffer("x", table.shape[2])
        out = Buffer("out", out_width)
        embed = ops.Embed(x, torch.cat([table, -table.flip(1)]).flatten(0, 1))
        self.program = load_program(backend, [embed, *emit(x, out)], out, device)

    def run(self, *chunks: Chunk, **hooks: Callable[..., None]) -> list[Tensor]:
        """Compute a step, and reject its drafts. Returns the rows of each request's tokens, without those of drafts.

        `hooks` are those of `Batch`.
        """
        sizes = [chunk.num_tokens + chunk.num_drafts for chunk in chunks]
        starts = [self.computed[chunk.request] for chunk in chunks]
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, sizes, strict=True)]).int()
        texts = torch.cat([torch.full((n,), c.request) for c, n in zip(chunks, sizes, strict=True)])
        is_draft = torch.cat([torch.arange(n) >= c.num_tokens for c, n in zip(chunks, sizes, strict=True)])
        ids = (texts + is_draft * self.num_requests) * self.length + positions
        ends = torch.cat([torch.full((n,), s + n) for s, n in zip(starts, sizes, strict=True)])
        slots = [self._slots(pages, texts, positions.long(), ends) for pages in self.pages]
        query_start_loc = torch.tensor([0, *sizes]).cumsum(0).int()
        rows = torch.tensor([c.request for c in chunks], dtype=torch.int32)
        groups = [
            GroupInputs(kv, self._tables(pages, rows, query_start_loc), to[None].to(self.device))
            for kv, pages, to in zip(self.kvs, self.pages, slots, strict=True)
        ]
        layers = [(i, 0) for i in range(len(groups))]
        batch = Batch(groups, layers, ids, positions, torch.arange(len(ids)), **hooks)
        out = self.program.run(batch).clone().cpu()
        for kv, to in zip(self.kvs, slots, strict=True):
            rejected = to[:, is_draft].flatten().long()
            kv.pos[rejected // self.page_size, rejected % self.page_size] = -1
        for chunk in chunks:
            self.computed[chunk.request] += chunk.num_tokens
        return [y[: c.num_tokens] for y, c in zip(out.split(sizes), chunks, strict=True)]

    def positions(self) -> list[Tensor]:
        """The positions of all slots of each cache."""
        return [kv.pos.cpu().clone() for kv in self.kvs]

    def _slots(self, pages: Tensor, texts: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
        """The slot of each token in each head, [G, T]; in the trash page where the ring has no room for it."""
        S = self.page_size
        page = pages[texts, :, positions // S % self.ring_pages].T  # [G, T]
        is_written = positions >= ends - self.ring_pages * S
        return torch.where(is_written, page * S + positions % S, positions % S).int()

    def _tables(self, pages: Tensor, rows: Tensor, query_start_loc: Tensor) -> Tables:
        N, G, n = pages.shape
        return Tables(
            pages=pages[None].to(self.device),
            counts=torch.full((1, N, G), n, dtype=torch.int32, device=self.device),
            windows=torch.full((1, N), self.page_size + 1, dtype=torch.int32, device=self.device),
            rows=rows,
            query_start_loc=query_start_loc,
        )


def allocate_pools(
    backend: Backend, specs: Sequence[Spec], page_size: int, num_pages: int, device: torch.device
) -> list[KV]:
    """Pools that share memory, one for each cache: all slots are holes, and have numbers that nothing may read."""
    formats = [PageFormat(page_size, torch.float32, spec.k_dim, spec.v_dim) for spec in specs]
    sizes = shared_page_bytes(formats)
    first, *others = formats
    kv = backend.allocate(
        num_pages, page_size, first.k_dim, torch.float32, device=device, v_dim=first.v_dim, page_bytes=sizes
    )
    kvs = [kv, *(backend.reinterpret(kv, format) for format in others)]
    for kv in kvs:
        kv.pos.fill_(-1)
        kv.k.fill_(1e3)
        kv.v.fill_(1e3)
    return kvs
