"""Laws of the drafter `self` with `dtype`: drafts attend to every token once, to old ones in a copy of fewer bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from retain import LLM, SamplingParams, kernels
from retain.engine import drafters
from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kernels import cpu, triton
from retain.kernels.api import KV
from retain.kernels.slots import quantized_slots as q
from retain.kv.eviction import policies
from retain.kv.memory import quantized_copies
from retain.processing.input import GenerateRequest
from tests.helpers.engines import (
    iter_steps,
    make_engine,
    make_request,
    random_prompts,
    row_of,
    run_alone,
    run_to_completion,
)
from tests.helpers.marks import slow
from tests.helpers.slots import read_pages

NAMES = [n for n in ("cpu", "reference") if kernels.import_backend(n).unavailable_reason() is None]
BACKENDS = [pytest.param(n, marks=pytest.mark.slow if n == "reference" else ()) for n in NAMES]
PROMPT = [7 * i % 128 for i in range(300)]
SPEC = "self:k=4,dtype=int4"

Rounding = Callable[[Tensor], Tensor]


def to_8(x: Tensor) -> Tensor:
    return q.dequantize(*q.quantize(x))


def to_4(x: Tensor) -> Tensor:
    return q.dequantize_4bit(*q.quantize_4bit(x))


DTYPES: dict[str, tuple[torch.dtype, Rounding, Rounding]] = {
    "int4": (torch.int4, to_4, to_4),
    "k8v4": (torch.uint8, to_8, to_4),
    "int8": (torch.int8, to_8, to_8),
}


def make_drafting_engine(spec: str = SPEC, **options: Any) -> Engine:
    options = {"family": "gemma3_text", "backend": "cpu"} | options
    return make_engine(drafter=drafters.parse(spec), **options)


def num_accepted(request: Request) -> int:
    return sum(request.stats.spec_decode.num_accepted_per_position)


def num_copied(engine: Engine, request: Request) -> int:
    """Return how many tokens of a request are copied now."""
    copy = row_of(engine, request).copy if request in engine.scheduler.running else None
    return copy.num_tokens if copy else 0


def read_positions(engine: Engine, drafter: Any, row: int, layer: int, g: int) -> list[int]:
    """Return the positions that drafts of a row attend to in one head: those of its own pages, then of the copy."""
    (tables,), found = drafter._tables.build_tables(torch.tensor([row]), torch.tensor([0, 1])), list[int]()
    for kv, t in ((engine.cache.kv, tables), (tables.demoted.kv, tables.demoted)):
        pages = t.pages[layer, row, g, : int(t.counts[layer, row, g])].long()
        found += [int(p) for p in kv.pos[pages].flatten() if p >= 0]
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["int4", *slow("k8v4", "int8")])
@pytest.mark.parametrize("family", ["gemma3_text", *slow("llama", "mpt")])
def test_drafts_attend_to_every_token_once_and_to_old_ones_rounded(family: str, dtype: str, backend: str) -> None:
    """The copy has the bits of the reference's rounding of the row's own tokens; drafts of it are accepted."""
    check_drafts(family, dtype, backend, PROMPT, 60)


def check_drafts(family: str, dtype: str, backend: str, prompt: list[int], output_len: int) -> None:
    pool_dtype, round_key, round_value = DTYPES[dtype]
    engine, request = make_drafting_engine(f"self:k=4,dtype={dtype}", family=family, backend=backend), None
    request = make_request(prompt, output_len)
    engine.add(request)
    cache, t, num_checked = engine.cache, engine.cache.tables, 0
    for _ in iter_steps(engine):
        n = num_copied(engine, request)
        if not n:
            continue
        row = row_of(engine, request).index
        num_checked, copies = num_checked + 1, cache.copies.by_dtype[pool_dtype]
        assert n % t.page_size == 0 and n > request.num_computed_tokens - 3 * t.page_size
        for layer in t.full_layers(row).tolist():
            for g in range(cache.spec.only_group.num_kv_heads):
                positions = read_positions(engine, engine.speculator.default, row, layer, g)
                assert sorted(set(positions)) == sorted(positions)  # rejected drafts are holes
                assert sorted(positions) == list(range(request.num_computed_tokens))
                own = torch.from_numpy(t.pages[row, layer, g, : n // t.page_size]).long()
                k, v = (x.flatten(0, 1) for x in read_pages(cache.backend, cache.kv, own))
                pages = torch.from_numpy(copies.pages[row, layer, g, : copies.counts[row, layer, g]]).long()
                found = [x.flatten(0, 1)[:n] for x in read_pages(cache.backend, copies.store.kv, pages)]
                assert copies.store.kv.pos[pages].flatten()[:n].tolist() == list(range(n))
                torch.testing.assert_close(found[0], q.rotate(round_key(q.rotate(k))), rtol=0, atol=1e-5)
                assert torch.equal(found[1], round_value(v))
        assert not copies.counts[row, t.ring_layers(row)].any()
    assert num_checked > 4 and num_accepted(request) > output_len / 6
    assert request.output_tokens == run_alone(family, prompt, output_len, backend=backend)


@pytest.mark.slow
@pytest.mark.skipif(triton.unavailable_reason() is not None, reason=str(triton.unavailable_reason()))
def test_drafts_of_the_triton_backend_do_so_too() -> None:
    """Of one family and dtype, because the interpreter is slow."""
    check_drafts("gemma3_text", "int4", "triton", PROMPT[:100], 30)


@pytest.mark.parametrize("at_once", [16, 64])
def test_a_long_text_is_copied_in_parts_before_it_gets_drafts(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_copies, "MAX_COPIED_TOKENS", at_once)
    engine, request = make_drafting_engine(), make_request(PROMPT, 60)
    engine.add(request)
    copied = [0]
    while engine.has_unfinished_requests:
        engine.step()
        if request in engine.scheduler.running and request.output_tokens:
            copied.append(num_copied(engine, request))
            assert copied[-1] <= copied[-2] + at_once
            assert copied[-1] >= 272 or not request.stats.spec_decode.num_drafted_per_position
    assert copied[-1] >= 320 and num_accepted(request) > 5
    assert request.output_tokens == run_alone("gemma3_text", PROMPT, 60, backend="cpu")


def test_a_damaged_copy_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """But its drafts are rejected, so drafts do come from the copy."""
    whole, damaged = make_request(PROMPT, 60), make_request(PROMPT, 60)
    answers = run_to_completion(make_drafting_engine(), [whole])

    def write_damaged(kv: KV, src: Tensor, to: KV, dst: Tensor, pos: Tensor) -> None:
        k, v = (-9 * x[:, None] for x in cpu.read_slots(kv, src))
        cpu.write(to, dst[None].int(), k, v, pos)

    monkeypatch.setattr(cpu, "requantize", write_damaged)
    assert run_to_completion(make_drafting_engine(), [damaged]) == answers
    assert num_accepted(damaged) < num_accepted(whole) / 2


def test_a_request_is_never_preempted_for_a_copy() -> None:
    """A pool that holds all requests to their ends, and nothing else: copies are given back when pages run out."""
    prompts = random_prompts(5, seed=3, max_prompt_len=200)
    expected = run_to_completion(make_engine("llama", backend="cpu"), [make_request(p, 120) for p in prompts])
    requests = [make_request(p, 120) for p in prompts]
    sizes = make_engine("llama", backend="cpu").cache
    num_pages = sum(sizes.pages_needed(r.policy, len(r.prompt) + 119, len(r.prompt)) for r in requests)
    engine = make_drafting_engine(family="llama", num_pages=num_pages)
    engine.add(*requests)
    num_released, before = 0, [0] * len(requests)
    for _ in iter_steps(engine):
        now = [num_copied(engine, r) for r in requests]
        running = engine.scheduler.running
        num_released += sum(bool(b and not n) for r, b, n in zip(requests, before, now, strict=True) if r in running)
        before = now
    assert [r.output_tokens for r in requests] == expected
    assert not sum(r.stats.num_preemptions for r in requests)
    assert num_released and sum(map(num_accepted, requests)) > 50
    assert engine.cache.free_pages == engine.cache.total_pages and not engine.cache.copies.num_pages


def test_a_copy_takes_free_pages_only_and_gives_them_to_tokens() -> None:
    spec = make_engine("llama").cache.spec
    heads = len(spec.windows) * spec.only_group.num_kv_heads
    cache = make_engine("llama", num_pages=heads * (10 + 10 + 2 + 1)).cache  # two rows, a copy, and a page
    a, b = (cache.open(policies.parse("full"), 160) for _ in range(2))
    copies, dtype = cache.copies, torch.int4
    assert a.reserve(160) and b.reserve(160) and a.extend_copy(dtype, 160)
    assert copies.num_pages == heads * 2 and not b.extend_copy(dtype, 160)
    assert (a.copy.num_tokens, b.copy.num_tokens) == (160, 0) and cache.free_pages == heads * 3
    assert b.reserve(176) and copies.num_pages == heads * 2
    assert a.reserve(176) and copies.num_pages == 0
    assert cache.pool.num_free == heads
    cache.check()


@pytest.mark.parametrize("prefix_cache", ["off", "exact"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_preemption_and_cancellation_give_copies_back(family: str, prefix_cache: str) -> None:
    """In pages that change their kind, too: no token changes, and the accountant balances after every step."""
    prompts = random_prompts(20, seed=5, max_prompt_len=150)
    plain = run_to_completion(make_engine(family, backend="cpu"), [make_request(p, 40) for p in prompts])
    num_pages = 260 if family == "llama" else 90
    engine = make_drafting_engine(family=family, num_pages=num_pages, prefix_cache=prefix_cache)
    requests = [make_request(p, 40) for p in prompts]
    engine.add(*requests)
    copies, num_closed = engine.cache.copies, 0
    for step in iter_steps(engine):
        running = [r for r in engine.scheduler.running if num_copied(engine, r)]
        if running and step in (4, 9, 12):
            row, before = row_of(engine, running[0]).index, copies.num_pages
            engine.cancel(running[0]) if step == 12 else engine.scheduler.preempt(running[0])
            num_closed += copies.num_pages < before and not copies.by_dtype[torch.int4].counts[row].any()
            engine.cache.check()
    assert num_closed >= 2 and sum(map(num_accepted, requests)) > 20
    for request, answer in zip(requests, plain, strict=True):
        assert request.output_tokens == answer[: len(request.output_tokens)]
    assert sum(len(r.output_tokens) == 40 for r in requests) >= len(requests) - 1
    assert engine.cache.free_pages == engine.cache.total_pages and not copies.num_pages


def test_copies_go_with_budgets_that_demote() -> None:
    """Rows that evict are attended to in full; demoted tokens and copies are of one kind."""
    prompts, specs = random_prompts(6, seed=2, max_prompt_len=300), ["full", "knorm:budget=30,demote=int4:20"]

    def answers(**options: Any) -> list[list[int]]:
        sizes: dict[str, Any] = {"page_size": 64, "dtype": torch.bfloat16, "demotes": True}
        engine = make_engine("gemma3_text", backend="cpu", **sizes, **options)
        return run_to_completion(engine, [make_request(p, 40, specs[i % 2]) for i, p in enumerate(prompts)])

    for dtype in DTYPES:
        assert answers(drafter=drafters.parse(f"self:k=3,dtype={dtype}")) == answers()


def test_requests_name_such_a_drafter_of_a_running_engine() -> None:
    """An engine without one has no memory for copies."""
    llm = LLM("random:tiny", kv_memory="4MiB")
    assert not llm.cache.store.others
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    plain, drafted = (
        llm.generate_from_requests([GenerateRequest(PROMPT, params, speculate=s)])[0] for s in ("off", SPEC)
    )
    assert drafted.token_ids == plain.token_ids and drafted.speculate and drafted.speculate["drafted"] > 10
    assert len(llm.cache.store.others) == 1 and not llm.cache.copies.num_pages
