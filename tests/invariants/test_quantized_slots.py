"""The laws within quantized slots: whatever changes no token in other precisions changes none here."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from retain import LLM, SamplingParams, kernels
from retain.engine.drafters import parse as parse_drafter
from retain.kernels import reference
from retain.kernels.api import KV
from retain.kernels.slots import quantized_slots as q
from retain.outputs import RequestOutput
from tests.helpers.engines import (
    AlwaysLoad,
    make_engine,
    make_request,
    random_prompts,
    record_logits,
    run_alone,
    run_to_completion,
)
from tests.helpers.marks import slow
from tests.helpers.related_requests import related_requests
from tests.helpers.tiers import disk_spec, disk_store_of

INT8, K8V4, INT4, FP8 = torch.int8, torch.uint8, torch.int4, torch.float8_e4m3fn

FAMILIES = ["gemma3_text", *slow("llama", "mpt")]
NAMES = [n for n in ("cpu", "reference") if kernels.import_backend(n).unavailable_reason() is None]
KV_DTYPES = [INT8, *slow(K8V4, INT4, FP8)]
POOLS = [  # dtypes with the backends that have them
    pytest.param(dtype, name, marks=() if (dtype, name) == (INT8, "cpu") else pytest.mark.slow)
    for dtype in (INT8, K8V4, INT4, FP8)
    for name in NAMES
    if dtype in kernels.import_backend(name).POOL_DTYPES
]
POLICIES = ["full", "ring:window=24", "h2o:budget=40", "keydiff:budget=25%", "h2o:budget=40,prefill=stream,chunk=30"]


def fastest_backend(kv_dtype: torch.dtype) -> str:
    return "reference" if kv_dtype == FP8 else "cpu"


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_attends_to_rounded_keys_and_values(
    kv_dtype: torch.dtype, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine has the bits of one with float32 slots, whose K and V were rounded before the write."""

    def run(kv_dtype: torch.dtype) -> list[Tensor]:
        requests = [make_request(p, 8, "h2o:budget=40", needs_logits=True) for p in random_prompts(4)]
        return record_logits(make_engine(family, kv_dtype=kv_dtype), requests)

    def write_rounded(kv: KV, slot_mapping: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> None:
        def to_8(x: Tensor) -> Tensor:
            return q.dequantize(*(q.quantize_fp8 if kv_dtype == FP8 else q.quantize)(x))

        def to_4(x: Tensor) -> Tensor:
            return q.dequantize_4bit(*q.quantize_4bit(x))

        k = q.rotate(to_4(q.rotate(k)) if kv_dtype == INT4 else to_8(q.rotate(k)))
        v = to_8(v) if kv_dtype in (INT8, FP8) else to_4(v)
        write(kv, slot_mapping, k, v, pos)

    quantized, write = run(kv_dtype), reference.write
    assert any(not torch.equal(a, b) for a, b in zip(quantized[0], run(torch.float32)[0], strict=True))
    monkeypatch.setattr(reference, "write", write_rounded)
    for ours, expected in zip(quantized, run(torch.float32), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("D", [1, 8, 24, 80, 128, 256])
def test_a_rotation_keeps_products_and_is_its_own_inverse(D: int) -> None:
    queries, keys = torch.randn(2, 7, D, generator=torch.Generator().manual_seed(D))
    rotated = q.rotate(keys)
    assert torch.allclose(q.rotate(queries) @ rotated.T, queries @ keys.T, atol=1e-4)
    assert torch.allclose(q.rotate(rotated), keys, atol=1e-5)


@pytest.mark.parametrize(("kv_dtype", "backend"), POOLS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", [*POLICIES, "reread:budget=50,rereads=40"])
def test_chunk_size_changes_no_token(kv_dtype: torch.dtype, family: str, policy: str, backend: str) -> None:
    prompt = random_prompts(1, seed=3)[0] + random_prompts(1, seed=4)[0]
    whole = run_alone(family, prompt, policy=policy, backend=backend, kv_dtype=kv_dtype, max_batched_tokens=400)
    for chunk in (65, 97):
        assert (
            run_alone(family, prompt, policy=policy, backend=backend, kv_dtype=kv_dtype, max_batched_tokens=chunk)
            == whole
        )


@pytest.mark.parametrize(("kv_dtype", "backend"), POOLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_company_changes_no_token(kv_dtype: torch.dtype, family: str, backend: str) -> None:
    prompts = random_prompts(10, seed=1, max_prompt_len=120)
    requests = [make_request(p, 20, POLICIES[i % len(POLICIES)]) for i, p in enumerate(prompts)]
    alone = [
        run_alone(family, p, 20, POLICIES[i % len(POLICIES)], backend=backend, kv_dtype=kv_dtype)
        for i, p in enumerate(prompts)
    ]
    assert run_to_completion(make_engine(family, kv_dtype=kv_dtype, backend=backend), requests) == alone


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("family", "num_pages"), [("gemma3_text", 60)])
def test_preemption_changes_no_token(kv_dtype: torch.dtype, family: str, num_pages: int) -> None:
    prompts = random_prompts(64, seed=2, max_prompt_len=120)
    requests = [make_request(p, 30) for p in prompts]
    options: dict[str, Any] = {"kv_dtype": kv_dtype, "backend": fastest_backend(kv_dtype)}
    expected = run_to_completion(make_engine(family, **options), [make_request(p, 30) for p in prompts])
    assert run_to_completion(make_engine(family, num_pages=num_pages, **options), requests) == expected
    assert sum(r.stats.num_preemptions for r in requests) > 0


@pytest.mark.parametrize(("kv_dtype", "backend"), POOLS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tier", [None, "ram:capacity=10MB", "disk"])
def test_a_cached_prefix_changes_no_token(
    kv_dtype: torch.dtype, family: str, backend: str, tier: str | None, tmp_path: Path
) -> None:
    """The second engine finds what the first has left on the disk."""
    expected = run_to_completion(make_engine(family, kv_dtype=kv_dtype, backend=backend), related_requests(family, 0))
    options: dict[str, Any] = {"backend": backend, "prefix_cache": "exact"}
    if tier:
        options["tiers"] = [disk_spec(tmp_path) if tier == "disk" else tier]
    for is_second in (False, True):
        engine, requests = make_engine(family, kv_dtype=kv_dtype, **options), related_requests(family, 0)
        assert run_to_completion(engine, requests) == expected
        assert sum(r.stats.num_cached_tokens for r in requests) > 40
        if tier == "disk" and is_second:
            assert disk_store_of(engine).counts["read"] > 0
        if tier:
            engine.cache.prefix_cache.close_offloader()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", ["ngram:k=5,min=1", "self:k=3,budget=48", "draft:k=4,model=any"])
def test_greedy_tokens_do_not_depend_on_drafts(kv_dtype: torch.dtype, family: str, spec: str) -> None:
    prompts, policies = random_prompts(8, seed=2), ["full", "ring:window=24", "sinks:budget=40,interval=3"]

    def run(**options: Any) -> list[list[int]]:
        requests = [make_request(p, 40, policies[i % len(policies)]) for i, p in enumerate(prompts)]
        backend = fastest_backend(kv_dtype)
        return run_to_completion(make_engine(family, kv_dtype=kv_dtype, backend=backend, **options), requests)

    assert run(drafter=parse_drafter(spec)) == run()


@pytest.mark.parametrize("other_dtype", ["int8", "fp8"])
def test_a_store_of_another_precision_is_not_read(other_dtype: str, tmp_path: Path) -> None:
    """The miss is explained, and both precisions keep their prefixes in one folder."""
    prompt, params = list(range(3, 103)), SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)

    def ask(kv_dtype: str) -> RequestOutput:
        backend = "reference" if other_dtype == "fp8" else "auto"
        sizes = {"page_size": 16, "max_model_len": 512, "max_running_requests": 2, "kv_memory": "2MiB"}
        options: dict[str, Any] = {"backend": backend, **sizes}
        with closing(
            LLM("random:tiny", dtype="float32", kv_dtype=kv_dtype, tier=disk_spec(tmp_path), **options)
        ) as llm:
            llm.cache.prefix_cache.offloader.cost_model = AlwaysLoad()
            return llm.generate(prompt, params, explain_prefix=True)[0]

    first, other, again = ask("auto"), ask(other_dtype), ask("auto")
    assert other.prefix and other.cached_tokens == 0 and f"kv {other_dtype}" in other.prefix["detail"]
    assert again.cached_tokens > 90 and ask(other_dtype).cached_tokens > 60
    assert again.token_ids == first.token_ids


@pytest.mark.parametrize(("kv_dtype", "slots_per_page"), [("int8", 128), ("k8v4", 128), ("int4", 192), ("fp8", 128)])
def test_as_many_more_slots_as_the_bytes_say(kv_dtype: str, slots_per_page: int) -> None:
    """Pages keep about their bytes, and one budget of memory holds more of them by the bytes of a slot."""
    options = {"kv_memory": "2MiB", "backend": "reference"}
    caches = [LLM("random:tiny", kv_dtype=dtype, **options).cache for dtype in ("bfloat16", kv_dtype)]
    assert [cache.page_size for cache in caches] == [64, slots_per_page]
    bfloat16, quantized = (cache.store.page_bytes / cache.page_size for cache in caches)
    slots = [cache.total_pages * cache.page_size for cache in caches]
    assert slots[1] / slots[0] == pytest.approx(bfloat16 / quantized, rel=0.05)
