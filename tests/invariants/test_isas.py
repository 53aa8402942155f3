"""Law 2 for bits: many rows at once, by tiles where there are any, and one row alone; and chunks of any size."""

from __future__ import annotations

import pytest
import torch

from retain.engine.engine import Engine
from retain.engine.request import Request
from tests.helpers.backend_variants import ISAS, use_isa
from tests.helpers.engines import make_engine, make_request, random_prompts, record_logits
from tests.helpers.marks import slow

pytestmark = pytest.mark.skipif(not ISAS, reason="the cpu backend is not built")
# Shapes that are whole tiles, and shapes that are not: heads of 32 and of 16 dimensions, pages of 32 and of 16 slots.
SHAPES = [("qwen3", 32), ("qwen3", 16), ("gemma3_text", 32)]
TESTED_ISAS = sorted({*ISAS[:1], *(isa for isa in ISAS if isa.startswith("amx"))})


def build_engine(
    family: str, page_size: int, weights: str, kv_dtype: torch.dtype, max_batched_tokens: int = 200
) -> Engine:
    return make_engine(
        family,
        backend="cpu",
        page_size=page_size,
        max_batched_tokens=max_batched_tokens,
        dtype=torch.bfloat16,
        weights=weights,
        kv_dtype=kv_dtype,
    )


@pytest.mark.parametrize("isa", TESTED_ISAS)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("weights", ["int4", *slow("bf16", "int8")])
@pytest.mark.parametrize(("family", "page_size"), SHAPES)
def test_company_and_chunks_change_no_bit(
    isa: str, weights: str, kv_dtype: torch.dtype, family: str, page_size: int
) -> None:
    prompts = random_prompts(6, seed=7)
    policies = ["full", "h2o:budget=40", "keyformer:budget=50%"]

    def build_requests() -> list[Request]:
        return [make_request(p, 8, policies[i % 3], needs_logits=True) for i, p in enumerate(prompts)]

    with use_isa(isa):
        together = record_logits(build_engine(family, page_size, weights, kv_dtype), build_requests())
        for i, request in enumerate(build_requests()):
            alone = record_logits(build_engine(family, page_size, weights, kv_dtype, 65), [request])
            assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("family", ["gemma3_text", *slow("mistral", "llama")])
@pytest.mark.parametrize("policy", ["ring:window=20", "ring:window=33", *slow("full")])
def test_chunks_of_any_size_change_no_bit_of_a_ring(family: str, policy: str) -> None:
    """Also where a chunk begins within a page, so that its last tokens share a page with the first that it sees."""
    prompt = [7 * i * i % 128 for i in range(100)]

    def logits(max_batched_tokens: int) -> torch.Tensor:
        engine = make_engine(
            family,
            backend="cpu",
            max_batched_tokens=max_batched_tokens,
            max_running_requests=1,
        )
        return record_logits(engine, [make_request(prompt, 3, policy, needs_prompt_logits=True)])[0]

    whole = logits(200)
    for chunk in (5, 13, 17, 31):
        assert torch.equal(logits(chunk), whole), chunk
