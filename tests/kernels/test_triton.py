"""The triton backend under its interpreter: a small choice of test_backends.py and test_attention_mass.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retain.kernels import reference
from retain.kernels.api import NO_WINDOW
from retain.kernels.attention_params import AttentionParams
from retain.kernels.rope import Rope
from retain.kernels.slots.scoring import GAUSSIAN, GUMBEL, NO_NOISE
from tests.helpers.attention_case import AttentionCase, assert_close
from tests.helpers.device_adapter import triton_backend
from tests.helpers.marks import every_third
from tests.kernels.test_attention_mass import SCORING_KINDS

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INT8, K8V4, INT4, FP8 = torch.int8, torch.uint8, torch.int4, torch.float8_e4m3fn
triton = triton_backend()
pytestmark = pytest.mark.skipif(triton.unavailable_reason() is not None, reason=str(triton.unavailable_reason()))

# Decode tiles with several splits, a prefill tile, a head without pages.
STEP = AttentionCase(fresh=(1, 9, 33), pages=((9, 1), (0, 2), (2, 3)))
CASES = {
    "head dim 8": STEP.with_changes(D=8, S=16, window=50),
    "head dim 80, bfloat16": STEP.with_changes(D=80, R=4, dtype=BF16, q_dtype=BF16),
    "head dim 128, float16": STEP.with_changes(D=128, R=2, dtype=F16, q_dtype=F16, shuffled=True),
    "head dim 256": STEP.with_changes(D=256, R=1, S=64, pages=((3, 1), (0, 1), (1, 2))),
    "page size 48": STEP.with_changes(S=48, D=16, holes=0.5),
    "windows of each request": STEP.with_changes(window=40, per_request_windows=True, shuffled=True, D=16),
    "a window alone": STEP.with_changes(window=1, D=16),
    "alibi": STEP.with_changes(alibi=True, D=16, holes=0.0),
    "alibi and a window": STEP.with_changes(alibi=True, D=16, window=64, dtype=BF16),
    "50 query heads": STEP.with_changes(R=50, D=16, fresh=(1, 2, 3)),
    "head dim 80, int8": STEP.with_changes(D=80, R=4, dtype=INT8, q_dtype=BF16),
    "head dim 80, k8v4": STEP.with_changes(D=80, R=4, dtype=K8V4, q_dtype=BF16),
    "page size 48, k8v4": STEP.with_changes(S=48, D=64, dtype=K8V4, window=40),
    "page size 48, int8": STEP.with_changes(S=48, D=16, dtype=INT8, window=40, alibi=True),
    "head dim 8, int4": STEP.with_changes(D=8, S=16, dtype=INT4, window=50),
    "head dim 80, int4": STEP.with_changes(D=80, R=4, dtype=INT4, q_dtype=BF16, shuffled=True),
    "head dim 256, int4": STEP.with_changes(D=256, R=1, S=64, dtype=INT4, pages=((3, 1), (0, 1), (1, 2))),
    "page size 48, int4": STEP.with_changes(S=48, D=64, dtype=INT4, window=40, alibi=True, holes=0.5),
    "page size 160, k8v4": STEP.with_changes(S=160, D=64, dtype=K8V4, pages=((2, 1), (0, 1), (1, 2))),
    "page size 224, int4": STEP.with_changes(S=224, D=64, dtype=INT4, pages=((2, 1), (0, 1), (1, 2))),
    "page size 80, fp8": STEP.with_changes(S=80, D=16, dtype=FP8, pages=((3, 1), (0, 1), (1, 2))),
    "values of another size": STEP.with_changes(D=24, V=40, sinks=True),
    "values of another size, int8": STEP.with_changes(D=64, V=24, dtype=INT8, window=40),
    "head dim 8, fp8": STEP.with_changes(D=8, S=16, dtype=FP8, window=50),
    "head dim 80, fp8": STEP.with_changes(D=80, R=4, dtype=FP8, q_dtype=BF16),
    "page size 48, fp8": STEP.with_changes(S=48, D=16, dtype=FP8, window=40, alibi=True, holes=0.5),
    "values of another size, fp8": STEP.with_changes(D=64, V=24, dtype=FP8, softcap=0.5, sinks=True),
    "values of another size, k8v4": STEP.with_changes(D=80, V=64, dtype=K8V4),
    "values of another size, int4": STEP.with_changes(D=32, V=64, dtype=INT4),
    "as MLA is cached": STEP.with_changes(D=576, V=512, R=2, S=16, dtype=BF16, fresh=(1, 9, 20), holes=0.0),
    "softcap": STEP.with_changes(D=16, softcap=0.5),
    "sinks": STEP.with_changes(D=16, sinks=True),
    "softcap and sinks, int8": STEP.with_changes(D=64, dtype=INT8, softcap=0.5, sinks=True, alibi=True, window=64),
    "float64 queries": STEP.with_changes(q_dtype=torch.float64, D=16),
}


def tolerance(case: AttentionCase) -> float:
    return {F32: 1e-4 if case.alibi else 1e-5, F16: 2**-10}.get(case.dtype, 2**-7)


@pytest.mark.parametrize("name", every_third(CASES))
def test_attention_matches_reference(name: str) -> None:
    case = CASES[name]
    assert_close(case.attend(triton), case.attend(reference), tolerance(case))


@pytest.mark.slow
def test_tables_with_different_numbers_of_splits() -> None:
    """256 blocks are 64 splits, 257 blocks are 52."""
    case = AttentionCase(fresh=(1, 1), pages=((256, 5), (209, 257)), S=16, D=16, R=1, holes=0.9)
    assert_close(case.attend(triton), case.attend(reference), tolerance(case))


@pytest.mark.parametrize("fresh", [1, 9, 80])
def test_other_requests_change_no_bit(fresh: int) -> None:
    case = AttentionCase(fresh=(fresh, 1, 30), pages=((9, 1), (1, 2), (18, 3)), D=16, R=2)
    assert case.first_request_is_independent(triton)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_dense_tables_do_not_read_positions(dtype: torch.dtype) -> None:
    """Place i holds position i or nothing yet, and the kernel never loads positions."""
    case = STEP.with_changes(D=16, holes=0.0, dtype=dtype, pages=((9, 9), (2, 2), (3, 3)))
    q, q_pos = case.build_queries()
    q_pos = q_pos - 5  # the last places are still holes
    kv, t = case.build_cache(triton), case.build_tables()
    kv.pos[kv.pos > q_pos.max()] = -1
    expected = triton.attend(q, kv, t, q_pos, AttentionParams(0.25))
    kv.pos.fill_(-1)
    dense = replace(t, dense=torch.ones(len(t.windows), dtype=torch.int32))
    assert torch.equal(triton.attend(q, kv, dense, q_pos, AttentionParams(0.25)), expected)
    windowed = replace(dense, windows=torch.full_like(t.windows, 10**6))  # with a window positions are loaded
    assert (triton.attend(q, kv, windowed, q_pos, AttentionParams(0.25)) == 0).all()


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 20])
def test_dense_tiles_of_any_size_equal_those_that_read_positions(tokens: int) -> None:
    """A kernel was wrong on a GPU in tiles of 32 rows alone, where a maximum over rows became one instruction."""
    case = STEP.with_changes(fresh=(tokens, 1), pages=((9, 9), (2, 2)), D=64, R=4, dtype=BF16, holes=0.0)
    q, q_pos = case.build_queries()
    kv, t = case.build_cache(triton), case.build_tables()
    dense = replace(t, dense=torch.ones(len(t.windows), dtype=torch.int32))
    expected = triton.attend(q, kv, t, q_pos, AttentionParams(0.125))
    assert torch.equal(triton.attend(q, kv, dense, q_pos, AttentionParams(0.125)), expected)
    assert_close(expected, case.attend(reference), tolerance(case))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("dtype", [F32, INT8])
def test_the_longest_table_of_a_step_changes_no_bit_of_others(tokens: int, dtype: torch.dtype) -> None:
    """It says how many splits are planned, and so which are empty."""
    case = AttentionCase(fresh=(tokens,), pages=((140, 90),), D=32, R=2, dtype=dtype)
    q, q_pos = case.build_queries()
    kv, t = case.build_cache(triton), case.build_tables()
    wide = replace(t, pages=torch.nn.functional.pad(t.pages, (0, 2000)))
    outputs = [
        triton.attend(q, kv, replace(wide, max_pages=n), q_pos, AttentionParams(0.25)) for n in (140, 300, 1100, 2100)
    ]
    assert all(torch.equal(o, outputs[0]) for o in outputs)


MASS_CASES = {
    "splits": (AttentionCase((1, 3, 0), ((9, 10), (5, 0), (2, 2)), D=16, shared_pages=False), "decaying", "sum"),
    "splits, noise": (AttentionCase((1, 2), ((9, 10), (5, 1)), D=16, shared_pages=False), "keyformer", "each"),
    "tiles": (AttentionCase((40, 1), ((3, 2), (3, 3)), D=16, shared_pages=False), "keyformer, noise drawn once", "sum"),
    "tiles, each head": (AttentionCase((40,), ((3, 4),), D=16, shared_pages=False), "decaying", "each"),
    "alibi": (AttentionCase((30, 1), ((2, 4), (3, 4)), D=16, alibi=True, shared_pages=False), "tempered", "sum"),
    "gaussian": (AttentionCase((30, 1), ((2, 4), (3, 4)), D=16, shuffled=True, shared_pages=False), "gaussian", "sum"),
    "values of another size": (
        AttentionCase((1, 2, 40), ((9, 10), (5, 1), (3, 2)), D=24, V=48, shared_pages=False),
        "keyformer",
        "each",
    ),
    "sinks, splits": (
        AttentionCase((1, 3, 0), ((9, 10), (5, 0), (2, 2)), D=16, sinks=True, softcap=0.5, shared_pages=False),
        "keyformer",
        "each",
    ),
    "sinks, tiles": (AttentionCase((40, 1), ((3, 2), (3, 3)), D=16, sinks=True, shared_pages=False), "gaussian", "sum"),
    "sinks, constant": (
        AttentionCase((40, 1), ((3, 2), (9, 9)), D=16, sinks=True, shared_pages=False),
        "constant",
        "sum",
    ),
    "softcap, tiles": (AttentionCase((40,), ((3, 4),), D=16, softcap=0.5, shared_pages=False), "tempered", "each"),
    "constant, bfloat16": (
        AttentionCase((30, 1), ((2, 4), (3, 4)), D=64, dtype=BF16, shared_pages=False),
        "constant",
        "sum",
    ),
    "int8": (AttentionCase((2, 30), ((4, 2), (3, 4)), D=64, dtype=INT8, shared_pages=False), "keyformer", "sum"),
    "k8v4": (AttentionCase((2, 30), ((4, 2), (3, 4)), D=64, dtype=K8V4, shared_pages=False), "tempered", "each"),
    "fp8": (AttentionCase((2, 30), ((4, 2), (3, 4)), D=64, dtype=FP8, shared_pages=False), "keyformer", "each"),
    "int4": (AttentionCase((2, 30), ((4, 2), (3, 4)), D=64, dtype=INT4, shared_pages=False), "keyformer", "sum"),
    "int4, each head": (
        AttentionCase((30, 2), ((3, 4), (4, 2)), D=80, dtype=INT4, alibi=True, shared_pages=False),
        "tempered",
        "each",
    ),
    "float16": (AttentionCase((2, 30), ((4, 2), (3, 4)), D=64, dtype=F16, shared_pages=False), "keyformer", "sum"),
}


@pytest.mark.parametrize("name", every_third(MASS_CASES))
def test_mass_matches_reference(name: str) -> None:
    case, kind, columns = MASS_CASES[name]
    C, scoring = 1 if columns == "sum" else case.R, case.build_scoring(*SCORING_KINDS[kind])
    expected_kv, kv = (case.build_cache(backend, score_columns=C) for backend in (reference, triton))
    expected, o = case.attend(reference, expected_kv, scoring), case.attend(triton, kv, scoring)
    assert_close(o, expected, tolerance(case))
    assert_close(kv.mass, expected_kv.mass, {F32: 1e-4, F16: 2**-9}.get(case.dtype, 2**-7))
    assert torch.equal(o, case.attend(triton, kv)), "scoring changes the output"


def test_each_request_has_its_own_noise() -> None:
    """All kinds in one step. A request with a window keeps its masses."""
    case = AttentionCase((1, 2, 1, 20, 1), ((2, 3),) * 5, D=16, shared_pages=False)
    scoring = case.build_scoring(0)
    scoring = replace(
        scoring,
        noise=torch.arange(5, dtype=torch.int32) % 4,
        temperature=scoring.temperature + 0.5 * torch.arange(25) % 2,
    )
    t = case.build_tables()
    windows = t.windows.clone()
    windows[t.rows[1]] = 9
    tables = replace(t, windows=windows)
    q, q_pos = case.build_queries()
    expected_kv, kv = case.build_cache(reference), case.build_cache(triton)
    expected = reference.attend(q, expected_kv, tables, q_pos, AttentionParams(0.25), scoring=scoring, layer=1)
    assert_close(triton.attend(q, kv, tables, q_pos, AttentionParams(0.25), scoring=scoring, layer=1), expected)
    assert_close(kv.mass, expected_kv.mass, 1e-4)


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_noise_of_other_requests_changes_no_bit_of_a_mass(tokens: int, dtype: torch.dtype) -> None:
    case = AttentionCase((tokens, 2, 40), ((9, 5), (3, 3), (3, 2)), D=16, R=2, dtype=dtype, shared_pages=False)
    plain = case.build_scoring(0)
    plain = replace(plain, noise=torch.zeros_like(plain.noise), temperature=torch.ones_like(plain.temperature))
    noisy = replace(plain, noise=torch.tensor([NO_NOISE, GUMBEL, GAUSSIAN], dtype=torch.int32))
    tempered = replace(noisy, temperature=torch.cat([torch.ones(tokens), torch.full((42,), 1.5)]))
    t = case.build_tables()
    row = int(t.rows[0])
    own_pages = torch.cat([t.pages[row, g, :n] for g, n in enumerate(t.counts[row].tolist())]).long()
    masses = []
    for scoring in (plain, noisy, tempered):
        kv = case.build_cache(triton)
        case.attend(triton, kv, scoring)
        masses.append(kv.mass[own_pages])
    assert torch.equal(masses[0], masses[1])
    assert torch.equal(masses[0], masses[2])


@settings(max_examples=8, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_random_small_cases(data: st.DataObject) -> None:
    B = data.draw(st.integers(1, 3))
    case = AttentionCase(
        fresh=data.draw(st.tuples(*[st.integers(1, 40)] * B)),
        pages=tuple(data.draw(st.tuples(*[st.integers(0, 6)] * 2)) for _ in range(B)),
        D=data.draw(st.sampled_from([8, 24, 64])),
        R=data.draw(st.integers(1, 5)),
        S=data.draw(st.sampled_from([16, 32, 48])),
        dtype=data.draw(st.sampled_from([F32, BF16, INT8, K8V4, INT4, FP8])),
        holes=data.draw(st.sampled_from([0.0, 0.9, 1.0])),
        window=data.draw(st.sampled_from([NO_WINDOW, 1, 30])),
        per_request_windows=data.draw(st.booleans()),
        alibi=data.draw(st.booleans()),
    )
    assert_close(case.attend(triton), case.attend(reference), tolerance(case))


@pytest.mark.parametrize("dtype", [F32, BF16, INT8, FP8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_one_launch_rotates_and_writes_as_two_do(dtype: torch.dtype, interleaved: bool) -> None:
    """Where a layer's queries are wanted before it writes, they are rotated alone: to the same bits."""
    from retain.kernels.triton import fresh_tokens

    rng = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(5, n, 24, generator=rng).to(BF16) for n in (6, 2, 2))
    device = torch.device("cpu" if triton.is_interpreted() else "cuda")
    q, k, v = (x.to(device) for x in (q, k, v))
    rope = Rope(torch.rand(8, generator=rng).to(device), interleaved, 1.5)
    slots = torch.tensor([[16, 17, 40, 0, 1], [64, 80, 65, 2, 3]], dtype=torch.int32, device=device)
    pos = torch.tensor([900, 0, 7, -1, -1], dtype=torch.int32, device=device)
    one, two = (triton.allocate(6, 16, 24, dtype, device=device) for _ in range(2))
    rotated = fresh_tokens.rotate_and_write(one, slots, (q, k, v), pos, rope)
    fresh_tokens.write(two, slots, k, v, pos, rope)
    assert torch.equal(rotated, fresh_tokens.rotate(q, pos, rope))
    for name in ("k", "v", "pos", "mass"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name
