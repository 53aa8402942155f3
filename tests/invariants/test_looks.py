"""Laws of answers whose tokens look at few slots. Random schedules draw such requests, too.

Which slots are looked at is tested in tests/kernels/test_looked_slots.py.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from retain import LLM
from retain.engine import batch_builder, drafters
from retain.engine.request import Request
from retain.engine.scheduler import ScheduledRequest
from retain.kernels import import_backend
from retain.kernels.api import NO_WINDOW
from retain.kernels.slots.pool_dtypes import INT4
from retain.kv.eviction import policies
from retain.kv.manager import KVCacheManager
from retain.kv.memory.group_pages import divide_pages
from retain.kv.stats.attention_trace import AttentionTrace
from retain.sampling_params import SamplingParams
from tests.helpers.chats import record_positions
from tests.helpers.engines import make_engine, make_request, record_logits, run_alone, run_to_completion
from tests.helpers.marks import slow
from tests.helpers.tiny_models import tiny_model

FAMILIES = (
    "llama",
    "gemma3_text",
    *slow("gpt2", "gpt_oss", "deepseek_v3", "mpt", "qwen3_next"),
)  # full layers, and others
FEW = "look:slots=20,min=1"
PROMPT = [random.Random(0).randrange(128) for _ in range(100)]


def logits(
    family: str, policy: str, backend: str = "cpu", kv_dtype: torch.dtype | None = None, prompt: list[int] = PROMPT
) -> Tensor:
    """Return the logits of 20 tokens of an answer, [20, V]."""
    if reason := import_backend(backend).unavailable_reason():
        pytest.skip(reason)
    engine = make_engine(family, backend=backend, looks=True, kv_dtype=kv_dtype)
    forced = [7 * i % 128 for i in range(20)]
    (found,) = record_logits(engine, [make_request(prompt, 20, policy, needs_logits=True, forced_tokens=forced)])
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["cpu", "reference", *slow("triton")])
def test_a_look_at_all_slots_is_the_full_cache(family: str, backend: str) -> None:
    full = logits(family, "full", backend)
    assert torch.equal(logits(family, "look:slots=100%", backend), full)
    assert torch.equal(logits(family, "look:slots=200", backend), full)
    assert torch.equal(logits(family, "look:slots=1%,min=500", backend), full)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_dtype", [None, *slow(torch.bfloat16, torch.int8, INT4)])
def test_few_slots_change_what_follows_the_prompt(family: str, kv_dtype: torch.dtype | None) -> None:
    full = logits(family, "full", kv_dtype=kv_dtype)
    few = logits(family, FEW, kv_dtype=kv_dtype)
    assert torch.equal(few[0], full[0])  # of the prompt's last token
    has_full_layers = None in tiny_model(family).spec.kv_cache.windows
    assert torch.equal(few[1:], full[1:]) != has_full_layers


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["cpu", *slow("triton")])
def test_backends_look_where_the_reference_does(family: str, backend: str) -> None:
    """Up to slots of nearly equal weights, of which a random model has many."""
    expected = logits(family, FEW, "reference")
    error = (logits(family, FEW, backend) - expected).abs().mean()
    change = (logits(family, "look:slots=10,min=1", "reference") - expected).abs().mean()
    assert error < 0.4 * change


@pytest.mark.parametrize("first", ["full", FEW])
@pytest.mark.parametrize("second", ["full", FEW])
def test_a_prompt_is_shared_whoever_computed_it_and_an_answer_that_looked_is_not(first: str, second: str) -> None:
    engine = make_engine("llama", backend="cpu", looks=True, prefix_cache="exact")
    one = make_request(PROMPT[:80], 40, first)
    engine.add(one)
    while engine.has_unfinished_requests:
        engine.step()
    text = [*PROMPT[:80], *one.output_tokens, 5]
    two = make_request(text, 20, second)
    engine.add(two)
    while engine.has_unfinished_requests:
        engine.step()
    assert two.stats.num_cached_tokens == (80 if first == FEW else 119)
    assert two.output_tokens == run_alone("llama", text, 20, second, backend="cpu", looks=True)


@pytest.mark.parametrize("family", ["llama", *slow("gemma3_text", "deepseek_v3")])
def test_an_answer_that_looks_never_begins_with_what_others_computed_of_its_text(family: str) -> None:
    """As a prompt, or as an answer that attended to everything; also where it was preempted."""
    forced = [7 * i % 128 for i in range(60)]

    def ask(policy: str, prompt: list[int], max_tokens: int, forced_tokens: list[int]) -> Request:
        return make_request(prompt, max_tokens, policy, forced_tokens=forced_tokens)

    alone = run_to_completion(make_engine(family, backend="cpu", looks=True), [ask(FEW, PROMPT, 90, forced)])
    engine = make_engine(family, backend="cpu", looks=True, prefix_cache="exact")
    for first in (ask("full", PROMPT, 90, forced), ask("full", [*PROMPT, *forced], 5, [])):
        engine.add(first)
        while engine.has_unfinished_requests:
            engine.step()
    one = ask(FEW, PROMPT, 90, forced)
    engine.add(one)
    for step in range(20):
        engine.step()
        if step == 10:
            engine.scheduler.preempt(one)
    while engine.has_unfinished_requests:
        engine.step()
    assert one.stats.num_cached_tokens <= len(PROMPT) and one.stats.num_preemptions
    assert [one.output_tokens] == alone


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["keydiff:budget=60", "snapkv:budget=50%,interval=30", "h2o:budget=60,interval=20"])
@pytest.mark.parametrize("backend", ["cpu", *slow("reference", "triton")])
def test_a_budget_whose_answers_look_at_all_that_it_keeps(family: str, policy: str, backend: str) -> None:
    """It is the budget alone, where no answer's attention chooses what goes."""
    if policy.startswith("keydiff") and backend == "triton":
        pytest.skip("it evicts by keys, whose bits depend on the chunk there")
    assert torch.equal(logits(family, f"{policy},look=100%", backend), logits(family, policy, backend))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_budget_keeps_is_looked_at_as_the_reference_does(family: str) -> None:
    """Also where tokens fill holes of others, in groups that were full before."""
    policy = "random:budget=200,interval=3"
    prompt = 3 * PROMPT
    expected = logits(family, f"{policy},look=64", "reference", prompt=prompt)
    error = (logits(family, f"{policy},look=64", prompt=prompt) - expected).abs().mean()
    change = (logits(family, policy, "reference", prompt=prompt) - expected).abs().mean()
    has_full_layers = None in tiny_model(family).spec.kv_cache.windows
    assert error < 0.4 * change if has_full_layers else change == 0, (error, change)


