"""A random cache and a random step over it, built alike in any backend by that backend's own `write`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from retain.kernels.api import KV, NO_WINDOW, Tables


@dataclass(frozen=True)
class AttentionCase:
    """What a step sees. `fresh[b]` tokens of request b look at `pages[b][g]` pages of kv head g."""

    fresh: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    D: int = 64
    R: int = 3
    S: int = 32
    dtype: torch.dtype = torch.float32  # of the pool
    q_dtype: torch.dtype = torch.float32
    holes: float = 0.2  # the share of slots that are holes
    shuffled: bool = False  # positions in random order instead of the table's
    window: int = NO_WINDOW
    sinks: int = 0
    per_request_windows: bool = False  # every request has a window and sinks of its own
    alibi: bool = False
    shared_pages: bool = True  # a third of the pages are shared by requests
    seed: int = 0

    @property
    def G(self) -> int:
        return len(self.pages[0])

    def build_tables(self) -> Tables:
        """Scattered pages, a third of them shared; rows in another order than requests, idle rows between."""
        rng = torch.Generator().manual_seed(self.seed)
        B, G, n = len(self.fresh), self.G, max(max(max(row) for row in self.pages), 1)
        N = 2 * B + 1
        owned = torch.randperm(N * G * n, generator=rng).add(1).view(N, G, n)  # [N, G, n]
        shared = torch.rand(n, generator=rng) < 1 / 3  # [n]
        if self.shared_pages:
            owned[:, :, shared] = owned[:1, :, shared]
        counts = torch.zeros(N, G, dtype=torch.int32)
        rows = torch.randperm(N, generator=rng)[:B]
        counts[rows] = torch.tensor(self.pages, dtype=torch.int32)
        mean_nothing = torch.arange(n) >= counts[:, :, None]
        owned[mean_nothing] = 2**31 - 1
        starts = torch.tensor([0, *self.fresh]).cumsum(0)
        windows, sinks = (torch.full((N,), n, dtype=torch.int32) for n in (self.window, self.sinks))
        if self.per_request_windows:
            windows = (windows - torch.arange(N) * 3).clamp(min=1).int()
            sinks = sinks + torch.arange(N, dtype=torch.int32) % 5
        return Tables(owned.int(), counts, windows, sinks, rows.int(), starts.int())

    def build_cache(self, backend: ModuleType, num_extra_pages: int = 0, score_columns: int = 1) -> KV:
        """Every slot written, then holes punched; and some spare pages."""
        rng = torch.Generator().manual_seed(self.seed + 1)
        t = self.build_tables()
        P, S, D = t.pages.numel() + 1, self.S, self.D
        kv: KV = backend.allocate(P + num_extra_pages, S, D, self.dtype, score_columns)
        pos = torch.randint(0, P * S, (P, S), generator=rng)  # [P, S]
        if not self.shuffled:
            for row in t.rows.tolist():
                for g in range(self.G):
                    own = t.pages[row, g, : int(t.counts[row, g])].long()
                    pos[own] = torch.arange(own.numel() * S).view(-1, S)
        fused = torch.randn(P * S, 2, 1, D, generator=rng)  # k and v are strided views, as of a fused product
        slots = torch.randperm(P * S, generator=rng)
        backend.write(kv, slots[None].int(), fused[:, 0], fused[:, 1], pos.view(-1)[slots].int())
        kv.pos[:P][torch.rand(P, S, generator=rng) < self.holes] = -1
        kv.pos[0] = -1  # the trash page
        return kv

    def build_queries(self) -> tuple[Tensor, Tensor]:
        """q [T, H, D], a strided view, and q_pos [T]: each request's last positions."""
        rng = torch.Generator().manual_seed(self.seed + 2)
        T, H = sum(self.fresh), self.G * self.R
        q = torch.randn(T, 3, H, self.D, generator=rng).to(self.q_dtype)[:, 1]
        ends = [max(row) * self.S for row in self.pages]
        pos = [torch.arange(end - t, end).clamp(min=0) for t, end in zip(self.fresh, ends, strict=True)]
        return q, torch.cat(pos).int() if pos else torch.zeros(0, dtype=torch.int32)

    def attend(self, backend: ModuleType) -> Tensor:
        """The step's output, [T, H, D]."""
        with torch_threads(1):  # quicker, for so little
            q, q_pos = self.build_queries()
            kv, tables = self.build_cache(backend), self.build_tables()
            H = q.shape[1]
            slopes = 2.0 ** (-8 * torch.arange(1, H + 1) / H) if self.alibi else None
        return backend.attend(q, kv, tables, q_pos, self.D**-0.5, slopes)

    def with_changes(self, **changes: object) -> AttentionCase:
        """This scene with something changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """So many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    yield
    torch.set_num_threads(before)


def assert_close(o: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Equal but for the order of float32 sums; in bfloat16 but for its last bit."""
    assert o.dtype == expected.dtype and o.shape == expected.shape
    if o.numel():
        if o.dtype != torch.float32:
            tolerance = 2**-8
        far = (o.float() - expected.float()).abs().max().item()
        top = expected.float().abs().max().item()
        assert far <= tolerance * top, f"off by {far:.2e} where the largest is {top:.2e}"
