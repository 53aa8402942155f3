"""Prompts on the triton backend, under its interpreter: dense tables, chunks, and what holes hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from retain.kernels import reference
from retain.kernels.api import KV, NO_WINDOW, Backend, Tables
from retain.kernels.slots.scoring import GAUSSIAN, GUMBEL, NO_NOISE, AttentionScoring
from tests.helpers.attention_case import AttentionCase, assert_close
from tests.helpers.device_adapter import triton_backend
from tests.helpers.marks import every_third
from tests.kernels.test_attention_mass import SCORING_KINDS

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
triton = triton_backend()
pytestmark = pytest.mark.skipif(triton.unavailable_reason() is not None, reason=str(triton.unavailable_reason()))

TAIL = 5  # the last slots of every table are not written yet
# Requests of different lengths in one step, of which two begin behind position 0.
CHUNKS = AttentionCase((150, 70, 80), ((22, 22), (5, 5), (14, 14)), S=16, D=16, R=2, holes=0.0, shared_pages=False)
PROMPT = CHUNKS.with_changes(fresh=(75,), pages=((5, 5),))


@dataclass(frozen=True)
class Step:
    """A step of chunks of prompts over dense tables; see AttentionCase."""

    case: AttentionCase
    is_dense: bool = True

    def tables(self) -> Tables:
        t = self.case.build_tables()
        return replace(t, dense=torch.ones(len(t.windows), dtype=torch.int32)) if self.is_dense else t

    def positions(self) -> Tensor:
        return self.case.build_queries()[1] - TAIL

    def cache(self, backend: Backend, columns: int, unwritten: float) -> KV:
        """A pool whose unwritten slots have K and V of this number."""
        kv, t, pos = self.case.build_cache(backend, score_columns=columns), self.tables(), self.positions()
        for b, row in enumerate(t.rows.tolist()):
            last = int(pos[t.query_start_loc[b + 1] - 1])
            for g in range(self.case.G):
                pages = t.pages[row, g, : int(t.counts[row, g])].long()
                holes = kv.pos[pages] > last
                kv.pos[pages] = kv.pos[pages].masked_fill(holes, -1)
                for x in (kv.k, kv.v) if kv.k.dtype.is_floating_point and kv.k.itemsize > 1 else ():
                    x[pages] = x[pages].masked_fill(holes[..., None], unwritten)
        return kv

    def run(
        self, backend: Backend, scoring: AttentionScoring | None, columns: int = 1, unwritten: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the masses of layer 2."""
        kv, q = self.cache(backend, columns, unwritten), self.case.build_queries()[0]
        o = backend.attend(q, kv, self.tables(), self.positions(), self.case.params, scoring=scoring, layer=2)
        return o, kv.mass


