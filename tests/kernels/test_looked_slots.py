"""Tokens that look at few slots: which ones, on every backend and instruction set, and what they then attend to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from retain.kernels import cpu, reference
from retain.kernels.api import KV, NO_WINDOW, Backend, Tables
from retain.kernels.attention_params import AttentionParams
from retain.kernels.cpu import ffi
from retain.kernels.slots.pool_dtypes import INT4, INT8, K8V4
from retain.kernels.slots.reinterpret import PageFormat
from tests.helpers.attention_case import AttentionCase, assert_close, torch_threads
from tests.helpers.backend_variants import FAST_VARIANTS, ISAS, VARIANTS, use_isa, use_variant

F32, BF16 = torch.float32, torch.bfloat16
POOL_DTYPES = [F32, BF16, INT8, K8V4, INT4]
LEVELS = (0.0, 3.0, 6.0, 9.0)  # scores of slots: far enough apart for keys in 4 bits
GROUPS = (36, 30, 20, 10)  # how many slots have each
NUM_NEWEST = 9  # slots of a group that no token sees whole, with the lowest score
COUNTS = (10, 30, 60)  # of looks that take whole levels
D = 64


@pytest.fixture(params=["reference", *VARIANTS])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Run the test on every backend and instruction set that can look."""
    with use_variant(request.param) as backend:
        yield backend


def allocate(backend: Backend, num_pages: int, page_size: int, dtype: torch.dtype, v_dim: int = D) -> KV:
    kv = backend.allocate(num_pages, page_size, D, dtype, v_dim=v_dim)
    return kv.with_sketches(PageFormat(page_size, dtype, D, v_dim, has_sketches=True).sketch_bytes)


def tables_of(pages: Tensor, fresh: int, looks: list[int] | None, window: int = NO_WINDOW) -> Tables:
    """Return the tables of one request, whose kv heads have these pages [G, n]."""
    return Tables(
        pages=pages[None].int(),
        counts=torch.full((1, len(pages)), pages.shape[1], dtype=torch.int32),
        windows=torch.tensor([window], dtype=torch.int32),
        rows=torch.tensor([0], dtype=torch.int32),
        query_start_loc=torch.tensor([0, fresh], dtype=torch.int32),
        looks=None if looks is None else torch.tensor(looks, dtype=torch.int32),
    )


