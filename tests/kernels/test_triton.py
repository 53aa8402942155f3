"""The triton backend under its interpreter: a small choice of what test_backends.py and test_observe.py ask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from aboard import aboard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scene import Scene, assert_close
from test_backends import unchanged_by_company
from test_observe import KINDS, observe, step
from torch import Tensor

from retain.kernels import KV, NO_WINDOW, reference

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
triton = aboard()
pytestmark = pytest.mark.skipif(triton.available() is not None, reason=str(triton.available()))

# Few rows and many, stretches and tiles, a head without pages.
STEP = Scene(fresh=(1, 9, 33), pages=((9, 1), (0, 2), (2, 3)))
LOOKS = {
    "head dim 8": STEP.but(D=8, S=16, window=50, sinks=4),
    "head dim 80, bfloat16": STEP.but(D=80, R=4, dtype=BF16, q_dtype=BF16),
    "head dim 128, float16": STEP.but(D=128, R=2, dtype=F16, q_dtype=F16, scattered=True),
    "head dim 256": STEP.but(D=256, R=1, S=64, pages=((3, 1), (0, 1), (1, 2))),
    "a page of 48": STEP.but(S=48, D=16, holes=0.5),
    "windows and sinks": STEP.but(window=40, sinks=3, unlike=True, scattered=True, D=16),
    "a window alone": STEP.but(window=1, D=16),
    "alibi": STEP.but(alibi=True, D=16, holes=0.0),
    "alibi and a window": STEP.but(alibi=True, D=16, window=64, sinks=4, dtype=BF16),
    "50 query heads": STEP.but(R=50, D=16, fresh=(1, 2, 3)),
    "queries of another type": STEP.but(q_dtype=torch.float64, D=16),
    "lengths that are cut unlike": Scene(fresh=(1, 1), pages=((256, 5), (209, 257)), S=16, D=16, R=1, holes=0.9),
}


def loose(scene: Scene) -> float:
    return {F32: 1e-4 if scene.alibi else 1e-5, BF16: 2**-7, F16: 2**-10}[scene.dtype]


@pytest.mark.parametrize("name", LOOKS)
def test_looks_as_the_definition_does(name: str) -> None:
    scene = LOOKS[name]
    assert_close(scene.attend(triton), scene.attend(reference), loose(scene))


@pytest.mark.parametrize("fresh", [1, 9, 80])
def test_company_changes_no_bit(fresh: int) -> None:
    unchanged_by_company(triton, Scene(fresh=(fresh, 1, 30), pages=((9, 1), (1, 2), (18, 3)), D=16, R=2))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_dense_table_needs_no_positions(dtype: torch.dtype) -> None:
    """Place i holds position i, or nothing yet; and whatever the positions say is not read."""
    scene = STEP.but(D=16, holes=0.0, dtype=dtype, pages=((9, 9), (2, 2), (3, 3)))
    q, q_pos = scene.queries()
    q_pos = q_pos - 5  # the last places are still holes
    kv, t = scene.cache(triton), scene.tables()
    kv.pos[(kv.pos > q_pos.max()) & (kv.pos < 0)] = -1
    want = triton.attend(q, kv, t, q_pos, 0.25)
    kv.pos.fill_(-1)
    dense = replace(t, dense=torch.ones(len(t.windows), dtype=torch.int32))
    assert torch.equal(triton.attend(q, kv, dense, q_pos, 0.25), want)
    slides = replace(dense, windows=torch.full_like(t.windows, 10**6))  # who has a window looks
    assert (triton.attend(q, kv, slides, q_pos, 0.25) == 0).all()


MASSES = {
    "stretches": (Scene((1, 3, 0), ((9, 10), (5, 0), (2, 2)), D=16, shared=False), "damped", "sum"),
    "stretches, noised": (Scene((1, 2), ((9, 10), (5, 1)), D=16, shared=False), "keyformer", "each"),
    "tiles": (Scene((40, 1), ((3, 2), (3, 3)), D=16, shared=False), "keyformer, noise drawn once", "sum"),
    "tiles, each head": (Scene((40,), ((3, 4),), D=16, shared=False), "damped", "each"),
    "alibi": (Scene((30, 1), ((2, 4), (3, 4)), D=16, alibi=True, shared=False), "tempered", "sum"),
    "gaussian": (Scene((30, 1), ((2, 4), (3, 4)), D=16, scattered=True, shared=False), "gaussian", "sum"),
    "constant, bfloat16": (Scene((30, 1), ((2, 4), (3, 4)), D=64, dtype=BF16, shared=False), "constant", "sum"),
    "float16": (Scene((2, 30), ((4, 2), (3, 4)), D=64, dtype=F16, shared=False), "keyformer", "sum"),
}


@pytest.mark.parametrize("name", MASSES)
def test_leaves_what_the_definition_leaves(name: str) -> None:
    scene, kind, columns = MASSES[name]
    C, asked = 1 if columns == "sum" else scene.R, observe(scene, *KINDS[kind])
    (want, slow), (got, fast) = step(scene, reference, asked, C), step(scene, triton, asked, C)
    assert_close(got, want, loose(scene))
    assert_close(fast.mass, slow.mass, 2**-7 if scene.dtype == BF16 else 2**-9 if scene.dtype == F16 else 1e-4)
    assert torch.equal(got, step(scene, triton, None, C)[0]), "observing changes what is attended to"


def test_requests_with_noise_of_their_own() -> None:
    """All kinds in one step; who has a window leaves nothing, and shares nothing with who does."""
    scene = Scene((1, 2, 1, 20, 1), ((2, 3),) * 5, D=16, shared=False)
    asked = observe(scene, 0)
    asked = replace(asked, noise=torch.arange(5, dtype=torch.int32) % 4, tau=asked.tau + 0.5 * torch.arange(25) % 2)
    t = scene.tables()
    windows = t.windows.clone()
    windows[t.rows[1]] = 9

    def go(backend: object) -> tuple[Tensor, KV]:
        q, q_pos = scene.queries()
        kv = scene.cache(backend)  # type: ignore[arg-type]
        return backend.attend(q, kv, replace(t, windows=windows), q_pos, 0.25, None, asked, 1), kv  # type: ignore

    (want, slow), (got, fast) = go(reference), go(triton)
    assert_close(got, want)
    assert_close(fast.mass, slow.mass, 1e-4)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_any_small_scene(data: st.DataObject) -> None:
    B = data.draw(st.integers(1, 3))
    scene = Scene(
        fresh=data.draw(st.tuples(*[st.integers(1, 40)] * B)),
        pages=tuple(data.draw(st.tuples(*[st.integers(0, 6)] * 2)) for _ in range(B)),
        D=data.draw(st.sampled_from([8, 24, 64])),
        R=data.draw(st.integers(1, 5)),
        S=data.draw(st.sampled_from([16, 32, 48])),
        dtype=data.draw(st.sampled_from([F32, BF16])),
        holes=data.draw(st.sampled_from([0.0, 0.9, 1.0])),
        window=data.draw(st.sampled_from([NO_WINDOW, 1, 30])),
        sinks=data.draw(st.sampled_from([0, 1, 70])),
        unlike=data.draw(st.booleans()),
        alibi=data.draw(st.booleans()),
    )
    assert_close(scene.attend(triton), scene.attend(reference), loose(scene))