def test_tokens_look_once_their_budget_has_begun() -> None:
    """Those before are seen by whole queries, as is the prompt that is read again."""
    engine = make_engine("llama", backend="cpu", looks=True)
    seen: list[tuple[int, int]] = []
    build = batch_builder.build_looks

    def record(scheduled: Sequence[ScheduledRequest], cache: KVCacheManager) -> Tensor | None:
        looks = build(scheduled, cache)
        assert looks is not None
        seen.extend(zip(range(scheduled[0].request.next_position, 10**6), looks.tolist(), strict=False))
        return looks

    with patch.object(batch_builder, "build_looks", record):
        run_to_completion(engine, [make_request(PROMPT, 20, "reread:budget=50%,first=8,interval=30,look=9")])
    assert {n for p, n in seen if p < len(PROMPT) + 8} == {0}
    assert all(n == 9 for p, n in seen if p >= len(PROMPT) + 8 and n), seen
    assert [n for p, n in seen][-1] == 9


@pytest.mark.parametrize("family", ["llama", *slow("gemma3_text", "gpt2", "deepseek_v3")])
@pytest.mark.parametrize(
    "policy",
    [
        "sinks:budget=40,interval=5",
        "h2o:budget=70%,interval=9,share=all",
        "h2o:budget=30,interval=6,heads=union",
        "h2o:budget=40,interval=9,prefill=stream,chunk=30",
        "tova:budget=130,interval=4",  # which the answer fills
        "h2o:budget=64,interval=16,shrink=8",
    ],
)
def test_a_share_is_of_the_tokens_that_a_head_holds(policy: str, family: str) -> None:
    """Rows say how many at each step: also between evictions, before the first one, and where a budget was halved."""
    more = {"score_columns": tiny_model(family).spec.num_heads} if "union" in policy else {}
    engine = make_engine(family, backend="cpu", looks=True, **more)
    request = make_request(PROMPT, 60, f"{policy},look=50%")
    layers = np.flatnonzero(engine.cache.planner.windows(request.policy) == NO_WINDOW)
    found: list[tuple[int, float]] = []

    def evict(cache: KVCacheManager) -> None:
        for row in cache.rows.values():
            positions = row.positions()
            held = [len(head) for layer in layers for head in positions[layer]]
            found.append(
                (int(row.count_held(np.array([row.num_computed], np.int32))[0]), sum(held) / max(len(held), 1))
            )
        original(cache)

    original = KVCacheManager.evict
    with patch.object(KVCacheManager, "evict", evict):
        engine.add(request)
        while engine.has_unfinished_requests:
            engine.step()
            if engine.scheduler.running and "shrink" in policy and request.num_computed_tokens in (130, 145):
                assert engine.scheduler.running[request].shrink(request.num_computed_tokens)
    assert len(found) >= 60
    assert all(said == math.ceil(held) for said, held in found), found


