"""The first law of kernels/api.py: every backend equals the reference, on every instruction set that runs here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retain.kernels import reference
from retain.kernels.api import NO_WINDOW, Backend, Tables
from retain.kernels.attention_params import AttentionParams
from retain.kernels.slots.quantized_slots import rotate
from tests.helpers.attention_case import AttentionCase, assert_close, cpu_tolerance
from tests.helpers.backend_variants import FAST_VARIANTS, VARIANTS, use_variant
from tests.helpers.marks import slow
from tests.helpers.slots import read_pages

F32, BF16, INT8, K8V4, INT4 = torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int4
FP8 = torch.float8_e4m3fn  # triton has it; test_triton.py compares attention
POOL_DTYPES = [F32, BF16, INT8, K8V4, INT4]


@pytest.fixture(params=VARIANTS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Run the test on every backend and instruction set that has pools of its dtype."""
    with use_variant(request.param) as backend:
        if (dtype := request.node.callspec.params.get("dtype", F32)) not in backend.POOL_DTYPES:
            pytest.skip(f"no pool of {dtype}")
        yield backend


def assert_matches_reference(case: AttentionCase) -> None:
    """Compare the output of every fast backend and instruction set with the reference's."""
    # ALiBi's scores grow with the distance, and so does what float32 rounds off them.
    tolerance = cpu_tolerance(case.dtype, 1e-4 if case.alibi else 1e-5)
    expected = case.attend(reference)
    for variant in FAST_VARIANTS:
        with use_variant(variant) as backend:
            assert_close(case.attend(backend), expected, tolerance, variant)


# One to many fresh tokens, tables of every length, heads with no page.
FRESH = (1, 2, 7, 8, 9, 33, 130)
STEP = AttentionCase(fresh=FRESH, pages=((3, 1), (0, 2), (5, 5), (1, 0), (9, 4), (2, 6), (6, 7)))


@pytest.mark.parametrize("D", [8, 16, 24, 64, 80, 128, 256])
@pytest.mark.parametrize("S", [16, *slow(32, 64)])
@pytest.mark.parametrize("dtype", POOL_DTYPES)
def test_shapes(D: int, S: int, dtype: torch.dtype) -> None:
    for R in (1, 3, 4):
        assert_matches_reference(STEP.with_changes(D=D, S=S, R=R, dtype=dtype, window=100, seed=D + S + R))


