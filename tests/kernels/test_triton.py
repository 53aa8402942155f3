"""The triton backend under its interpreter: a small choice of what test_backends.py and test_observe.py ask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from aboard import triton_backend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scene import AttentionCase, assert_close
from test_backends import assert_batch_invariant
from test_observe import SCORING_KINDS, attend_once, make_scoring
from torch import Tensor

from retain.kernels import reference
from retain.kernels.api import KV, NO_WINDOW

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
triton = triton_backend()
pytestmark = pytest.mark.skipif(triton.unavailable_reason() is not None, reason=str(triton.unavailable_reason()))

# Few rows and many, stretches and tiles, a head without pages.
STEP = AttentionCase(fresh=(1, 9, 33), pages=((9, 1), (0, 2), (2, 3)))
CASES = {
    "head dim 8": STEP.with_changes(D=8, S=16, window=50, sinks=4),
    "head dim 80, bfloat16": STEP.with_changes(D=80, R=4, dtype=BF16, q_dtype=BF16),
    "head dim 128, float16": STEP.with_changes(D=128, R=2, dtype=F16, q_dtype=F16, shuffled=True),
    "head dim 256": STEP.with_changes(D=256, R=1, S=64, pages=((3, 1), (0, 1), (1, 2))),
    "a page of 48": STEP.with_changes(S=48, D=16, holes=0.5),
    "windows and sinks": STEP.with_changes(window=40, sinks=3, per_request_windows=True, shuffled=True, D=16),
    "a window alone": STEP.with_changes(window=1, D=16),
    "alibi": STEP.with_changes(alibi=True, D=16, holes=0.0),
    "alibi and a window": STEP.with_changes(alibi=True, D=16, window=64, sinks=4, dtype=BF16),
    "50 query heads": STEP.with_changes(R=50, D=16, fresh=(1, 2, 3)),
    "queries of another type": STEP.with_changes(q_dtype=torch.float64, D=16),
    "lengths that are cut unlike": AttentionCase(
        fresh=(1, 1), pages=((256, 5), (209, 257)), S=16, D=16, R=1, holes=0.9
    ),
}


def tolerance(case: AttentionCase) -> float:
    return {F32: 1e-4 if case.alibi else 1e-5, BF16: 2**-7, F16: 2**-10}[case.dtype]


@pytest.mark.parametrize("name", CASES)
def test_attention_matches_reference(name: str) -> None:
    scene = CASES[name]
    assert_close(scene.attend(triton), scene.attend(reference), tolerance(scene))


@pytest.mark.parametrize("fresh", [1, 9, 80])
def test_batch_invariance(fresh: int) -> None:
    assert_batch_invariant(triton, AttentionCase(fresh=(fresh, 1, 30), pages=((9, 1), (1, 2), (18, 3)), D=16, R=2))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_dense_tables_do_not_read_positions(dtype: torch.dtype) -> None:
    """Place i holds position i, or nothing yet; and whatever the positions say is not read."""
    scene = STEP.with_changes(D=16, holes=0.0, dtype=dtype, pages=((9, 9), (2, 2), (3, 3)))
    q, q_pos = scene.build_queries()
    q_pos = q_pos - 5  # the last places are still holes
    kv, t = scene.build_cache(triton), scene.build_tables()
    kv.pos[(kv.pos > q_pos.max()) & (kv.pos < 0)] = -1
    want = triton.attend(q, kv, t, q_pos, 0.25)
    kv.pos.fill_(-1)
    dense = replace(t, dense=torch.ones(len(t.windows), dtype=torch.int32))
    assert torch.equal(triton.attend(q, kv, dense, q_pos, 0.25), want)
    slides = replace(dense, windows=torch.full_like(t.windows, 10**6))  # who has a window looks
    assert (triton.attend(q, kv, slides, q_pos, 0.25) == 0).all()


MASS_CASES = {
    "stretches": (AttentionCase((1, 3, 0), ((9, 10), (5, 0), (2, 2)), D=16, shared_pages=False), "damped", "sum"),
    "stretches, noised": (AttentionCase((1, 2), ((9, 10), (5, 1)), D=16, shared_pages=False), "keyformer", "each"),
    "tiles": (AttentionCase((40, 1), ((3, 2), (3, 3)), D=16, shared_pages=False), "keyformer, noise drawn once", "sum"),
    "tiles, each head": (AttentionCase((40,), ((3, 4),), D=16, shared_pages=False), "damped", "each"),
    "alibi": (AttentionCase((30, 1), ((2, 4), (3, 4)), D=16, alibi=True, shared_pages=False), "tempered", "sum"),
    "gaussian": (AttentionCase((30, 1), ((2, 4), (3, 4)), D=16, shuffled=True, shared_pages=False), "gaussian", "sum"),
    "constant, bfloat16": (
        AttentionCase((30, 1), ((2, 4), (3, 4)), D=64, dtype=BF16, shared_pages=False),
        "constant",
        "sum",
    ),
    "float16": (AttentionCase((2, 30), ((4, 2), (3, 4)), D=64, dtype=F16, shared_pages=False), "keyformer", "sum"),
}


@pytest.mark.parametrize("name", MASS_CASES)
def test_mass_matches_reference(name: str) -> None:
    scene, kind, columns = MASS_CASES[name]
    C, asked = 1 if columns == "sum" else scene.R, make_scoring(scene, *SCORING_KINDS[kind])
    (want, slow), (got, fast) = attend_once(scene, reference, asked, C), attend_once(scene, triton, asked, C)
    assert_close(got, want, tolerance(scene))
    assert_close(fast.mass, slow.mass, 2**-7 if scene.dtype == BF16 else 2**-9 if scene.dtype == F16 else 1e-4)
    assert torch.equal(got, attend_once(scene, triton, None, C)[0]), "observing changes what is attended to"


def test_per_request_noise() -> None:
    """All kinds in one step; who has a window leaves nothing, and shares nothing with who does."""
    scene = AttentionCase((1, 2, 1, 20, 1), ((2, 3),) * 5, D=16, shared_pages=False)
    asked = make_scoring(scene, 0)
    asked = replace(
        asked, noise=torch.arange(5, dtype=torch.int32) % 4, tau=asked.temperature + 0.5 * torch.arange(25) % 2
    )
    t = scene.build_tables()
    windows = t.windows.clone()
    windows[t.rows[1]] = 9

    def go(backend: object) -> tuple[Tensor, KV]:
        q, q_pos = scene.build_queries()
        kv = scene.build_cache(backend)  # type: ignore[arg-type]
        return backend.attend(q, kv, replace(t, windows=windows), q_pos, 0.25, None, asked, 1), kv  # type: ignore

    (want, slow), (got, fast) = go(reference), go(triton)
    assert_close(got, want)
    assert_close(fast.mass, slow.mass, 1e-4)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_random_small_cases(data: st.DataObject) -> None:
    B = data.draw(st.integers(1, 3))
    scene = AttentionCase(
        fresh=data.draw(st.tuples(*[st.integers(1, 40)] * B)),
        pages=tuple(data.draw(st.tuples(*[st.integers(0, 6)] * 2)) for _ in range(B)),
        D=data.draw(st.sampled_from([8, 24, 64])),
        R=data.draw(st.integers(1, 5)),
        S=data.draw(st.sampled_from([16, 32, 48])),
        dtype=data.draw(st.sampled_from([F32, BF16])),
        holes=data.draw(st.sampled_from([0.0, 0.9, 1.0])),
        window=data.draw(st.sampled_from([NO_WINDOW, 1, 30])),
        sinks=data.draw(st.sampled_from([0, 1, 70])),
        per_request_windows=data.draw(st.booleans()),
        alibi=data.draw(st.booleans()),
    )
    assert_close(scene.attend(triton), scene.attend(reference), tolerance(scene))
