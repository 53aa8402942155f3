"""The cpu backend leaves the masses that the reference leaves, on every instruction set, however a text is divided."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from retain.kernels import cpu, reference
from retain.kernels.api import KV
from retain.kernels.attention_params import AttentionParams
from retain.kernels.slots.scoring import CONSTANT, GAUSSIAN, GUMBEL, NO_NOISE
from tests.helpers.attention_case import AttentionCase, assert_close, cpu_tolerance, torch_threads
from tests.helpers.backend_variants import ISAS, use_isa
from tests.helpers.marks import slow

BF16 = torch.bfloat16
needs_cpu = pytest.mark.skipif(cpu.unavailable_reason() is not None, reason=str(cpu.unavailable_reason()))

CASES = {
    "one": AttentionCase((1,), ((3, 2),), shared_pages=False),
    "few, long tables": AttentionCase((1, 3, 0), ((40, 41), (5, 0), (2, 2)), shared_pages=False),
    "chunk": AttentionCase((70, 1), ((6, 7), (3, 3)), shared_pages=False),
    "tiles": AttentionCase((200,), ((20, 18),), S=16, R=4, shared_pages=False),
    "shuffled": AttentionCase((30,), ((12, 9),), shuffled=True, shared_pages=False),
    "alibi": AttentionCase((20, 1), ((6, 4), (33, 40)), alibi=True, shared_pages=False),
    "values of another size": AttentionCase((1, 70), ((6, 7), (33, 3)), D=40, V=24, shared_pages=False),
    "as MLA is cached": AttentionCase((1, 5), ((2, 1), (1, 2)), D=576, V=512, R=20, S=16, shared_pages=False),
    "sinks": AttentionCase((1, 3, 0), ((40, 41), (5, 0), (2, 2)), sinks=True, shared_pages=False),
    "sinks, tiles": AttentionCase((200,), ((20, 18),), S=16, R=4, sinks=True, softcap=2.0, shared_pages=False),
    "softcap, int8": AttentionCase((20, 1), ((6, 4), (33, 40)), dtype=torch.int8, softcap=0.5, shared_pages=False),
    "bfloat16": AttentionCase((20, 1), ((6, 4), (33, 40)), dtype=BF16, shared_pages=False),
    "k8v4": AttentionCase((20, 1), ((6, 4), (33, 40)), dtype=torch.uint8, shared_pages=False),
    "int4": AttentionCase((20, 1), ((6, 4), (33, 40)), dtype=torch.int4, shared_pages=False),
    "int8": AttentionCase((20, 1, 200), ((6, 4), (33, 40), (9, 8)), dtype=torch.int8, shared_pages=False),
}
# noise, temperature, noise_period, decay
SCORING_KINDS = {
    "h2o": (NO_NOISE, 1.0, 0, 1.0),
    "decaying": (NO_NOISE, 1.0, 0, 0.75),
    "tempered": (NO_NOISE, 1.5, 0, 1.0),
    "keyformer": (GUMBEL, 1.25, 1, 1.0),
    "keyformer, noise drawn once": (GUMBEL, 2.0, 0, 1.0),
    "keyformer, noise of 5 positions": (GUMBEL, 1.25, 5, 1.0),
    "noise of 64 positions": (GUMBEL, 1.0, 64, 1.0),
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


@needs_cpu
@pytest.mark.parametrize("dtype", [torch.float32, *slow(BF16, torch.int8, torch.int4)])
@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("kind", ["h2o", "keyformer"])
@pytest.mark.parametrize("chunk", [3, 70])
def test_chunk_size_changes_no_bit_of_a_mass(chunk: int, kind: str, columns: int, dtype: torch.dtype) -> None:
    """140 tokens at once by three threads, or chunk by chunk by one: queries add their weights in their order."""
    case = AttentionCase((140,), ((50, 40),), dtype=dtype, shared_pages=False)
    (q, q_pos), t, scoring = case.build_queries(), case.build_tables(), case.build_scoring(*SCORING_KINDS[kind])

    def attend(kv: KV, part: slice) -> None:
        tables = replace(t, query_start_loc=torch.tensor([0, part.stop - part.start], dtype=torch.int32))
        own = replace(scoring, weights=scoring.weights[part], temperature=scoring.temperature[part])
        cpu.attend(q[part], kv, tables, q_pos[part], AttentionParams(0.125), scoring=own)

    for isa in ISAS:
        with use_isa(isa):
            whole, parts = (case.build_cache(cpu, score_columns=columns) for _ in range(2))
            with torch_threads(3):
                attend(whole, slice(0, 140))
            with torch_threads(1):
                for at in range(0, 140, chunk):
                    attend(parts, slice(at, min(at + chunk, 140)))
        assert torch.equal(whole.mass, parts.mass), isa
