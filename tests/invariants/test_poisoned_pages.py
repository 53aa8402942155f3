"""What earlier requests left in pages reaches no later request, be it NaN or infinity."""

from __future__ import annotations

import pytest
import torch

from retain import kernels
from retain.engine.engine import Engine
from tests.helpers.engines import make_engine, make_request, random_prompts, run_to_completion
from tests.helpers.marks import slow

NAMES = [n for n in ("cpu", "reference") if kernels.import_backend(n).unavailable_reason() is None]
CASES = [(backend, family) for backend in NAMES for family in ("llama", "gemma3_text")]
# States are slow on the reference backend.
CASES += [pytest.param("cpu", x, marks=pytest.mark.slow) for x in ("mpt", "lfm2", "qwen3_next", "nemotron_h")]
POLICIES = [
    "full",
    "ring:window=24",
    "h2o:budget=40,interval=9",
    "keyformer:budget=30,prefill=stream,chunk=30",
    "h2o:budget=12,interval=4,share=fitted,scope=shared",  # layers hold a token at different places
    "keydiff:budget=20,interval=3",
    "look:slots=5,min=1",
]


def poison(engine: Engine, number: float) -> None:
    """Write a number to all slots, as a request does whose model overflows, and make them holes."""
    cache = engine.cache
    for spec, tables in zip(cache.spec.groups, cache.slots.tables, strict=True):
        kv = tables.store.kv
        pages = torch.from_numpy((cache.pool.kinds == tables.store.kind).nonzero()[0])
        if spec.is_state:
            kv.k[pages] = number
            kv.v[pages] = number
            continue
        slots = (pages[:, None] * kv.page_size + torch.arange(kv.page_size)).flatten()
        k, v = (torch.full((len(slots), 1, dim), number) for dim in (kv.k_dim, kv.v_dim))
        engine.cache.backend.write(kv, slots[None].int(), k, v, torch.full((len(slots),), -1, dtype=torch.int32))
        kv.mass[pages] = number


@pytest.mark.parametrize("number", [torch.nan, *slow(torch.inf)])
@pytest.mark.parametrize("kv_dtype", [None, torch.bfloat16, *slow(torch.int8, torch.int4, torch.float8_e4m3fn)])
@pytest.mark.parametrize(("backend", "family"), CASES)
def test_pages_of_an_overflown_model_change_no_token(
    backend: str, family: str, kv_dtype: torch.dtype | None, number: float
) -> None:
    if kv_dtype not in (None, *kernels.import_backend(backend).POOL_DTYPES):
        pytest.skip("the cpu backend has no slots in fp8")
    engine = make_engine(family, backend=backend, kv_dtype=kv_dtype, num_pages=1500, looks=True)
    prompts = random_prompts(len(POLICIES), seed=5)

    def answer() -> list[list[int]]:
        requests = [make_request(p, 12, policy) for p, policy in zip(prompts, POLICIES, strict=True)]
        return run_to_completion(engine, requests)

    expected = answer()
    poison(engine, number)
    assert answer() == expected
