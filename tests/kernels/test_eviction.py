"""Backends evict from the tables of many rows, layers and heads as the reference does, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from retain.kernels import reference
from retain.kernels.api import KV, Backend, EvictionLists
from retain.kernels.slots.eviction_order import sum_columns
from tests.helpers.attention_case import UNDEFINED
from tests.helpers.backend_variants import VARIANTS, use_variant

ONE_OF_EACH_BACKEND = list({variant.split()[0]: variant for variant in VARIANTS}.values())


# Another order of columns gives another sum; the sum of infinities is NaN, whose sign is the processor's.
FEW_MASSES = torch.tensor([0, 1, 2**25, -(2.0**25), torch.inf, -torch.inf, torch.nan, -torch.nan])


@pytest.fixture(params=ONE_OF_EACH_BACKEND)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with use_variant(request.param) as backend:
        yield backend


@dataclass(frozen=True)
class EvictionCase:
    """Lists of `slots_used` [B][M * G] slots, in pages of S slots, of which n are evicted."""

    slots_used: tuple[tuple[int, ...], ...]
    G: int
    n: int
    S: int = 16
    C: int = 1
    holes: float = 0.2  # the share of slots that are holes
    few_masses: bool = False
    seed: int = 0

    def build(self, backend: Backend) -> tuple[KV, EvictionLists, Tensor]:
        """Return a pool whose pages belong to one list each, its lists, and room for their holes."""
        g = torch.Generator().manual_seed(self.seed)
        B, S, C = len(self.slots_used), self.S, self.C
        used = torch.tensor(self.slots_used, dtype=torch.int32).view(B, -1, self.G)
        M, N, L, width = used.shape[1], B + 2, used.shape[1] + 1, -(-int(used.max()) // S) + 3
        rows, layers = torch.randperm(N, generator=g)[:B].int(), torch.randperm(L, generator=g)[:M].sort().values.int()
        pages = torch.full((N, L, self.G, width), UNDEFINED, dtype=torch.int32)
        num_pages = -(-used // S)
        free = iter((1 + torch.randperm(int(num_pages.sum()), generator=g)).tolist())
        for (b, m, head), n in zip(torch.cartesian_prod(*map(torch.arange, used.shape)).view(-1, 3).tolist(),
                                   num_pages.flatten().tolist(), strict=True):  # fmt: skip
            pages[rows[b], layers[m], head, :n] = torch.tensor([next(free) for _ in range(n)], dtype=torch.int32)
        P = 1 + int(num_pages.sum())
        kv = backend.allocate(P, S, 16, torch.float32, C)
        pos = torch.randperm((P - 1) * S, generator=g).view(P - 1, S).int()
        pos[torch.rand(P - 1, S, generator=g) < self.holes] = -1
        kv.pos[1:] = pos
        kv.mass.copy_(torch.rand(P, C, S, generator=g))
        if self.few_masses:
            kv.mass.copy_(FEW_MASSES[torch.randint(len(FEW_MASSES), kv.mass.shape, generator=g)])
        bounds = torch.randint(-1, (P - 1) * S, (B, 2), generator=g, dtype=torch.int32).sort().values
        by_mass = torch.randint(0, 2, (B,), generator=g, dtype=torch.int32)
        lists = EvictionLists(pages, rows, layers, used, bounds, by_mass, int(used.max()))
        return kv, lists, torch.full((N, L, self.G, self.n + 2), -7, dtype=torch.int32)

    def punch(self, backend: Backend) -> tuple[Tensor, ...]:
        """Return all that the eviction may change, and the masses."""
        kv, lists, holes = self.build(backend)
        backend.punch(kv, lists, holes, self.n)
        return holes, kv.pos, kv.mass


@st.composite
def eviction_cases(draw: st.DrawFn) -> EvictionCase:
    G = draw(st.integers(1, 3))
    M = draw(st.integers(1, 3))
    sizes = st.integers(1, 120) | st.sampled_from([16, 64, 300, 700])
    slots_used = draw(st.lists(st.tuples(*[sizes] * M * G), min_size=1, max_size=3))
    shortest = min(map(min, slots_used))
    return EvictionCase(
        slots_used=tuple(slots_used),
        G=G,
        n=draw(st.integers(1, min(shortest, 20)) | st.just(shortest)),
        S=draw(st.sampled_from([16, 48, 64])),
        C=draw(st.integers(1, 7)),
        holes=draw(st.sampled_from([0.0, 0.2, 1.0])),
        few_masses=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
    )


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(case=eviction_cases())
def test_punch(backend: Backend, case: EvictionCase) -> None:
    """Lists of different lengths, holes, equal masses, several columns, rows by mass and by position."""
    for found, expected in zip(case.punch(backend), case.punch(reference), strict=True):
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("masses", [(torch.inf, -torch.inf), (-torch.nan,), (-torch.nan, 1.0), (1.0, -torch.nan)])
def test_masses_that_are_nan_rank_above_all_others(backend: Backend, masses: tuple[float, ...]) -> None:
    for kernels in (backend, reference):
        case = EvictionCase(((40,),), G=1, n=39, C=len(masses), holes=0.0)
        kv, lists, holes = case.build(kernels)
        lists.by_mass[:], lists.evictable[:] = 1, torch.tensor([0, 2**31 - 1])
        own = lists.pages[lists.rows[0], lists.layers[0], 0, :3].long()
        kv.mass[own[0], :, 2] = torch.tensor(masses)
        kv.mass[own[1], :, 7] = torch.inf
        kernels.punch(kv, lists, holes, 39)
        assert kv.pos[own[0], 2] >= 0


def test_punch_of_long_lists(backend: Backend) -> None:
    case = EvictionCase(((20_000, 17_003), (9000, 40)), G=2, n=17, S=64, C=2, holes=0.001)
    for found, expected in zip(case.punch(backend), case.punch(reference), strict=True):
        assert torch.equal(found, expected)


@given(case=eviction_cases())
def test_punch_makes_holes_of_the_victims(case: EvictionCase) -> None:
    """The definition is that of `select_victims`, list by list."""
    kv, lists, _ = case.build(reference)
    holes, pos, _ = case.punch(reference)
    expected = torch.full_like(holes, -7)
    for (b, row), (m, layer), g in (
        (x, y, g) for x in enumerate(lists.rows) for y in enumerate(lists.layers) for g in range(case.G)
    ):
        used = lists.slots_used[b, m, g : g + 1]
        pages = lists.pages[row, layer, g, : -(-int(used) // case.S)].long()
        priority = sum_columns(kv.mass[pages]).flatten() if lists.by_mass[b] else kv.pos[pages].flatten()
        bounds = lists.evictable[b].tolist()
        places = reference.select_victims(priority[None], kv.pos[pages].view(1, -1), used, *bounds, case.n)[0]
        expected[row, layer, g, : case.n] = (pages[places // case.S] * case.S + places % case.S).int()
    assert torch.equal(holes, expected)
    kv.pos.view(-1)[expected[expected >= 0].long()] = -1
    assert torch.equal(pos, kv.pos)


def test_rows_keep_their_holes_in_any_company(backend: Backend) -> None:
    """Lists of a row alone, and beside others."""
    case = EvictionCase(((70, 33), (200, 41), (50, 90)), G=1, n=9)
    holes, pos, _ = case.punch(backend)
    kv, lists, alone = case.build(backend)
    for b in (2, 0, 1):
        parts = {f: getattr(lists, f)[b : b + 1] for f in ("rows", "slots_used", "evictable", "by_mass")}
        backend.punch(kv, replace(lists, **parts, max_slots=int(lists.slots_used[b].max())), alone, case.n)
    assert torch.equal(alone, holes) and torch.equal(kv.pos, pos)