@pytest.mark.parametrize("sizes", [(24, 8), (64, 128), (192, 128), (576, 512)])
@pytest.mark.parametrize("dtype", POOL_DTYPES)
def test_keys_and_values_of_different_sizes(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """Of DeepSeek's: 192 and 128 as they are computed, 576 and 512 as they are cached."""
    D, V = sizes
    case = STEP.with_changes(D=D, V=V, S=16, dtype=dtype, sinks=True, window=100)
    assert case.attend(reference).shape == (sum(FRESH), 2 * 3, V)
    assert_matches_reference(case)


@pytest.mark.parametrize("S", [48, 96, 512])
def test_odd_page_sizes(S: int) -> None:
    assert_matches_reference(STEP.with_changes(S=S))


@pytest.mark.parametrize("R", [2, 5, 7, 8, 50])
def test_group_sizes(R: int) -> None:
    assert_matches_reference(STEP.with_changes(R=R, D=16))


@pytest.mark.parametrize("window", [NO_WINDOW, 1, 17, 64, 200])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("holes", [0.0, 0.5])
def test_visibility_mask(window: int, shuffled: bool, holes: float) -> None:
    assert_matches_reference(STEP.with_changes(window=window, shuffled=shuffled, holes=holes, D=16))


@pytest.mark.parametrize("window", [5, 64, 200])
def test_per_request_windows(window: int) -> None:
    assert_matches_reference(STEP.with_changes(window=window, per_request_windows=True, D=16))


@pytest.mark.parametrize("window", [NO_WINDOW, 64])
@pytest.mark.parametrize("dtype", POOL_DTYPES)
def test_alibi(window: int, dtype: torch.dtype) -> None:
    assert_matches_reference(STEP.with_changes(alibi=True, window=window, dtype=dtype, shuffled=True))


@pytest.mark.parametrize("window", [NO_WINDOW, 64])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("dtype", POOL_DTYPES)
def test_softcap_and_sink_logits(dtype: torch.dtype, softcap: float | None, window: int) -> None:
    """Of tables in one part and in several, and of heads with no page."""
    assert_matches_reference(STEP.with_changes(dtype=dtype, softcap=softcap, sinks=softcap is None, window=window))
    fresh, pages = (1, 65), ((80, 3), (41, 0))
    case = AttentionCase(fresh, pages, dtype=dtype, softcap=softcap, sinks=True, alibi=True, window=window)
    assert_matches_reference(case)


@pytest.mark.parametrize("q_dtype", [BF16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", POOL_DTYPES)
def test_output_has_the_query_dtype(q_dtype: torch.dtype, dtype: torch.dtype) -> None:
    assert_matches_reference(STEP.with_changes(q_dtype=q_dtype, dtype=dtype))


@pytest.mark.parametrize("fresh", [65, *slow(1, 5, 64, 200)])
@pytest.mark.parametrize("S", [16, 64])
@pytest.mark.parametrize("window", [NO_WINDOW, 1500])
@pytest.mark.parametrize("dtype", [BF16, INT8, K8V4, INT4])
def test_long_contexts(fresh: int, S: int, window: int, dtype: torch.dtype) -> None:
    pages = ((2100 // S, 3000 // S), (1, 1), (700 // S, 513 // S + 1))
    assert_matches_reference(AttentionCase(fresh=(fresh, 1, 3), pages=pages, S=S, dtype=dtype, window=window))


def test_many_requests() -> None:
    pages = tuple((b % 7, (5 * b) % 11, 1) for b in range(40))
    assert_matches_reference(AttentionCase(fresh=tuple(1 + b % 3 for b in range(40)), pages=pages, D=32))


def test_large_scores(backend: Backend) -> None:
    case = STEP.with_changes(D=16)
    q, q_pos = case.build_queries()
    t, scale = case.build_tables(), 4.0  # scores up to about 60
    o = backend.attend(q, case.build_cache(backend), t, q_pos, AttentionParams(scale))
    assert_close(o, reference.attend(q, case.build_cache(reference), t, q_pos, AttentionParams(scale)))


def test_query_without_visible_slots_gives_zero(backend: Backend) -> None:
    case = AttentionCase(fresh=(3, 70, 2), pages=((40, 0), (3, 2), (0, 0)), holes=0.0)
    q, q_pos = case.build_queries()
    kv = case.build_cache(backend)
    q_pos[0], q_pos[1] = -1, 0
    kv.pos[kv.pos == 0] = -1
    o = backend.attend(q, kv, case.build_tables(), q_pos, AttentionParams(1.0))
    assert (o[:2] == 0).all() and (o[73:] == 0).all()
    assert (o[2, :3] != 0).all() and (o[2, 3:] == 0).all()


def test_empty_step(backend: Backend) -> None:
    kv = backend.allocate(2, 16, 16, F32)
    none = torch.zeros(0, dtype=torch.int32)
    tables = Tables(none.view(0, 2, 0), none.view(0, 2), none, none, torch.zeros(1, dtype=torch.int32))
    assert backend.attend(torch.zeros(0, 4, 16), kv, tables, none, AttentionParams(1.0)).shape == (0, 4, 16)
    backend.write(kv, none.view(2, 0), torch.zeros(0, 2, 16), torch.zeros(0, 2, 16), none)
    backend.copy(kv, none.long(), none.long())


def test_tokens_outside_all_requests_give_zero(backend: Backend) -> None:
    case = AttentionCase(fresh=(2, 3), pages=((4,), (4,)))
    q, q_pos = case.build_queries()
    t = case.build_tables()
    only = replace(t, rows=t.rows[1:], query_start_loc=torch.tensor([2, 4], dtype=torch.int32))
    o = backend.attend(q, case.build_cache(backend), only, q_pos, AttentionParams(1.0))
    want = reference.attend(q, case.build_cache(reference), only, q_pos, AttentionParams(1.0))
    assert_close(o, want)
    assert (o[[0, 1, 4]] == 0).all()


def test_tables_may_be_views(backend: Backend) -> None:
    case = STEP.with_changes(D=16)
    q, q_pos = case.build_queries()
    t = case.build_tables()
    pages = torch.stack([t.pages, t.pages.flip(0)], 1)[:, 0]  # a layer of [N, L, G, n]
    counts = torch.stack([t.counts, t.counts + 1], 1)[:, 0]
    windows = torch.stack([t.windows, t.windows + 1], 1)[:, 0]
    views = replace(t, pages=pages, counts=counts, windows=windows)
    assert not any(x.is_contiguous() for x in (pages, counts, windows))
    kv = case.build_cache(backend)
    o = backend.attend(q, kv, views, q_pos, AttentionParams(1.0))
    assert torch.equal(o, backend.attend(q, kv, t, q_pos, AttentionParams(1.0)))


@pytest.mark.parametrize("dtype", [F32, INT8, K8V4, INT4])
@pytest.mark.parametrize("fresh", [1, 4, 100])
def test_other_requests_change_no_bit(fresh: int, dtype: torch.dtype) -> None:
    case = AttentionCase(fresh=(fresh, 1, 5, 90), pages=((80, 3), (1, 2), (40, 50), (4, 4)), dtype=dtype)
    for variant in FAST_VARIANTS:
        with use_variant(variant) as backend:
            assert case.first_request_is_independent(backend), variant


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("source_dtype", [F32, BF16, torch.float16, torch.float64])
def test_write_rounds_as_torch_does(backend: Backend, dtype: torch.dtype, source_dtype: torch.dtype) -> None:
    """Read back one slot at a time: a query that sees one slot gives its v, whatever its k."""
    n, G, D, S = 12, 2, 40, 16
    P = n * G + 1
    kv = backend.allocate(P, S, D, dtype)
    kv.pos.fill_(-1)
    bits = torch.randint(-(2**31), 2**31, (n, G, D), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    v = bits.view(F32)
    v = torch.where(v.isfinite() & (v.abs() < 1e30) & (v.abs() > 1e-30), v, 1 + 2.0**-8)  # a tie: to even, down
    v[0, 0, 0] = 1 + 3 * 2.0**-8  # a tie: to even, up
    v = v.to(source_dtype).nan_to_num(posinf=7.0, neginf=-7.0)
    pages = torch.arange(1, P, dtype=torch.int32).view(n, G, 1)
    slots = pages[..., 0].T * S + 3  # [G, n], a strided view
    backend.write(kv, slots, torch.ones(n, G, D, dtype=source_dtype), v, torch.zeros(n, dtype=torch.int32))
    counts = torch.ones(n, G, dtype=torch.int32)
    rows, zeros = torch.arange(n, dtype=torch.int32), torch.zeros(n, dtype=torch.int32)
    tables = Tables(pages, counts, zeros + NO_WINDOW, rows, torch.arange(n + 1, dtype=torch.int32))
    o = backend.attend(torch.ones(n, G, D), kv, tables, torch.zeros(n, dtype=torch.int32), AttentionParams(1.0))
    assert torch.equal(o, v.to(dtype).float())
    assert int((kv.pos >= 0).sum()) == n * G


def test_write_of_many_tokens(backend: Backend) -> None:
    """Chunks written into holes where others lie already."""
    for kernels in (backend, reference):
        kv = STEP.build_cache(kernels)
        rng = torch.Generator().manual_seed(9)
        slots = torch.randperm(kv.num_pages * 32, generator=rng)[: 2 * 300].view(300, 2).T.int()  # [G, T], strided
        k, v = torch.randn(2, 300, 2, 64, generator=rng)
        pos = torch.randint(0, 100, (600,), generator=rng).int()[::2]
        kernels.write(kv, slots, k, v, pos)
        q, q_pos = STEP.build_queries()
        o = kernels.attend(q, kv, STEP.build_tables(), q_pos, AttentionParams(0.125))
        if kernels is backend:
            got, got_pos = o, kv.pos
    assert_close(got, o)
    assert torch.equal(got_pos, kv.pos)


@pytest.mark.parametrize("S", [16, 48])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_write_read_round_trip(backend: Backend, dtype: torch.dtype, S: int) -> None:
    kv = backend.allocate(7, S, 24, dtype)
    slots = torch.randperm(6 * S)[None] + S
    k, v = torch.randn(2, 6 * S, 1, 24).to(dtype)
    backend.write(kv, slots.int(), k, v, torch.arange(6 * S, dtype=torch.int32))
    pages, some = torch.tensor([4, 1, 6]), slots[0, ::3]
    for got, got_slots, put in zip(read_pages(backend, kv, pages), backend.read_slots(kv, some), (k, v), strict=True):
        want = torch.zeros(7 * S, 24).index_copy_(0, slots[0], put[:, 0].float())
        assert torch.equal(got, want.view(7, S, 24)[pages])
        assert torch.equal(got_slots, want[some])


@pytest.mark.parametrize("S", [16, 48])
@pytest.mark.parametrize("D", [8, 64, 72, 256])
@pytest.mark.parametrize("source_dtype", [F32, BF16, torch.float16])
@pytest.mark.parametrize("dtype", [INT8, K8V4, INT4, FP8])
def test_quantized_slots_equal_the_reference_to_the_bit(
    backend: Backend, dtype: torch.dtype, source_dtype: torch.dtype, D: int, S: int
) -> None:
    """Slots of all sizes, zeros, ties, and values whose scale would be too small for a normal number."""
    n = 5 * S
    rng = torch.Generator().manual_seed(D)
    x = torch.randn(2, n, 1, D, generator=rng) * 10.0 ** torch.randint(-36, 36, (2, n, 1, 1), generator=rng)
    x[0, 0], x[1, 1, :, 1:] = 0, 0
    x[:, 2] = torch.arange(D) / 2  # ties, once the largest is 127 scales
    x[:, 2, 0, 0] = 127
    floats = torch.arange(126).byte().view(FP8).float()  # those from 0 to 416, in order
    x[:, 3] = ((floats[1:] + floats[:-1]) / 2).repeat(3)[:D]  # ties, once the largest is 448 scales
    x[:, 3, 0, 0] = 448
    k, v = x.to(source_dtype).nan_to_num(posinf=7.0, neginf=-7.0)
    slots = torch.randperm(n, generator=rng) + S
    pos, pages = torch.arange(n, dtype=torch.int32), torch.arange(1, 6)
    held = []
    for kernels in (backend, reference):
        kv = kernels.allocate(6, S, D, dtype)
        kernels.write(kv, slots[None].int(), k, v, pos)
        held.append((*read_pages(kernels, kv, pages), *kernels.read_slots(kv, slots)))
    assert all(torch.equal(a, b) for a, b in zip(*held, strict=True))
    error = (held[1][2].double() - k[:, 0].double()).norm(dim=-1)
    step = {INT4: 8, FP8: 14}.get(dtype, 127)  # of which the largest number has so many
    assert (error <= D**0.5 * rotate(k[:, 0]).abs().amax(-1) / step + 1e-26).all()


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("dtype", [*POOL_DTYPES, FP8])
def test_what_was_written_to_holes_reaches_no_result(backend: Backend, dtype: torch.dtype, number: float) -> None:
    """Their weight is 0, and 0 times NaN is NaN. Decode and prefill tiles, and masses."""
    case = AttentionCase((1, 9, 70), ((7, 4), (0, 2), (9, 3)), R=2, holes=0.3, dtype=dtype, shared_pages=False)
    for kernels in (backend, reference):
        kv, clean = (case.build_cache(kernels) for _ in range(2))
        holes = (kv.pos.view(-1) < 0).nonzero().flatten()
        numbers = torch.full((len(holes), 1, case.D), number)
        kernels.write(kv, holes[None].int(), numbers, numbers, torch.full_like(holes, -1).int())
        assert kernels.read_slots(kv, holes)[1].isfinite().all()
        scoring = case.build_scoring(0)
        assert torch.equal(case.attend(kernels, kv, scoring), case.attend(kernels, clean, scoring))
        is_live = clean.pos >= 0
        assert torch.equal(kv.mass.transpose(1, 2)[is_live], clean.mass.transpose(1, 2)[is_live])


@pytest.mark.parametrize("V", [None, 40])
@pytest.mark.parametrize("dtype", [*POOL_DTYPES, FP8])
def test_copy(backend: Backend, dtype: torch.dtype, V: int | None) -> None:
    """A table of copies gives the bits that the table of the originals gave, and no other page has changed."""
    case = AttentionCase(fresh=(2, 40), pages=((7, 4), (9, 3)), V=V, dtype=dtype, window=100)
    q, q_pos = case.build_queries()
    t = case.build_tables()
    owned = torch.arange(t.pages.shape[2]) < t.counts[:, :, None]  # [N, G, n]
    src = torch.unique(t.pages[owned]).long()
    P = case.num_pages()
    kv = case.build_cache(backend, num_extra_pages=len(src))
    dst = torch.randperm(len(src), generator=torch.Generator().manual_seed(0)) + P
    before = backend.attend(q, kv, t, q_pos, AttentionParams(1.0))
    backend.copy(kv, src, dst)
    assert torch.equal(kv.pos[dst], kv.pos[src])
    assert torch.equal(backend.attend(q, kv, t, q_pos, AttentionParams(1.0)), before)
    pages = t.pages.clone()
    pages[owned] = dst[torch.searchsorted(src, t.pages[owned].long())].int()
    kv.pos[src] = -1
    assert torch.equal(backend.attend(q, kv, replace(t, pages=pages), q_pos, AttentionParams(1.0)), before)


@pytest.mark.parametrize("V", [None, 40])
@pytest.mark.parametrize("dtype", [*POOL_DTYPES, FP8])
def test_move(backend: Backend, dtype: torch.dtype, V: int | None) -> None:
    """Live slots that move to the front of their tables are looked at as before; masses go with them."""
    case = AttentionCase(fresh=(2, 40), pages=((7, 4), (9, 3)), V=V, dtype=dtype, holes=0.5, shared_pages=False)
    q, q_pos = case.build_queries()
    t, kv = case.build_tables(), case.build_cache(backend, score_columns=2)
    kv.mass.copy_(torch.rand(kv.mass.shape, generator=torch.Generator().manual_seed(1)))
    S, lists = case.S, []
    for row in t.rows.tolist():
        for g in range(case.G):
            pages = t.pages[row, g, : int(t.counts[row, g])].long()
            own = (pages[:, None] * S + torch.arange(S)).flatten()  # the table's slots
            lists.append((own, own[kv.pos.view(-1)[own] >= 0]))
    n = min(len(live) for _, live in lists)
    for own, live in lists:  # all lists as long as the shortest
        kv.pos.view(-1)[own] = -1
        kv.pos.view(-1)[live[:n]] = live[:n].int() % 50
    before = backend.attend(q, kv, t, q_pos, AttentionParams(1.0))
    src = torch.stack([live[:n] for _, live in lists])
    dst = torch.stack([own[:n] for own, _ in lists])
    pos, mass = kv.pos.clone(), kv.mass.clone()
    backend.move(kv, src.int(), dst.int())
    for own, _ in lists:
        kv.pos.view(-1)[own[n:]] = -1
    assert torch.equal(kv.pos.view(-1)[dst], pos.view(-1)[src])
    assert torch.equal(kv.mass[dst // S, :, dst % S], mass[src // S, :, src % S])
    assert_close(backend.attend(q, kv, t, q_pos, AttentionParams(1.0)), before, cpu_tolerance(dtype))


PRIORITIES = torch.tensor([-torch.nan, -torch.inf, -1.5, -0.0, 0.0, 1e-40, 2.0, torch.inf, torch.nan])


def random_slots(N: int, S: int, holes: float, few: bool, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return priorities, of a few numbers or of many, and positions of slots, both [N, S]; some of them are holes."""
    g = torch.Generator().manual_seed(seed)
    pos = torch.stack([torch.randperm(2 * S, generator=g)[:S] for _ in range(N)]).int()
    pos[torch.rand(N, S, generator=g) < holes] = -1
    return PRIORITIES[torch.randint(9, (N, S), generator=g)] if few else torch.randn(N, S, generator=g), pos


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_select_victims(backend: Backend, data: st.DataObject) -> None:
    """Among equal priorities, holes, minus zeros, infinities and those that must stay, the same slots in one order."""
    N, S = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3000) | st.integers(1, 300))
    seed = data.draw(st.integers(0, 2**31))
    priority, pos = random_slots(N, S, data.draw(st.sampled_from([0.0, 0.3, 1.0])), data.draw(st.booleans()), seed)
    used = torch.randint(1, S + 1, (N,), generator=torch.Generator().manual_seed(seed)).int()
    n = data.draw(st.integers(0, min(int(used.min()), 20)) | st.just(min(int(used.min()), 100)))
    args = priority, pos, used, data.draw(st.integers(0, 4)), data.draw(st.integers(0, 2 * S)), n
    places = backend.select_victims(*args)
    assert places.tolist() == reference.select_victims(*args).tolist()
    assert all(len(set(line)) == n and all(p < u for p in line) for line, u in zip(places.tolist(), used, strict=True))


def test_select_victims_of_long_lists(backend: Backend) -> None:
    """Most victims of the second list are neighbours; those of the third lie 1024 slots apart."""
    S, n = 66_000, 40
    priority, pos = random_slots(3, S, 0.0001, False, seed=5)
    priority[1, 30_000 : 30_000 + n] = -9
    priority[2, 7::1024] = -9
    args = priority, pos, torch.tensor([S, S - 100, S - 3], dtype=torch.int32), 4, 2 * S - 500, n
    assert torch.equal(backend.select_victims(*args), reference.select_victims(*args))


def test_select_victims_rejects_short_lists(backend: Backend) -> None:
    with pytest.raises(ValueError, match="too few"):
        backend.select_victims(
            torch.zeros(1, 4), torch.zeros(1, 4, dtype=torch.int32), torch.tensor([2]).int(), 0, 9, 3
        )


@st.composite
def attention_cases(draw: st.DrawFn) -> AttentionCase:
    B, G = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    S = draw(st.sampled_from([16, 32, 64]))
    at_most = 1200 // S
    return AttentionCase(
        fresh=draw(st.tuples(*[st.integers(1, 90)] * B)),
        pages=tuple(draw(st.tuples(*[st.integers(0, at_most)] * G)) for _ in range(B)),
        D=draw(st.sampled_from([8, 16, 40, 64, 72])),
        V=draw(st.sampled_from([None, None, 8, 48, 80])),
        R=draw(st.integers(1, 5)),
        S=S,
        dtype=draw(st.sampled_from(POOL_DTYPES)),
        holes=draw(st.sampled_from([0.0, 0.1, 0.9, 1.0])),
        shuffled=draw(st.booleans()),
        window=draw(st.sampled_from([NO_WINDOW, 1, 30, 600])),
        per_request_windows=draw(st.booleans()),
        alibi=draw(st.booleans()),
        softcap=draw(st.sampled_from([None, 0.3, 20.0])),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
    )


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(case=attention_cases())
def test_random_cases(case: AttentionCase) -> None:
    assert_matches_reference(case)
