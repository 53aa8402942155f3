"""Random attention cases: a random pool and a random step over it, built alike in any backend by its own `write`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from retain.kernels.api import KV, NO_WINDOW, Backend, Tables
from retain.kernels.attention_params import AttentionParams
from retain.kernels.slots.reinterpret import PageFormat
from retain.kernels.slots.scoring import AttentionScoring

UNDEFINED = 2**31 - 1  # fills the entries of a table that no kernel may read
UNOWNED_PAGES = 3  # pages of every pool that no table names


@dataclass(frozen=True)
class AttentionCase:
    """A step of B requests: `fresh[b]` tokens of request b attend to `pages[b][g]` pages of kv head g."""

    fresh: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    D: int = 64
    V: int | None = None  # numbers of a value, if not D
    R: int = 3
    S: int = 32
    dtype: torch.dtype = torch.float32  # of the pool
    q_dtype: torch.dtype = torch.float32
    holes: float = 0.2  # the share of slots that are holes
    shuffled: bool = False  # positions in random order instead of the table's
    window: int = NO_WINDOW
    per_request_windows: bool = False  # every request has a window of its own
    alibi: bool = False
    softcap: float | None = None
    sinks: bool = False  # a sink logit for each query head
    shared_pages: bool = True  # requests share a third of their pages
    looks: tuple[int, ...] | None = None  # [T]: the slots that each fresh token looks at
    seed: int = 0

    @property
    def G(self) -> int:
        return len(self.pages[0])

    @property
    def params(self) -> AttentionParams:
        H = self.G * self.R
        slopes = 2.0 ** (-8 * torch.arange(1, H + 1) / H) if self.alibi else None
        sinks = 2 * torch.randn(H, generator=torch.Generator().manual_seed(self.seed + 5)) if self.sinks else None
        return AttentionParams(self.D**-0.5, slopes, softcap=self.softcap, sink_logits=sinks)

    def build_tables(self) -> Tables:
        """Scattered pages, a third of them shared; rows in another order than requests, idle rows between."""
        return _inputs(self).tables

    def num_pages(self) -> int:
        """The pages of the pool, the trash page included."""
        return len(_inputs(self).pos)

    def build_cache(self, backend: Backend, num_extra_pages: int = 0, score_columns: int = 1) -> KV:
        """A pool with random masses, in which every slot was written before holes were punched; and extra pages."""
        x = _inputs(self)
        P, S = x.pos.shape
        kv: KV = backend.allocate(P + num_extra_pages, S, self.D, self.dtype, score_columns, v_dim=self.V)
        format = PageFormat(S, self.dtype, self.D, self.V or self.D, has_sketches=self.looks is not None)
        kv = kv.with_sketches(format.sketch_bytes)
        backend.write(
            kv,
            x.slots[None].int(),
            x.kv[:, 0, :, : self.D],
            x.kv[:, 1, :, : self.V or self.D],
            x.pos.view(-1)[x.slots].int(),
        )
        kv.pos[:P][x.holes] = -1
        kv.mass.copy_(torch.rand(kv.mass.shape, generator=torch.Generator().manual_seed(self.seed + 4)))
        return kv

    def build_queries(self) -> tuple[Tensor, Tensor]:
        """q [T, H, D], a strided view, and q_pos [T]: each request's last positions."""
        return _inputs(self).q, _inputs(self).q_pos.clone()

    def build_scoring(
        self, noise: int, temperature: float = 1.0, noise_period: int = 1, decay: float = 1.0
    ) -> AttentionScoring:
        """Weights of all sizes, a fifth of them 0; the requests differ in their seeds only."""
        rng = torch.Generator().manual_seed(self.seed + 3)
        T, B = sum(self.fresh), len(self.fresh)
        ones = torch.ones(B, dtype=torch.int32)
        return AttentionScoring(
            weights=torch.rand(T, generator=rng) * (torch.rand(T, generator=rng) < 0.8),
            temperature=torch.full((T,), temperature),
            decay=torch.full((B,), decay),
            noise=ones * noise,
            seed=ones.cumsum(0).int(),
            noise_period=ones * noise_period,
        )

    def attend(self, backend: Backend, kv: KV | None = None, scoring: AttentionScoring | None = None) -> Tensor:
        """The output [T, H, D] of layer 2, over this pool or a new one."""
        q, q_pos = self.build_queries()
        return backend.attend(
            q,
            self.build_cache(backend) if kv is None else kv,
            self.build_tables(),
            q_pos,
            self.params,
            scoring=scoring,
            layer=2,
        )

    def first_request_is_independent(self, backend: Backend) -> bool:
        """Whether the first request's output has the same bits with the other requests and without them."""
        n = self.fresh[0]
        q, q_pos = self.build_queries()
        kv, t = self.build_cache(backend), self.build_tables()
        together = backend.attend(q, kv, t, q_pos, self.params)
        alone = replace(t, rows=t.rows[:1], query_start_loc=torch.tensor([0, n], dtype=torch.int32))
        return torch.equal(backend.attend(q[:n], kv, alone, q_pos[:n], self.params), together[:n])

    def with_changes(self, **changes: object) -> AttentionCase:
        """The same case but for some fields."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Inputs:
    """The random tensors of a case."""

    tables: Tables
    slots: Tensor  # [P * S], the order in which slots are written
    kv: Tensor  # [P * S, 2, 1, D or V]: k and v of a slot are strided views, as of a fused product
    pos: Tensor  # [P, S], before holes are punched
    holes: Tensor  # bool [P, S]
    q: Tensor  # [T, H, D]
    q_pos: Tensor  # int32 [T]


@lru_cache(maxsize=4)
def _inputs(case: AttentionCase) -> Inputs:
    with torch_threads(1):  # faster, for so little work
        tables, S = _random_tables(case), case.S
        P = len(torch.unique(tables.pages[tables.pages != UNDEFINED])) + UNOWNED_PAGES + 1
        rng = torch.Generator().manual_seed(case.seed + 1)
        pos = torch.randint(0, P * S, (P, S), generator=rng)
        if not case.shuffled:
            for row in tables.rows.tolist():
                for g in range(case.G):
                    own = tables.pages[row, g, : int(tables.counts[row, g])].long()
                    pos[own] = torch.arange(own.numel() * S).view(-1, S)
        kv = torch.randn(P * S, 2, 1, max(case.D, case.V or 0), generator=rng)
        slots = torch.randperm(P * S, generator=rng)
        holes = torch.rand(P, S, generator=rng) < case.holes
        holes[0] = True  # the trash page
        T, H = sum(case.fresh), case.G * case.R
        q = torch.randn(T, 3, H, case.D, generator=rng).to(case.q_dtype)[:, 1]
        ends = [max(row) * S for row in case.pages]
        q_pos = [torch.arange(end - t, end).clamp(min=0) for t, end in zip(case.fresh, ends, strict=True)]
        return Inputs(tables, slots, kv, pos, holes, q, torch.cat(q_pos).int())


def _random_tables(case: AttentionCase) -> Tables:
    rng = torch.Generator().manual_seed(case.seed)
    B, G, n = len(case.fresh), case.G, max(max(max(row) for row in case.pages), 1)
    N = 2 * B + 1
    owner = torch.arange(N * G * n).view(N, G, n)  # equal numbers are one page
    shared = torch.rand(n, generator=rng) < 1 / 3  # [n]
    if case.shared_pages:
        owner[:, :, shared] = owner[:1, :, shared]
    counts = torch.zeros(N, G, dtype=torch.int32)
    rows = torch.randperm(N, generator=rng)[:B]
    counts[rows] = torch.tensor(case.pages, dtype=torch.int32)
    owned = torch.arange(n) < counts[:, :, None]
    distinct, index = torch.unique(owner[owned], return_inverse=True)
    pages = torch.full((N, G, n), UNDEFINED, dtype=torch.int32)
    pages[owned] = (torch.randperm(len(distinct) + UNOWNED_PAGES, generator=rng)[index] + 1).int()
    starts = torch.tensor([0, *case.fresh]).cumsum(0)
    windows = torch.full((N,), case.window, dtype=torch.int32)
    if case.per_request_windows:
        windows = (windows - torch.arange(N) * 3).clamp(min=1).int()
    looks = None if case.looks is None else torch.tensor(case.looks, dtype=torch.int32)
    return Tables(pages, counts, windows, rows.int(), starts.int(), looks=looks)


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Run with this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cpu_tolerance(pool_dtype: torch.dtype, float32: float = 1e-5) -> float:
    """Return the tolerance of the cpu backend's attention.

    Over a pool of bfloat16 it rounds queries and weights to bfloat16, over quantized slots to 8 bits.
    """
    return {torch.float32: float32, torch.bfloat16: 2**-7}.get(pool_dtype, 2**-5)


def assert_close(o: Tensor, expected: Tensor, tolerance: float = 1e-5, label: str = "") -> None:
    """Equal up to the order of float32 sums; in bfloat16 up to its last bit."""
    assert o.dtype == expected.dtype and o.shape == expected.shape, label
    if o.numel():
        if o.dtype != torch.float32:
            tolerance = max(tolerance, 2**-7)
        error = (o.float() - expected.float()).abs().max().item()
        largest = expected.float().abs().max().item()
        assert error <= tolerance * largest, f"{label}: off by {error:.2e} where the largest is {largest:.2e}"