# Without a temperature noise is a factor of the weights. Rows that share it have it drawn once.
KINDS = SCORING_KINDS | {"noise": (GUMBEL, 1.0, 1, 1.0), "noise drawn once": (GUMBEL, 1.0, 0, 0.75)}
KINDS |= {f"noise of {n} positions": (GUMBEL, 1.0, n, 1.0) for n in (5, 16)}
CASES = {
    "one query head": (CHUNKS.with_changes(R=1), "keyformer", "sum"),
    "S 64": (CHUNKS.with_changes(S=64, pages=((5, 5), (2, 2), (3, 3)), D=64, R=4, dtype=BF16), "h2o", "sum"),
    "S 48": (CHUNKS.with_changes(S=48, pages=((7, 7), (2, 2), (4, 4)), R=4), "decaying", "each"),
    "S 256": (PROMPT.with_changes(S=256, pages=((2, 2),)), "h2o", "sum"),
    "D 80": (PROMPT.with_changes(D=80, R=1, dtype=F16), "keyformer, noise drawn once", "sum"),
    "D 128": (PROMPT.with_changes(S=64, pages=((3, 3),), D=128, R=4, dtype=BF16), "keyformer", "each"),
    "D 256": (PROMPT.with_changes(D=256, R=1, dtype=BF16), "h2o", "sum"),
    "alibi": (PROMPT.with_changes(alibi=True, R=1), "keyformer", "sum"),
    "alibi of several query heads": (CHUNKS.with_changes(alibi=True, R=4, dtype=BF16), "h2o", "each"),
    "alibi, tempered": (PROMPT.with_changes(alibi=True), "tempered", "sum"),
    "softcap": (PROMPT.with_changes(softcap=0.5), "keyformer", "sum"),
    "sinks": (PROMPT.with_changes(sinks=True), "keyformer", "sum"),
    "sinks, tempered": (PROMPT.with_changes(sinks=True), "tempered", "each"),
    "gaussian": (PROMPT, "gaussian", "sum"),
    "constant": (PROMPT, "constant", "sum"),
    "int8": (CHUNKS.with_changes(D=64, dtype=torch.int8), "keyformer", "sum"),
    "fp8": (CHUNKS.with_changes(D=64, dtype=torch.float8_e4m3fn), "keyformer", "sum"),
    "k8v4": (PROMPT.with_changes(D=64, dtype=torch.uint8, alibi=True), "h2o", "sum"),
    "int4": (PROMPT.with_changes(D=64, dtype=torch.int4), "keyformer", "each"),
    "noise, one query head": (CHUNKS.with_changes(R=1, alibi=True), "noise", "sum"),
    "noise of 4 heads": (CHUNKS.with_changes(R=4), "noise", "sum"),
    "noise of 4 heads, bfloat16": (PROMPT.with_changes(R=4, D=64, dtype=BF16, sinks=True), "noise", "each"),
    "noise of 4 heads, int8": (PROMPT.with_changes(R=4, D=64, dtype=torch.int8, alibi=True), "noise", "sum"),
    "noise of 6 heads": (PROMPT.with_changes(R=6, softcap=0.5), "noise", "each"),
    "noise of 8 heads": (CHUNKS.with_changes(R=8, alibi=True), "noise", "each"),
    "noise of 16 heads": (PROMPT.with_changes(R=16, fresh=(40,)), "noise", "sum"),
    "noise of 32 heads": (PROMPT.with_changes(R=32, fresh=(20,)), "noise", "sum"),
    "noise drawn once": (CHUNKS.with_changes(R=2, sinks=True), "noise drawn once", "each"),
    "noise drawn once, float16": (PROMPT.with_changes(R=4, D=64, dtype=F16), "noise drawn once", "sum"),
    "noise of 64 positions, one query head": (CHUNKS.with_changes(R=1, alibi=True), "noise of 64 positions", "sum"),
    "noise of 64 positions": (CHUNKS.with_changes(R=3, dtype=BF16), "noise of 64 positions", "each"),
    "noise of 64 positions, 4 heads": (PROMPT.with_changes(R=4, S=64, pages=((3, 3),)), "noise of 64 positions", "sum"),
    "noise of 64 positions, int8": (PROMPT.with_changes(R=1, D=64, dtype=torch.int8), "noise of 64 positions", "sum"),
    "noise of 5 positions": (CHUNKS.with_changes(R=4), "noise of 5 positions", "each"),
    "noise of 16 positions": (CHUNKS.with_changes(R=1), "noise of 16 positions", "sum"),
    "tempered noise of 5 positions": (CHUNKS.with_changes(R=2), "keyformer, noise of 5 positions", "sum"),
    "window": (CHUNKS.with_changes(window=40), "h2o", "sum"),
}


def tolerance(case: AttentionCase) -> float:
    return {F32: 1e-4, F16: 2**-9}.get(case.dtype, 2**-7)


@pytest.mark.parametrize("name", every_third(CASES))
def test_chunks_of_prompts_match_reference(name: str) -> None:
    """Dense or not: tables that hold the same tokens give the same outputs and masses. Unwritten slots hold NaN."""
    case, kind, columns = CASES[name]
    C, scoring = 1 if columns == "sum" else case.R, case.build_scoring(*KINDS[kind])
    expected, expected_mass = Step(case).run(reference, scoring, C)
    for is_dense in (True, False):
        o, mass = Step(case, is_dense).run(triton, scoring, C, float("nan"))
        assert_close(o, expected, tolerance(case), f"dense {is_dense}")
        assert_close(mass, expected_mass, tolerance(case), f"dense {is_dense}")
        if is_dense:
            assert torch.equal(o, Step(case).run(triton, None, C)[0]), "scoring changes the output"


