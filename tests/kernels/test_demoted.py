"""Attention to demoted tokens: pages of 4 bits beside the pool's own, in the same memory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from retain.kernels import cpu, reference
from retain.kernels.api import KV, NO_WINDOW, Backend, DemotedTables, Tables
from retain.kernels.attention_params import AttentionParams
from retain.kernels.slots.pool_dtypes import slots_in_page
from retain.kernels.slots.reinterpret import PageFormat, shared_page_bytes
from retain.kernels.slots.scoring import GAUSSIAN, GUMBEL, NO_NOISE, AttentionScoring
from tests.helpers.attention_case import assert_close, cpu_tolerance
from tests.helpers.backend_variants import ISAS, use_isa
from tests.helpers.device_adapter import triton_backend
from tests.helpers.slots import read_pages

F32, BF16, INT8, INT4 = torch.float32, torch.bfloat16, torch.int8, torch.int4
FP8 = torch.float8_e4m3fn
G, R = 2, 3
triton = triton_backend()


def needs(*backends: Backend) -> list[Any]:
    """Parameters of tests for backends that may be unavailable."""
    reasons = {b: b.unavailable_reason() for b in backends}
    return [pytest.param(b, marks=pytest.mark.skipif(r is not None, reason=str(r))) for b, r in reasons.items()]


needs_cpu, needs_triton = (parameter.marks[0] for parameter in needs(cpu, triton))
POOLS = [  # backends with the dtypes of their pools
    pytest.param(b.values[0], dtype, marks=b.marks)
    for b in (pytest.param(reference), *needs(cpu, triton))
    for dtype in (F32, BF16, INT8, FP8)
    if dtype in b.values[0].POOL_DTYPES
]


@lru_cache(maxsize=1)
def keys_and_values(P: int, D: int) -> Tensor:
    """Return what the slots of P pages are filled with, [2, P, 512, 1, D]: the same in every pool."""
    return torch.randn(2, P, 512, 1, D, generator=torch.Generator().manual_seed(2))


@dataclass(frozen=True)
class Step:
    """`fresh[b]` queries of request b, which has `own[b]` and `demoted[b]` pages of each head."""

    fresh: tuple[int, ...] = (1, 20, 70)
    own: tuple[tuple[int, int], ...] = ((3, 2), (9, 0), (2, 20))
    demoted: tuple[tuple[int, int], ...] = ((2, 9), (3, 1), (0, 1))
    S: int = 64
    D: int = 64
    V: int | None = None  # numbers of a value, if not D
    alibi: bool = False
    sinks: bool = False  # and a softcap
    temperature: float = 1.25
    noise_period: int = 1

    def build(self, backend: Backend, dtype: torch.dtype, columns: int = 1) -> tuple[KV, Tables]:
        """Tables over a pool whose pages are filled, each in the dtype that it is read in."""
        rng, B = torch.Generator().manual_seed(0), len(self.fresh)
        P = 1 + sum(sum(map(sum, pages)) for pages in (self.own, self.demoted))
        kv = backend.allocate(P, self.S, self.D, dtype, columns, v_dim=self.V)
        num_slots = slots_in_page(self.S, self.D, dtype, INT4, v_dim=self.V)
        demoted = backend.reinterpret(kv, PageFormat(num_slots, INT4, self.D, self.V or self.D, columns))
        pages = (torch.randperm(P - 1, generator=rng) + 1).int()
        k, v = keys_and_values(P, max(self.D, self.V or 0))
        k, v = k[..., : self.D], v[..., : self.V or self.D]
        tables, used = [], 0
        for pool, counts in ((kv, self.own), (demoted, self.demoted)):
            table, filled = torch.zeros(B, G, max(map(max, counts)), dtype=torch.int32), []
            for b, g in itertools.product(range(B), range(G)):
                n = counts[b][g]
                table[b, g, :n] = pages[used : used + n]
                used += n
                filled += table[b, g, :n].tolist()
            p, size = torch.tensor(filled, dtype=torch.long), pool.page_size
            pos = torch.randint(-40, 500, (len(p) * size,), generator=rng).clamp(min=-1).int()
            slots = (p[:, None] * size + torch.arange(size)).view(1, -1).int()
            backend.write(pool, slots, k[p, :size].flatten(0, 1), v[p, :size].flatten(0, 1), pos)
            pool.mass.copy_(torch.rand(pool.mass.shape, generator=rng))
            tables.append((table, torch.tensor(counts, dtype=torch.int32)))
        starts = torch.tensor([0, *self.fresh]).cumsum(0).int()
        rows, windows = torch.arange(B, dtype=torch.int32), torch.full((B,), NO_WINDOW, dtype=torch.int32)
        return kv, Tables(*tables[0], windows, rows, starts, demoted=DemotedTables(demoted, *tables[1]))

    @property
    def params(self) -> AttentionParams:
        slopes = 2.0 ** -torch.arange(1.0, G * R + 1) if self.alibi else None
        sinks = torch.linspace(-2.0, 3.0, G * R) if self.sinks else None
        return AttentionParams(0.1, slopes, softcap=0.5 if self.sinks else None, sink_logits=sinks)

    def attend(self, backend: Backend, kv: KV, tables: Tables, scoring: AttentionScoring | None) -> Tensor:
        T = sum(self.fresh)
        q = torch.randn(T, G * R, self.D, generator=torch.Generator().manual_seed(1))
        q_pos = torch.arange(300, 300 + T, dtype=torch.int32)
        return backend.attend(q, kv, tables, q_pos, self.params, scoring=scoring, layer=2)

    def scoring(self, noise: int) -> AttentionScoring:
        ones, T = torch.ones(len(self.fresh), dtype=torch.int32), sum(self.fresh)
        weights = (torch.arange(T) % 3).float()
        temperature, redraws = torch.full((T,), self.temperature), self.noise_period * ones
        return AttentionScoring(weights, temperature, ones * 0.5, noise * ones, ones, redraws)


STEPS = {
    "several": Step(),
    "odd shapes": Step(S=48, D=80, alibi=True),
    "small heads": Step(S=16, D=8, fresh=(3, 1, 200)),
    "sinks": Step(sinks=True),
    "values of another size": Step(D=48, V=80),
    "long": Step(fresh=(1, 1, 1), own=((40, 33), (1, 1), (0, 8)), demoted=((30, 9), (0, 0), (22, 1))),
}
SMALL = Step(fresh=(1, 3, 30), own=((5, 2), (0, 9), (2, 1)), demoted=((3, 1), (2, 0), (1, 2)), S=16, D=16)
TRITON_STEPS = {  # decode and prefill tiles; tables with several splits, and without pages
    "bfloat16": (SMALL, BF16, GUMBEL, R),
    "int8, alibi": (replace(SMALL, D=64, demoted=((3, 9), (2, 0), (1, 2)), alibi=True), INT8, GAUSSIAN, 1),
    "float32": (replace(SMALL, own=((5, 2), (9, 0), (0, 1))), F32, NO_NOISE, 1),
    "float16, page size 48": (replace(SMALL, D=80, S=48, fresh=(2, 40, 1)), torch.float16, NO_NOISE, R),
    "noise drawn once": (replace(SMALL, temperature=1.0, noise_period=0, sinks=True), F32, GUMBEL, R),
    "noise of each query": (replace(SMALL, temperature=1.0), BF16, GUMBEL, 1),
    "k8v4": (replace(SMALL, D=64, demoted=((0, 0), (0, 30), (12, 0))), torch.uint8, GUMBEL, R),
    "int4": (SMALL, INT4, GUMBEL, 1),
    "fp8": (replace(SMALL, D=64, demoted=((3, 9), (2, 0), (1, 2))), FP8, GUMBEL, 1),
    "values of another size": (replace(SMALL, D=24, V=40), F32, NO_NOISE, R),
    "sinks, float32": (replace(SMALL, own=((5, 2), (9, 0), (0, 1)), sinks=True), F32, GUMBEL, 1),
    "large heads": (replace(SMALL, D=256, S=64), BF16, NO_NOISE, 1),
}
FAST_TRITON_STEPS = ("bfloat16", "int8, alibi", "sinks, float32", "values of another size")


@needs_cpu
@pytest.mark.parametrize("columns", [1, R])
@pytest.mark.parametrize("noise", [NO_NOISE, GUMBEL])
@pytest.mark.parametrize("dtype", [F32, BF16, INT8])
@pytest.mark.parametrize("name", STEPS)
def test_the_cpu_backend_equals_the_reference(name: str, dtype: torch.dtype, noise: int, columns: int) -> None:
    """Outputs, and the masses of both kinds of pages; whether masses are kept changes no bit of an output."""
    step = STEPS[name]
    tolerance = cpu_tolerance(INT4)
    scoring = step.scoring(noise)
    kv, tables = step.build(reference, dtype, columns)
    assert tables.demoted
    expected = step.attend(reference, kv, tables, scoring)
    for isa in ISAS:
        with use_isa(isa):
            ours_kv, ours = step.build(cpu, dtype, columns)
            o = step.attend(cpu, ours_kv, ours, scoring)
            unscored = step.attend(cpu, ours_kv, ours, None)
        assert ours.demoted
        assert_close(o, expected, tolerance, isa)
        assert_close(ours_kv.mass, kv.mass, tolerance, isa)
        assert_close(ours.demoted.kv.mass, tables.demoted.kv.mass, tolerance, isa)
        assert torch.equal(o, unscored), isa


@pytest.mark.parametrize("backend", [reference, pytest.param(cpu, marks=needs_cpu)])
def test_demoted_tokens_are_seen_as_if_they_were_in_the_table(backend: Backend) -> None:
    """In a pool of int4 both kinds of pages are alike. Blocks of 512 slots are whole, so not a bit may differ."""
    step = Step(own=((8, 0), (16, 8), (0, 8)), demoted=((3, 9), (1, 0), (0, 2)))
    scoring = step.scoring(NO_NOISE)
    kv, t = step.build(backend, INT4)
    assert t.demoted and t.demoted.kv.page_size == step.S
    o = step.attend(backend, kv, t, scoring)
    one, _ = step.build(backend, INT4)
    pages = torch.zeros(len(step.fresh), G, t.pages.shape[2] + t.demoted.pages.shape[2], dtype=torch.int32)
    for b in range(len(step.fresh)):
        for g in range(G):
            n, m = int(t.counts[b, g]), int(t.demoted.counts[b, g])
            own, demoted = t.pages[b, g, :n], t.demoted.pages[b, g, :m]
            pages[b, g, : n + m] = torch.cat((own, demoted))
            one.pos[demoted.long()] = t.demoted.kv.pos[demoted.long()]
    together = replace(t, pages=pages, counts=t.counts + t.demoted.counts, demoted=None)
    assert torch.equal(step.attend(backend, one, together, scoring), o)


@pytest.mark.parametrize("backend", [reference, pytest.param(cpu, marks=needs_cpu)])
def test_a_page_keeps_its_bytes(backend: Backend) -> None:
    kv = backend.allocate(4, 64, 64, BF16)
    assert slots_in_page(64, 64, BF16, INT4) == 224  # 64 x 128 bytes, 36 a slot
    with pytest.raises(ValueError, match="cannot hold 240 slots"):
        backend.reinterpret(kv, PageFormat(240, INT4, 64, 64))


@needs_triton
@pytest.mark.parametrize(
    "name", [n if n in FAST_TRITON_STEPS else pytest.param(n, marks=pytest.mark.slow) for n in TRITON_STEPS]
)
def test_the_triton_backend_equals_the_reference(name: str) -> None:
    """Outputs, and the masses of both kinds of pages; whether masses are kept changes no bit of an output."""
    step, dtype, noise, columns = TRITON_STEPS[name]
    scoring = step.scoring(noise)
    kv, tables = step.build(reference, dtype, columns)
    expected = step.attend(reference, kv, tables, scoring)
    ours_kv, ours = step.build(triton, dtype, columns)
    o = step.attend(triton, ours_kv, ours, scoring)
    assert tables.demoted and ours.demoted
    assert_close(o, expected, 2**-7)
    assert_close(ours_kv.mass, kv.mass, 2**-7)
    assert_close(ours.demoted.kv.mass, tables.demoted.kv.mass, 2**-7)
    assert torch.equal(o, step.attend(triton, ours_kv, ours, None))
    without = replace(ours, demoted=None)
    assert not torch.allclose(step.attend(triton, ours_kv, without, None), expected, atol=0.05)


@needs_triton
def test_demoted_tokens_of_other_requests_change_no_bit() -> None:
    """One request has none. Its step has the launches for them only where the others have some."""
    step = Step(fresh=(1, 30), own=((5, 2), (2, 1)), demoted=((0, 0), (1, 2)), S=16, D=16)
    kv, t = step.build(triton, BF16)
    both = step.attend(triton, kv, t, None)
    assert t.demoted
    alone = replace(t, rows=t.rows[:1], query_start_loc=t.query_start_loc[:2], demoted=replace(t.demoted, max_pages=0))
    assert torch.equal(replace(step, fresh=(1,)).attend(triton, kv, alone, None), both[:1])


@needs_triton
def test_dense_tables_say_nothing_of_demoted_tokens() -> None:
    step = Step(fresh=(1, 30), own=((0, 0), (0, 0)), demoted=((1, 2), (2, 1)), S=16, D=16)
    kv, t = step.build(triton, F32)
    expected = step.attend(triton, kv, t, None)
    dense = replace(t, dense=torch.ones(2, dtype=torch.int32))
    assert torch.equal(step.attend(triton, kv, dense, None), expected)


@pytest.mark.parametrize(("backend", "dtype"), POOLS)
def test_pages_of_other_slots_are_read_copied_and_moved(backend: Backend, dtype: torch.dtype) -> None:
    """In the memory of the pool, whose pages are longer. The pages beside them keep their bytes."""
    S, D = 32, 64
    in_fewer_bits = [PageFormat(slots_in_page(S, D, dtype, x), x, D, D) for x in (INT4, torch.uint8, INT8)]
    of_other_layers = [PageFormat(16, dtype, 2 * D, 2 * D), PageFormat(2 * S, dtype, D // 2, D // 2)]
    formats = [*(f for f in in_fewer_bits if f.page_size >= S), *of_other_layers]
    sizes = shared_page_bytes([PageFormat(S, dtype, D, D), *formats])
    kv = backend.allocate(5, S, D, dtype, page_bytes=sizes)
    for format in formats:
        n, D, other = format.page_size, format.k_dim, format.dtype
        pool = backend.reinterpret(kv, format)
        exact = backend.allocate(5, n, D, other)
        kv.k.zero_(), kv.v.zero_()
        k, v = torch.randn(2, n, 1, D, generator=torch.Generator().manual_seed(3))
        slots = (2 * n + torch.randperm(n)).int()
        for x in (pool, exact):
            x.pos.fill_(-1)
            backend.write(x, slots[None], k, v, torch.arange(n, dtype=torch.int32))
            backend.copy(x, torch.tensor([2]), torch.tensor([4]))
            backend.move(x, slots[None, 5:6], 3 * n + torch.tensor([[9]], dtype=torch.int32))
        assert not kv.k[[0, 1]].any() and not kv.v[[0, 1]].any()
        pages = torch.tensor([2, 3, 4])
        for found, expected in zip(read_pages(backend, pool, pages), read_pages(backend, exact, pages), strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(pool.pos[2:], exact.pos[2:]) and torch.equal(pool.mass[2:], exact.mass[2:])
        read = zip(backend.read_slots(pool, slots.long()), backend.read_slots(exact, slots.long()), strict=True)
        assert all(torch.equal(found, expected) for found, expected in read)


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("other", [INT4, torch.uint8, INT8, FP8])
@pytest.mark.parametrize(("backend", "dtype"), POOLS)
def test_requantized_slots_are_what_a_write_of_what_is_read_leaves(
    backend: Backend, dtype: torch.dtype, other: torch.dtype, columns: int
) -> None:
    """With the masses, and the positions that the caller names. No other slot changes."""
    if other not in backend.POOL_DTYPES:
        pytest.skip("the cpu backend has no slots in fp8")
    S, n, D, num_slots = 32, 80, 64, 16
    rng = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, num_slots, 1, D, generator=rng)
    src, dst = (size + torch.randperm(4 * size, generator=rng)[:num_slots] for size in (S, n))
    pos, masses = torch.arange(num_slots, dtype=torch.int32), torch.rand(5, columns, S, generator=rng)
    kv = backend.allocate(5, S, D, dtype, columns)
    backend.write(kv, src[None].int(), k, v, pos)
    kv.mass.copy_(masses)
    found, expected = (backend.allocate(5, n, D, other, columns) for _ in range(2))
    backend.requantize(kv, src, found, dst, pos + 7)
    held = (x[:, None] for x in backend.read_slots(kv, src))
    backend.write(expected, dst[None].int(), *held, pos + 7)
    expected.mass.transpose(1, 2)[dst // n, dst % n] = masses.transpose(1, 2)[src // S, src % S]
    for a, b in ((found.k, expected.k), (found.v, expected.v), (found.pos, expected.pos), (found.mass, expected.mass)):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
