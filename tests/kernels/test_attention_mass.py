"""Masses: the cpu backend leaves what `reference` leaves, and what that means."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from scene import AttentionCase, assert_close
from torch import Tensor

from retain.kernels import cpu, reference
from retain.kernels.api import CONSTANT, GAUSSIAN, GUMBEL, KV, NO_NOISE, AttentionScoring

BF16 = torch.bfloat16
needs_cpu = pytest.mark.skipif(cpu.unavailable_reason() is not None, reason=str(cpu.unavailable_reason()))


def make_scoring(
    case: AttentionCase, kind: int, temperature: float = 1.0, redraw_noise: int = 1, decay: float = 1.0
) -> AttentionScoring:
    """Weights of all sizes, some 0; requests alike but for their seeds."""
    rng = torch.Generator().manual_seed(case.seed + 3)
    T, B = sum(case.fresh), len(case.fresh)
    weights = torch.rand(T, generator=rng) * (torch.rand(T, generator=rng) < 0.8)
    same = torch.ones(B, dtype=torch.int32)
    return AttentionScoring(
        weights,
        torch.full((T,), temperature),
        torch.full((B,), decay),
        same * kind,
        same.cumsum(0).int(),
        same * redraw_noise,
    )


def attend_once(
    case: AttentionCase, backend: ModuleType, scoring: AttentionScoring | None, columns: int = 1
) -> tuple[Tensor, KV]:
    """Output and pool of one step, layer 2."""
    q, q_pos = case.build_queries()
    kv = case.build_cache(backend, score_columns=columns)
    kv.mass.copy_(torch.rand(kv.mass.shape, generator=torch.Generator().manual_seed(case.seed + 4)))
    H = q.shape[1]
    slopes = 2.0 ** (-8 * torch.arange(1, H + 1) / H) if case.alibi else None
    return backend.attend(q, kv, case.build_tables(), q_pos, case.D**-0.5, slopes, scoring, 2), kv


CASES = {
    "one": AttentionCase((1,), ((3, 2),), shared_pages=False),
    "few, of long tables": AttentionCase((1, 3, 0), ((40, 41), (5, 0), (2, 2)), shared_pages=False),
    "chunk": AttentionCase((70, 1), ((6, 7), (3, 3)), shared_pages=False),
    "tiles": AttentionCase((200,), ((20, 18),), S=16, R=4, shared_pages=False),
    "scattered": AttentionCase((30,), ((12, 9),), shuffled=True, shared_pages=False),
    "alibi": AttentionCase((20, 1), ((6, 4), (33, 40)), alibi=True, shared_pages=False),
    "bfloat16": AttentionCase((20, 1), ((6, 4), (33, 40)), dtype=BF16, shared_pages=False),
}
SCORING_KINDS = {
    "h2o": (NO_NOISE, 1.0, 0, 1.0),
    "damped": (NO_NOISE, 1.0, 0, 0.75),
    "tempered": (NO_NOISE, 1.5, 0, 1.0),
    "keyformer": (GUMBEL, 1.25, 1, 1.0),
    "keyformer, noise drawn once": (GUMBEL, 2.0, 0, 1.0),
    "gaussian": (GAUSSIAN, 1.0, 1, 1.0),
    "constant": (CONSTANT, 1.5, 1, 1.0),
}


@needs_cpu
@pytest.mark.parametrize("columns", ["sum", "each"])
@pytest.mark.parametrize("kind", SCORING_KINDS)
@pytest.mark.parametrize("name", CASES)
def test_mass_matches_reference(isa: str, name: str, kind: str, columns: str) -> None:
    scene, C = CASES[name], 1 if columns == "sum" else CASES[name].R
    asked = make_scoring(scene, *SCORING_KINDS[kind])
    (want, slow), (got, fast) = attend_once(scene, reference, asked, C), attend_once(scene, cpu, asked, C)
    loose = 2**-7 if scene.dtype == BF16 else 1e-4
    assert_close(got, want, loose)
    assert_close(fast.mass, slow.mass, loose)
    assert torch.equal(got, attend_once(scene, cpu, None)[0]), "observing changes what is attended to"
