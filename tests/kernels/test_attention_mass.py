"""The cpu backend leaves the masses that the reference leaves, on every instruction set."""

from __future__ import annotations

import pytest
import torch

from retain.kernels import cpu, reference
from retain.kernels.scoring import CONSTANT, GAUSSIAN, GUMBEL, NO_NOISE
from tests.helpers.attention_case import AttentionCase, assert_close, cpu_tolerance
from tests.helpers.backend_variants import ISAS, use_isa

BF16 = torch.bfloat16
needs_cpu = pytest.mark.skipif(cpu.unavailable_reason() is not None, reason=str(cpu.unavailable_reason()))

CASES = {
    "one": AttentionCase((1,), ((3, 2),), shared_pages=False),
    "few, long tables": AttentionCase((1, 3, 0), ((40, 41), (5, 0), (2, 2)), shared_pages=False),
    "chunk": AttentionCase((70, 1), ((6, 7), (3, 3)), shared_pages=False),
    "tiles": AttentionCase((200,), ((20, 18),), S=16, R=4, shared_pages=False),
    "shuffled": AttentionCase((30,), ((12, 9),), shuffled=True, shared_pages=False),
    "alibi": AttentionCase((20, 1), ((6, 4), (33, 40)), alibi=True, shared_pages=False),
    "bfloat16": AttentionCase((20, 1), ((6, 4), (33, 40)), dtype=BF16, shared_pages=False),
    "k8v4": AttentionCase((20, 1), ((6, 4), (33, 40)), dtype=torch.uint8, shared_pages=False),
    "int4": AttentionCase((20, 1), ((6, 4), (33, 40)), dtype=torch.int4, shared_pages=False),
    "int8": AttentionCase((20, 1, 200), ((6, 4), (33, 40), (9, 8)), dtype=torch.int8, shared_pages=False),
}
# noise, temperature, redraw_noise, decay
SCORING_KINDS = {
    "h2o": (NO_NOISE, 1.0, 0, 1.0),
    "decaying": (NO_NOISE, 1.0, 0, 0.75),
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
def test_mass_matches_reference(name: str, kind: str, columns: str) -> None:
    case, C = CASES[name], 1 if columns == "sum" else CASES[name].R
    scoring = case.build_scoring(*SCORING_KINDS[kind])
    expected_kv = case.build_cache(reference, score_columns=C)
    expected = case.attend(reference, expected_kv, scoring)
    tolerance = cpu_tolerance(case.dtype, 1e-4)
    for isa in ISAS:
        with use_isa(isa):
            kv = case.build_cache(cpu, score_columns=C)
            o = case.attend(cpu, kv, scoring)
            unscored = case.attend(cpu, kv)
        assert_close(o, expected, tolerance, isa)
        assert_close(kv.mass, expected_kv.mass, tolerance, isa)
        assert torch.equal(o, unscored), f"{isa}: scoring changes the output"