def test_a_second_reading_of_the_prompt_adds_masses_although_answers_look() -> None:
    kept = []
    for look in ("", ",look=64"):
        engine = make_engine("llama", backend="cpu", looks=True)
        positions = record_positions(engine)
        run_to_completion(engine, [make_request(PROMPT, 1, f"reread:budget=50%{look}")])
        kept.append(positions)
    assert kept[1] == kept[0]


@pytest.mark.parametrize("policy", ["h2o:budget=70,prefill=stream,chunk=30", "sinks:budget=70,prefill=stream,chunk=30"])
@pytest.mark.parametrize("first", ["", ",look=64"])
def test_streamed_prompts_are_shared_whoever_computed_them(policy: str, first: str) -> None:
    """Up to a chunk: a prompt attends to all that it keeps, and its answer goes on as if nobody had computed it."""
    engine = make_engine("llama", backend="cpu", looks=True, prefix_cache="exact")
    run_to_completion(engine, [make_request(3 * PROMPT, 40, policy + first)])
    text = [*PROMPT, *PROMPT, *PROMPT[:90], 5, 6]
    request = make_request(text, 30, f"{policy},look=64")
    found = run_to_completion(engine, [request])
    assert request.stats.num_cached_tokens >= 250
    assert found == [run_alone("llama", text, 30, f"{policy},look=64", backend="cpu", looks=True)]


def test_demoted_tokens_cannot_be_looked_at_and_nothing_resumes_from_what_looked() -> None:
    with pytest.raises(ValueError, match="demote does not go with look"):
        policies.parse("h2o:budget=50%,look=25%,demote=int4")
    assert policies.parse("h2o:budget=50%").resolve(100).resume_key
    assert not policies.parse("h2o:budget=50%,look=25%").resolve(100).resume_key


def test_answers_that_look_add_no_masses() -> None:
    """Drafters and the inspector ask for them: they get those of the prompt."""
    llm = LLM("random:tiny", kv_memory="64MiB", kv_policy=FEW, speculate="self:budget=64", max_model_len=1024)
    prompt = [i % 250 for i in range(600)]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    plain = LLM("random:tiny", kv_memory="64MiB", kv_policy=FEW, max_model_len=1024)
    assert llm.generate([prompt], params)[0].token_ids == plain.generate([prompt], params)[0].token_ids
    request = make_request(PROMPT, 20, FEW)
    request.attention_trace = AttentionTrace(3, 8)
    assert run_to_completion(make_engine("llama", backend="cpu", looks=True), [request])