class Levels:
    """A request of two kv heads whose slots have scores in levels, in random order; its last page has holes."""

    def __init__(self, backend: Backend, dtype: torch.dtype, S: int = 16, R: int = 3, V: int = 48):
        rng = torch.Generator().manual_seed(0)
        G, N = 2, sum(GROUPS)
        n = N // S + 1
        levels = torch.tensor(LEVELS).repeat_interleave(torch.tensor(GROUPS))
        shuffled = [levels[torch.randperm(N, generator=rng)] for _ in range(G)]
        self.levels = torch.cat((torch.stack(shuffled), torch.zeros(G, NUM_NEWEST)), 1)  # [G, N + newest]
        direction = torch.randn(G, D, generator=rng)
        direction /= direction.norm(dim=-1, keepdim=True)
        noise = torch.randn(*self.levels.shape, D, generator=rng)
        self.k = self.levels[..., None] * direction[:, None] + 0.02 * noise
        self.v = torch.randn(*self.levels.shape, V, generator=rng)
        self.q = direction.repeat_interleave(R, 0).repeat(len(COUNTS), 1, 1)  # [T, H, D]
        self.q = self.q + 0.02 * torch.randn(self.q.shape, generator=rng)
        self.pages = 1 + torch.arange(G * n).view(G, n).flip(0)
        self.kv = allocate(backend, 1 + G * n, S, dtype, V)
        self.kv.pos.fill_(-1)
        places = torch.arange(N + NUM_NEWEST)
        slots = (self.pages[:, places // S] * S + places % S).int()
        backend.write(self.kv, slots, self.k.transpose(0, 1), self.v.transpose(0, 1), places.int())
        self.q_pos = torch.full((len(COUNTS),), N + NUM_NEWEST - 1, dtype=torch.int32)

    def expected(self, params: AttentionParams) -> Tensor:
        """Attend in plain torch to the newest slots, to those of the highest levels, and to means for the others."""
        T, H, _ = self.q.shape
        G, N = len(self.k), sum(GROUPS)
        o = torch.empty(T, H, self.v.shape[-1])
        for t, count in enumerate(COUNTS):
            for h in range(H):
                g = h // (H // G)
                x = params.scale * self.k[g] @ self.q[t, h]
                if params.softcap:
                    x = params.softcap * torch.tanh(x / params.softcap)
                values = self.v[g].clone()
                others = self.levels[g, :N].argsort(descending=True, stable=True)[count:]
                values[others] = self.v[g, :N].view(-1, 16, self.v.shape[-1]).mean(1)[others // 16]
                if params.sink_logits is not None:
                    x = torch.cat((x, params.sink_logits[h : h + 1]))
                o[t, h] = x.softmax(0)[: len(values)] @ values
        return o


PARAMS = {
    "plain": AttentionParams(1.0),
    "softcap": AttentionParams(1.0, softcap=20.0),
    "sink logits": AttentionParams(1.0, sink_logits=torch.tensor([1.0, 5.0, 9.0, 2.0, 0.0, 4.0])),
}


@pytest.mark.parametrize("dtype", POOL_DTYPES)
@pytest.mark.parametrize("params", PARAMS)
def test_a_token_attends_to_the_slots_with_the_largest_weights(
    backend: Backend, dtype: torch.dtype, params: str
) -> None:
    case = Levels(backend, dtype)
    p = PARAMS[params]
    o = backend.attend(case.q, case.kv, tables_of(case.pages, 3, list(COUNTS)), case.q_pos, p)
    exact = {F32: 0.02, BF16: 0.03, INT4: 0.25}.get(dtype, 0.1)  # others have weights by keys in 4 bits
    assert_close(o, case.expected(p), exact)


@pytest.mark.parametrize("R", [1, 50])
def test_all_query_heads_of_a_kv_head_choose_together(backend: Backend, R: int) -> None:
    """Also where they are more than a tile has rows: one that has no preference attends to what the others choose."""
    case = Levels(backend, F32, S=32, R=R)
    p = PARAMS["plain"]
    if R > 1:
        case.q[:, 7] = 0  # of 50
    o = backend.attend(case.q, case.kv, tables_of(case.pages, 3, list(COUNTS)), case.q_pos, p)
    assert_close(o, case.expected(p), 0.02)


def test_of_equal_slots_the_newest_are_chosen(backend: Backend) -> None:
    """And the mean of a group stands for each of its slots that is not chosen."""
    S, G, n = 32, 2, 2
    N = n * S
    kv = allocate(backend, 1 + G * n, S, F32, N)
    kv.pos.fill_(-1)
    pages = 1 + torch.arange(G * n).view(G, n)
    slots = (pages[:, torch.arange(N) // S] * S + torch.arange(N) % S).int()
    v = torch.eye(N)[:, None].expand(N, G, N)
    backend.write(kv, slots, torch.ones(N, G, D), v.contiguous(), torch.arange(N).int())
    q_pos = torch.tensor([N - 1, N - 9], dtype=torch.int32)
    o = backend.attend(torch.ones(2, G, D), kv, tables_of(pages, 2, [5, 7]), q_pos, AttentionParams(0.1))
    for t, (last_whole, count, seen) in enumerate([(N, 5, N), (N - 16, 7, N - 8)]):
        expected = torch.zeros(N)
        expected[:last_whole] = torch.cat(
            [torch.full((16,), (16 - c) / 16) for c in _chosen_by_group(last_whole, count)]
        )
        expected[last_whole - count : seen] += 1
        assert torch.allclose(o[t], (expected / seen).expand(G, N), atol=1e-4)


def test_the_newest_are_those_with_the_highest_positions(backend: Backend) -> None:
    """Wherever in its table they lie: tokens that fill holes are before others."""
    S, N = 32, 64
    kv = allocate(backend, 3, S, F32, N)
    kv.pos.fill_(-1)
    slots = torch.arange(S, 3 * S)[None].int()
    positions = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    backend.write(kv, slots, torch.ones(N, 1, D), torch.eye(N)[:, None].contiguous(), positions.int())
    tables = tables_of(torch.tensor([[1, 2]]), 1, [9])
    o = backend.attend(torch.ones(1, 1, D), kv, tables, torch.tensor([N - 1]).int(), AttentionParams(0.1))
    means = torch.stack([torch.eye(N)[i // 16 * 16 : i // 16 * 16 + 16].mean(0) for i in range(N)])
    attended = torch.where((positions >= N - 9)[:, None], torch.eye(N), means)
    assert torch.allclose(o[0, 0], attended.mean(0), atol=1e-4)


def _chosen_by_group(num_slots: int, count: int) -> list[int]:
    """Return how many slots of each group of 16 are among the newest `count`."""
    return [0] * (num_slots // 16 - 1) + [count]


def test_a_look_at_no_fewer_slots_than_there_are_is_attention(backend: Backend) -> None:
    case = Levels(backend, F32)
    t = tables_of(case.pages, 3, [95, 96, 1000])
    dense = backend.attend(case.q, case.kv, replace(t, looks=None), case.q_pos, PARAMS["plain"])
    none = backend.attend(case.q, case.kv, replace(t, looks=torch.zeros(3).int()), case.q_pos, PARAMS["plain"])
    all_slots = backend.attend(case.q, case.kv, t, case.q_pos, PARAMS["plain"])
    assert torch.equal(none, dense)
    assert_close(all_slots[1:], dense[1:])
    assert not torch.allclose(all_slots[0], dense[0], atol=1e-6)


def test_a_look_at_nothing_is_zero(backend: Backend) -> None:
    case = Levels(backend, F32)
    t = tables_of(case.pages, 3, list(COUNTS))
    o = backend.attend(case.q, case.kv, replace(t, counts=torch.zeros_like(t.counts)), case.q_pos, PARAMS["plain"])
    assert torch.equal(o, torch.zeros_like(o))


def test_windows_are_seen_whole(backend: Backend) -> None:
    case = Levels(backend, F32)
    t = tables_of(case.pages, 3, list(COUNTS), window=50)
    dense = backend.attend(case.q, case.kv, replace(t, looks=None), case.q_pos, PARAMS["plain"])
    assert torch.equal(backend.attend(case.q, case.kv, t, case.q_pos, PARAMS["plain"]), dense)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", POOL_DTYPES)
def test_the_bits_of_a_token_depend_on_itself_alone(variant: str, dtype: torch.dtype) -> None:
    """Neither on other requests, nor on how its text is divided into steps, nor on those that see all slots."""
    looks = (0, 0, 40, 41, 42, 30, 0, 20, 21, 22, 23, 24, 25)
    case = AttentionCase(fresh=(5, 1, 7), pages=((9, 7), (3, 5), (6, 6)), D=D, dtype=dtype, holes=0.01, looks=looks)
    q, q_pos = case.build_queries()
    t = case.build_tables()
    starts = t.query_start_loc.tolist()
    with use_variant(variant) as backend:
        kv = case.build_cache(backend)
        together = backend.attend(q, kv, t, q_pos, case.params)
        for b, (begin, end) in enumerate(itertools.pairwise(starts)):
            for i in range(begin, end):
                one = torch.tensor([0, 1], dtype=torch.int32)
                own = torch.tensor(looks[i : i + 1], dtype=torch.int32)
                alone = replace(t, rows=t.rows[b : b + 1], query_start_loc=one, looks=own)
                found = backend.attend(q[i : i + 1], kv, alone, q_pos[i : i + 1], case.params)
                assert torch.equal(found[0], together[i])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [BF16, INT8])
def test_threads_that_share_a_look_choose_as_one_does(isa: str, dtype: torch.dtype) -> None:
    case = AttentionCase(fresh=(1, 1), pages=((150, 7), (60, 3)), D=D, dtype=dtype, holes=0.01, looks=(300, 700))
    q, q_pos = case.build_queries()
    with use_isa(isa):
        kv = case.build_cache(cpu)
        found = []
        for n in (1, 6, 16):
            with torch_threads(n):
                found.append(cpu.attend(q, kv, case.build_tables(), q_pos, case.params))
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", POOL_DTYPES)
@pytest.mark.parametrize("dim", [24, 72])
def test_sketches_change_no_bit_for_tokens_that_see_all_slots(isa: str, dtype: torch.dtype, dim: int) -> None:
    """A pool with sketches has its keys by slot."""
    dim = 64 if dtype == INT4 else dim  # groups of 4 bits are even
    case = AttentionCase(fresh=(5, 1, 40), pages=((9, 7), (3, 5), (6, 6)), D=dim, dtype=dtype, holes=0.01)
    with use_isa(isa):
        expected = case.attend(cpu)
        assert torch.equal(case.with_changes(looks=(0,) * sum(case.fresh)).attend(cpu), expected)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_sketches_follow_their_slots(backend: Backend, dtype: torch.dtype) -> None:
    """Keys are those of a pool of 4 bits: written, moved, copied with a page, and rounded from other slots."""
    S, N = 32, 96
    rng = torch.Generator().manual_seed(2)
    k, v = (torch.randn(N, 1, D, generator=rng).to(dtype).float() for _ in "kv")
    kv = allocate(backend, 9, S, dtype)
    four = backend.allocate(9, S, D, INT4)
    first = torch.arange(N)[None].int() + S
    for pool in (kv, four):
        backend.write(pool, first, k, v, torch.arange(N).int())
        backend.copy(pool, torch.tensor([1, 2]), torch.tensor([4, 5]))
        backend.move(pool, torch.arange(3 * S, 4 * S)[None].int(), torch.arange(6 * S, 7 * S)[None].int())
    src, dst = torch.arange(S, 2 * S), torch.arange(7 * S, 8 * S)
    backend.requantize(kv, src, kv, dst, torch.arange(S).int())
    assert kv.sketches is not None
    keys, means, deviations = kv.sketches.split([four.k[0].numel(), 2 * S // 16 * D, 2 * S], 1)
    assert torch.equal(keys[1:7], four.k.view(9, -1).view(torch.uint8)[1:7])
    assert torch.equal(kv.sketches[7], kv.sketches[1]) and torch.equal(kv.sketches[6], kv.sketches[3])
    groups = v[:, 0].view(3, 2, 16, D)
    found = means[1:4].contiguous().view(torch.bfloat16).view(3, 2, D).float()
    assert torch.allclose(found, groups.mean(2), rtol=2**-8, atol=1e-6)
    distances = (groups - found[:, :, None]).norm(dim=-1).view(3, S)
    assert torch.allclose(deviations[1:4].contiguous().view(torch.bfloat16).float(), distances, rtol=2**-7)


@pytest.mark.parametrize("dtype", POOL_DTYPES)
def test_backends_agree_about_random_slots(backend: Backend, dtype: torch.dtype) -> None:
    """Up to slots whose weights by copies are nearly equal: each has a small part in the output."""
    case = AttentionCase(
        fresh=(1, 3), pages=((20, 18), (15, 20)), D=D, dtype=dtype, holes=0.01, looks=(60, 50, 70, 100)
    )
    expected = case.attend(reference)
    error = (case.attend(backend) - expected).abs().mean() / expected.abs().mean()
    dense = case.with_changes(looks=(0,) * 4).attend(reference)
    assert error < 0.05 < (expected - dense).abs().mean() / expected.abs().mean()


@pytest.mark.parametrize(
    ("variant", "stride"),
    [(variant, n) for variant in VARIANTS for n in (range(1, 34) if variant in FAST_VARIANTS else (1, 7, 20))],
)
def test_no_slot_is_lost_wherever_the_highest_lie(variant: str, stride: int) -> None:
    """What is chosen and what means stand for weigh as much as all slots do, beside a sink as heavy as they."""
    S, n = 16, 40
    N = n * S
    rng = torch.Generator().manual_seed(stride)
    k, v = (torch.randn(N, 1, D, generator=rng) for _ in "kv")
    v[..., 0] = 1  # an output's first number is the share of the slots
    k[::stride][:12] += torch.linspace(1, 2, len(k[::stride][:12]))[:, None, None]
    pages = 1 + torch.arange(n)[None]
    slots = (pages[:, torch.arange(N) // S] * S + torch.arange(N) % S).int()
    counts = [*range(1, 50), *range(50, N, 10)][:: 1 if variant in FAST_VARIANTS else 9]
    q_pos = torch.full((len(counts),), N - 1, dtype=torch.int32)
    q = torch.ones(len(counts), 1, D)
    params = AttentionParams(0.05, sink_logits=torch.tensor([math.log(N)]))
    with use_variant(variant) as backend:
        kv = allocate(backend, 1 + n, S, F32)
        backend.write(kv, slots, k, v, torch.arange(N).int())
        o = backend.attend(q, kv, tables_of(pages, len(q), counts), q_pos, params)
        dense = backend.attend(q, kv, tables_of(pages, len(q), None), q_pos, params)
    assert torch.allclose(o[..., 0], dense[..., 0], rtol=0.05)


@pytest.mark.parametrize("dtype", [F32, INT4])
def test_slots_that_move_in_any_order_are_sketched_once_all_are_there(backend: Backend, dtype: torch.dtype) -> None:
    kv = allocate(backend, 4, 16, dtype)
    rng = torch.Generator().manual_seed(3)
    k, v = (torch.randn(16, 1, D, generator=rng) for _ in "kv")
    backend.write(kv, torch.arange(16, 32)[None].int(), k, v, torch.arange(16).int())
    src = torch.arange(16, 32).flip(0)[None].int()
    backend.move(kv, src, src + 16)
    assert kv.sketches is not None and torch.equal(kv.sketches[2], kv.sketches[1])


@pytest.mark.parametrize("dtype", [F32, BF16, K8V4])
def test_a_slot_that_is_written_again_changes_its_group(backend: Backend, dtype: torch.dtype) -> None:
    """As a token does that fills the hole of another: alone, with others, moved, or rounded from another slot."""
    kv = allocate(backend, 4, 32, dtype)
    kv.pos.fill_(-1)
    rng = torch.Generator().manual_seed(3)
    k, v = (torch.randn(96, 1, D, generator=rng) for _ in "kv")
    slots = torch.arange(32, 128)[None].int()
    backend.write(kv, slots[:, :32], k[:32], v[:32], torch.arange(32).int())
    backend.write(kv, slots[:, 64:], k[64:], v[64:], torch.arange(32).int())
    holes = torch.tensor([[52, 35, 63]]).int()
    backend.write(kv, holes, k[32:35], v[32:35], torch.arange(32, 35).int())
    backend.write(kv, holes[:, :1] + 1, k[35:36], v[35:36], torch.tensor([35]).int())
    backend.move(kv, torch.tensor([[100, 101]]).int(), torch.tensor([[40, 54]]).int())
    backend.requantize(kv, torch.tensor([102]), kv, torch.tensor([41]), torch.tensor([2]).int())
    sources = torch.arange(32)
    sources[[20, 3, 31, 21, 8, 22, 9]] = torch.tensor([32, 33, 34, 35, 68, 69, 70])
    backend.write(kv, slots[:, 32:64], k[sources], v[sources], torch.arange(32).int())
    assert kv.sketches is not None and torch.equal(kv.sketches[2], kv.sketches[1])


def test_values_of_any_size_are_ranked(backend: Backend) -> None:
    """A distance that is no finite number counts as the largest one."""
    case = Levels(backend, F32)
    slots = torch.cat([p * 16 + torch.arange(16) for p in case.pages[0]])
    backend.write(
        case.kv,
        slots[None].int(),
        torch.zeros(len(slots), 1, D),
        torch.full((len(slots), 1, 48), 1e25),
        case.kv.pos[case.pages[0]].flatten(),
    )
    case.kv.pos[case.pages[0][-1], 9:] = -1
    o = backend.attend(case.q, case.kv, tables_of(case.pages, 3, list(COUNTS)), case.q_pos, PARAMS["plain"])
    assert o.isfinite().all()


def test_looks_that_cannot_be_had_are_refused(backend: Backend) -> None:
    case = Levels(backend, F32)
    t = tables_of(case.pages, 3, list(COUNTS))
    without = replace(case.kv, sketches=None)
    with pytest.raises(ValueError, match="no sketches"):
        backend.attend(case.q, without, t, case.q_pos, PARAMS["plain"])
    if backend is not reference:
        for looks in (torch.tensor([60]).int(), torch.tensor([1, 2, 3])):
            with pytest.raises((ValueError, TypeError), match=r"tables.looks must be"):
                backend.attend(case.q, case.kv, replace(t, looks=looks), case.q_pos, PARAMS["plain"])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [d for d in POOL_DTYPES if d != INT4])
@pytest.mark.parametrize("dim", [64, 24])
def test_a_pool_in_a_file_changes_no_bit(isa: str, dtype: torch.dtype, dim: int, tmp_path: Path) -> None:
    """Also where fewer slots are resident than one look reads, and where slots are written again."""
    case = AttentionCase(
        fresh=(1, 3), pages=((20, 18), (15, 20)), D=dim, dtype=dtype, holes=0.01, looks=(60, 50, 70, 300)
    )
    rng = torch.Generator().manual_seed(0)
    q, q_pos = case.build_queries()
    slots = torch.randperm(case.num_pages() * case.S - case.S, generator=rng)[:400].int() + case.S
    k, v = (torch.randn(200, 1, dim, generator=rng) for _ in "kv")
    pages = torch.arange(1, 8)
    with use_isa(isa):
        pools = [case.build_cache(cpu) for _ in range(3)]
        little = 4 * pools[0].pos.numel() + 256 * (5 + ffi.to_c_pool(pools[0]).record_bytes)
        for i, memory_bytes in ((1, 2**30), (2, little)):
            kv = pools[i]
            format = PageFormat(case.S, dtype, dim, dim, has_sketches=True)
            with pytest.raises(ValueError, match=r"kv_memory is 0\.00 MiB too small"):
                cpu.allocate_in_file(kv.num_pages, format, format.bytes, tmp_path, little - 1)
            pools[i] = cpu.allocate_in_file(kv.num_pages, format, format.bytes, tmp_path, memory_bytes)
            pools[i] = pools[i].with_sketches(kv.sketch_bytes)
            for name in ("k", "v", "sketches", "pos", "mass"):
                getattr(pools[i], name).copy_(getattr(kv, name))
        for _ in range(2):
            for dst, src in ((pages, pages + 9), (pages + 20, pages)):
                outputs = [cpu.attend(q, kv, case.build_tables(), q_pos, case.params) for kv in pools]
                assert torch.equal(outputs[1], outputs[0]) and torch.equal(outputs[2], outputs[0])
                for kv in pools:
                    cpu.write(kv, slots[None, :200], k, v, kv.pos.view(-1)[slots[:200].long()])
                    cpu.move(kv, slots[None, :50], slots[None, 50:100])
                    src_slots, dst_slots = slots[100:200].long().view(2, 50)
                    cpu.requantize(kv, src_slots, kv, dst_slots, kv.pos.view(-1)[dst_slots])
                    cpu.copy(kv, src, dst)
    many, few = (kv.resident for kv in pools[1:])
    assert many is not None and few is not None
    assert many.num_read == few.num_read and 0 < many.num_loaded < few.num_loaded
