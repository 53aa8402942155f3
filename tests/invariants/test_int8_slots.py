"""The laws within slots of 8 bits: whatever changes no token in other precisions changes none here."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from retain import LLM, SamplingParams, kernels
from retain.engine.drafters import parse as parse_drafter
from retain.kernels import int8_slots, reference
from retain.kernels.api import KV
from retain.outputs import RequestOutput
from tests.helpers import engines
from tests.helpers.engines import AlwaysLoad, RecordingOutput, make_request, random_prompts, run_to_completion
from tests.helpers.marks import slow
from tests.helpers.related_requests import related_requests
from tests.helpers.tiers import disk_spec, disk_store_of

make_engine = partial(engines.make_engine, kv_dtype=torch.int8)
run_alone = partial(engines.run_alone, kv_dtype=torch.int8)

FAMILIES = ["gemma3_text", *slow("llama", "mpt")]
NAMES = [n for n in ("cpu", "reference") if kernels.import_backend(n).unavailable_reason() is None]
BACKENDS = [pytest.param(n, marks=pytest.mark.slow if n == "reference" else ()) for n in NAMES]
POLICIES = ["full", "ring:window=24", "h2o:budget=40", "keydiff:budget=25%", "h2o:budget=40,prefill=stream,chunk=30"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_attends_to_rounded_keys_and_values(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with int8 slots has the bits of one with float32 slots, whose K and V were rounded before the write."""

    def run(kv_dtype: torch.dtype) -> list[list[Tensor]]:
        output, requests = (
            RecordingOutput(),
            [make_request(p, 8, "h2o:budget=40", needs_logits=True) for p in random_prompts(4)],
        )
        run_to_completion(make_engine(family, output_processor=output, kv_dtype=kv_dtype), requests)
        return [output.logits[r] for r in requests]

    def write_rounded(kv: KV, slot_mapping: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> None:
        k, v = (int8_slots.dequantize(*int8_slots.quantize(x)) for x in (int8_slots.rotate(k), v))
        write(kv, slot_mapping, int8_slots.rotate(k), v, pos)

    in_int8, write = run(torch.int8), reference.write
    assert any(not torch.equal(a, b) for a, b in zip(in_int8[0], run(torch.float32)[0], strict=True))
    monkeypatch.setattr(reference, "write", write_rounded)
    for ours, expected in zip(in_int8, run(torch.float32), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("D", [1, 8, 24, 80, 128, 256])
def test_a_rotation_keeps_products_and_is_its_own_inverse(D: int) -> None:
    q, k = torch.randn(2, 7, D, generator=torch.Generator().manual_seed(D))
    rotated_q, rotated_k = int8_slots.rotate(q), int8_slots.rotate(k)
    assert torch.allclose(rotated_q @ rotated_k.T, q @ k.T, atol=1e-4)
    assert torch.allclose(int8_slots.rotate(rotated_k), k, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", [*POLICIES, "reread:budget=50,rereads=40"])
def test_chunk_size_changes_no_token(family: str, policy: str, backend: str) -> None:
    prompt = random_prompts(1, seed=3)[0] + random_prompts(1, seed=4)[0]
    whole = run_alone(family, prompt, policy=policy, backend=backend, max_batched_tokens=400)
    for chunk in (65, 97):
        assert run_alone(family, prompt, policy=policy, backend=backend, max_batched_tokens=chunk) == whole


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_company_changes_no_token(family: str, backend: str) -> None:
    prompts = random_prompts(10, seed=1, max_prompt_len=120)
    requests = [make_request(p, 20, POLICIES[i % len(POLICIES)]) for i, p in enumerate(prompts)]
    alone = [run_alone(family, p, 20, POLICIES[i % len(POLICIES)], backend=backend) for i, p in enumerate(prompts)]
    assert run_to_completion(make_engine(family, backend=backend), requests) == alone


@pytest.mark.parametrize(("family", "num_pages"), [("gemma3_text", 60)])
def test_preemption_changes_no_token(family: str, num_pages: int) -> None:
    prompts = random_prompts(64, seed=2, max_prompt_len=120)
    requests = [make_request(p, 30) for p in prompts]
    expected = run_to_completion(make_engine(family, backend="cpu"), [make_request(p, 30) for p in prompts])
    assert run_to_completion(make_engine(family, backend="cpu", num_pages=num_pages), requests) == expected
    assert sum(r.stats.num_preemptions for r in requests) > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tier", [None, "ram:capacity=10MB", "disk"])
def test_a_cached_prefix_changes_no_token(family: str, backend: str, tier: str | None, tmp_path: Path) -> None:
    """The second engine finds what the first has left on the disk."""
    expected = run_to_completion(make_engine(family, backend=backend), related_requests(family, 0))
    options: dict[str, Any] = {"backend": backend, "prefix_cache": "exact"}
    if tier:
        options["tiers"] = [disk_spec(tmp_path) if tier == "disk" else tier]
    for is_second in (False, True):
        engine, requests = make_engine(family, **options), related_requests(family, 0)
        assert run_to_completion(engine, requests) == expected
        assert sum(r.stats.num_cached_tokens for r in requests) > 40
        if tier == "disk" and is_second:
            assert disk_store_of(engine).counts["read"] > 0
        if tier:
            engine.cache.prefix_cache.close_offloader()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", ["ngram:k=5,min=1", "self:k=3,budget=48", "draft:k=4,model=any"])
def test_greedy_tokens_do_not_depend_on_drafts(family: str, spec: str) -> None:
    prompts, policies = random_prompts(8, seed=2), ["full", "ring:window=24", "sinks:budget=40,interval=3"]

    def run(**options: Any) -> list[list[int]]:
        requests = [make_request(p, 40, policies[i % len(policies)]) for i, p in enumerate(prompts)]
        return run_to_completion(make_engine(family, backend="cpu", **options), requests)

    assert run(drafter=parse_drafter(spec)) == run()


def test_a_store_of_another_precision_is_not_read(tmp_path: Path) -> None:
    """The miss is explained, and both precisions keep their prefixes in one folder."""
    prompt, params = list(range(3, 103)), SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)

    def ask(kv_dtype: str) -> RequestOutput:
        options = {"page_size": 16, "max_model_len": 512, "max_running_requests": 2, "kv_memory": "2MiB"}
        with closing(
            LLM("random:tiny", dtype="float32", kv_dtype=kv_dtype, tier=disk_spec(tmp_path), **options)
        ) as llm:
            llm.cache.prefix_cache.offloader.cost_model = AlwaysLoad()
            return llm.generate(prompt, params, explain_prefix=True)[0]

    first, other, again = ask("auto"), ask("int8"), ask("auto")
    assert other.prefix and other.cached_tokens == 0 and "kv int8" in other.prefix["explanation"]
    assert again.cached_tokens > 90 and ask("int8").cached_tokens > 60
    assert again.token_ids == first.token_ids


def test_an_int8_page_has_twice_the_slots_in_about_the_bytes() -> None:
    engines = [LLM("random:tiny", kv_dtype=dtype, kv_memory="2MiB", page_size=64) for dtype in ("bfloat16", "int8")]
    bfloat16, int8 = (llm.cache for llm in engines)
    assert int8.page_size == 2 * bfloat16.page_size
    per_slot = int8.store.page_bytes / int8.page_size, bfloat16.store.page_bytes / bfloat16.page_size
    ratio = per_slot[1] / per_slot[0]
    slots = int8.total_pages * int8.page_size, bfloat16.total_pages * bfloat16.page_size
    assert slots[0] / slots[1] == pytest.approx(ratio, rel=0.05)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"kv_dtype": "float8"}, "choose auto, bfloat16, int8"), ({"page_size": 512, "kv_dtype": "int8"}, "page_size")],
)
def test_bad_options_raise_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        LLM("random:tiny", backend="cpu", **options)
    assert "\n" not in str(error.value)