def test_recomputed_tokens_look_as_they_did() -> None:
    """A preempted answer is computed again in one step: each token looks as its position says."""
    policies = [FEW, "full", "look:slots=30%,min=9"]
    alone = [run_alone("llama", PROMPT, 40, p, backend="cpu", looks=True) for p in policies]
    engine = make_engine("llama", backend="cpu", looks=True)
    requests = [make_request(PROMPT, 40, p) for p in policies]
    engine.add(*requests)
    for step in range(30):
        engine.step()
        if step % 9 == 8:
            engine.scheduler.preempt(requests[step // 9 % 3])
    while engine.has_unfinished_requests:
        engine.step()
    assert [r.output_tokens for r in requests] == alone
    assert any(r.stats.num_preemptions for r in requests)


def test_pages_have_sketches_where_a_policy_looks() -> None:
    """Slots of 4 bits need no keys beside their own; a request may only look where the engine was built for it."""
    spec = tiny_model("llama").spec.kv_cache  # of 16 numbers a head
    added = [
        divide_pages(spec, 16, dtype, 1, None, True).page_bytes - divide_pages(spec, 16, dtype).page_bytes
        for dtype in (torch.float32, INT4)
    ]
    assert added == [16 * (8 + 2) + 2 * (16 + 16), 2 * (16 + 16)]
    with pytest.raises(ValueError, match=r"look:slots=12.5% looks at few slots: start the engine with such a policy"):
        LLM("random:tiny", kv_memory="32MiB").generate("a", kv_policy="look:slots=12.5%")
    llm = LLM("random:tiny", kv_memory="32MiB", allow_policy="look:slots=50%")
    assert llm.generate("a", kv_policy="look:slots=12.5%")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_resident", [0, *slow(40)])
@pytest.mark.parametrize("policy", [FEW, *slow("random:budget=80,interval=7,look=64")])
def test_a_pool_in_a_file_changes_no_answer(family: str, policy: str, num_resident: int, tmp_path: Path) -> None:
    """Texts take turns in a small pool over a tier, with drafts that are rejected: pages forget what they held."""
    prompts = [[(7 * i * i + i // 9 * seed) % 128 for i in range(90)] for seed in range(4)]
    answers = []
    for folder in ("", str(tmp_path / "pool")):
        engine = make_engine(
            family,
            backend="cpu",
            looks=True,
            num_pages=make_engine(family, looks=True).cache.planner.pages_of_text(170),
            drafter=drafters.parse("ngram:k=4"),
            prefix_cache="exact",
            tiers=["ram:capacity=10MB"],
            offload_folder=folder,
            num_resident=num_resident if folder else 0,
            max_running_requests=2,
        )
        turns = [run_to_completion(engine, [make_request(p, 60, policy) for p in prompts]) for _ in range(3)]
        answers.append(turns)
        looked = engine.cache.pool_stats().looked_slots
        assert bool(folder) == bool(looked.get("file")) and (not folder or num_resident or looked["memory"])
    assert answers[1] == answers[0]


@pytest.mark.parametrize(
    ("offload", "options", "reason"),
    [
        ("", {}, "kv_offload is disk:path=DIR,capacity=SIZE, not ''"),
        ("ram:capacity=9MiB", {}, "kv_offload is disk:path=DIR"),
        ("disk:path={path},capacity=9MiB,evict=lfu", {}, "kv_offload is disk:path=DIR"),
        ("disk:path={path}", {}, "disk needs capacity"),
        ("disk:path={path},capacity=9MiB", {"kv_policy": "full"}, "is for answers that look, and no policy here does"),
        ("disk:path={path},capacity=9MiB", {"kv_memory": "100kB"}, "MiB too small: it holds sketches and positions"),
        ("disk:path={path},capacity=9MiB", {"kv_dtype": "int4"}, "looks read all keys of a pool in 4 bits"),
        ("disk:path={path},capacity=9MiB", {"backend": "reference"}, "for the cpu backend: with reference"),
        ("disk:path={file},capacity=9MiB", {}, "a folder was wanted for the file of the pool"),
    ],
)
def test_pools_in_files_that_cannot_be_had_are_refused(
    offload: str, options: dict[str, str], reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    spec = offload.format(path=tmp_path, file=file)
    with pytest.raises((ValueError, OSError), match=reason):
        LLM("random:tiny", **{"kv_policy": FEW, "kv_memory": "64MiB", "kv_offload": spec, **options})


def test_a_pool_in_a_file_goes_with_whatever_policy_looks(tmp_path: Path) -> None:
    offload = f"disk:path={tmp_path},capacity=9MiB"
    for policies_given in ({"kv_policy": "auto:budget=50%,look=64"}, {"allow_policy": "h2o:budget=50%,look=25%"}):
        assert LLM("random:tiny", kv_memory="64MiB", kv_offload=offload, **policies_given).generate("a")