@pytest.mark.slow
@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_unwritten_slots_change_no_bit(dtype: torch.dtype, is_dense: bool) -> None:
    step = Step(CHUNKS.with_changes(fresh=(75, 66), dtype=dtype, S=48, pages=((7, 7), (2, 2))), is_dense)
    scoring = step.case.build_scoring(GUMBEL)
    for ours, expected in zip(step.run(triton, scoring, 1, float("nan")), step.run(triton, scoring), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("noise", [NO_NOISE, GUMBEL])
def test_chunks_leave_the_mass_of_a_prompt(noise: int) -> None:
    """140 tokens at once, and in chunks that end within pages, tiles and blocks."""
    step = Step(CHUNKS.with_changes(fresh=(140,), pages=((10, 10),)))
    q, pos, t, scoring = step.case.build_queries()[0], step.positions(), step.tables(), step.case.build_scoring(noise)
    whole, parts = step.cache(triton, 1, 0.0), step.cache(triton, 1, 0.0)
    for kv, chunks in ((whole, [140]), (parts, [50, 33, 57])):
        for part in torch.arange(140).split(chunks):
            own = replace(scoring, weights=scoring.weights[part], temperature=scoring.temperature[part])
            tables = replace(t, query_start_loc=torch.tensor([0, len(part)], dtype=torch.int32))
            triton.attend(q[part], kv, tables, pos[part], step.case.params, scoring=own)
    assert_close(parts.mass, whole.mass, 1e-5)


def mixed_scoring(case: AttentionCase) -> AttentionScoring:
    """Scorings of five requests: a window at the end with decay, the last token alone, none, tempered noise, noise."""
    x = case.build_scoring(NO_NOISE)
    starts = torch.tensor([0, *case.fresh]).cumsum(0).tolist()
    weights, temperature = torch.ones_like(x.weights), torch.ones_like(x.temperature)
    weights[starts[0] : starts[1] - 7] = 0
    weights[starts[1] : starts[2] - 1] = 0
    weights[starts[2] : starts[3]] = 0
    temperature[starts[3] : starts[4]] = 1.5
    weights[starts[4] : starts[4] + 3] = -0.25
    return replace(
        x,
        weights=weights,
        temperature=temperature,
        decay=torch.tensor([0.5, 0.0, 1.0, 1.0, 0.25]),
        noise=torch.tensor([NO_NOISE, NO_NOISE, GUMBEL, GAUSSIAN, GUMBEL], dtype=torch.int32),
        noise_period=torch.tensor([0, 0, 1, 0, 64], dtype=torch.int32),
    )


@pytest.mark.parametrize("used", [(0, 1, 2), (0, 2, 4), (2, 3, 4)])
def test_each_prompt_has_its_own_scoring(used: tuple[int, ...]) -> None:
    """Only the tokens with weights are scored, and what others of the step need changes nothing."""
    case = PROMPT.with_changes(fresh=(40, 70, 50, 36, 90), pages=((5, 5), (5, 5), (4, 4), (3, 3), (6, 6)))
    scoring = mixed_scoring(case)
    starts = torch.tensor([0, *case.fresh]).cumsum(0).tolist()
    weights = scoring.weights.clone()
    for b in set(range(5)) - set(used):
        weights[starts[b] : starts[b + 1]] = 0
    scoring = replace(scoring, weights=weights)
    expected, expected_mass = Step(case).run(reference, scoring)
    o, mass = Step(case).run(triton, scoring)
    assert_close(o, expected)
    assert_close(mass, expected_mass, 1e-4)


@pytest.mark.slow
@settings(max_examples=6, suppress_health_check=list(HealthCheck), derandomize=True, phases=[Phase.generate])
@given(data=st.data())
def test_random_prompts_match_reference(data: st.DataObject) -> None:
    B, S = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([16, 48, 64]))
    fresh = data.draw(st.tuples(*[st.integers(65, 150)] * B))
    before = data.draw(st.tuples(*[st.integers(0, 200)] * B))
    pages = [-(-(n + old + TAIL) // S) for n, old in zip(fresh, before, strict=True)]
    case = AttentionCase(
        fresh=fresh,
        pages=tuple((n, n) for n in pages),
        S=S,
        D=data.draw(st.sampled_from([8, 24, 64])),
        R=data.draw(st.integers(1, 5)),
        dtype=data.draw(st.sampled_from([F32, BF16])),
        holes=0.0,
        alibi=data.draw(st.booleans()),
        shared_pages=False,
        window=data.draw(st.sampled_from([NO_WINDOW, NO_WINDOW, 30])),
    )
    scoring = case.build_scoring(*SCORING_KINDS[data.draw(st.sampled_from(sorted(SCORING_KINDS)))])
    expected, expected_mass = Step(case).run(reference, scoring)
    o, mass = Step(case).run(triton, scoring, 1, float("nan"))
    assert_close(o, expected, tolerance(case))
    assert_close(mass, expected_mass, tolerance(case))
