"""Law 4: a cached prefix changes no token, whatever computed it, wherever it ends, and whatever was evicted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from retain.engine import drafters
from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kv.prefix.cache import PrefixCache
from retain.kv.prefix.node import Node
from retain.kv.prefix.pins import Pins
from retain.kv.text import Text
from retain.sampling_params import SamplingParams
from tests.helpers.counted_work import assert_linear
from tests.helpers.engines import iter_steps, make_engine, make_request, row_of, run_to_completion
from tests.helpers.marks import slow
from tests.helpers.related_requests import related_requests, run_disturbed

FAMILIES = ["gemma3_text", *slow("llama", "gpt2", "mpt", "mistral")]
BACKENDS = ["cpu", *slow("reference")]


def run_alone_on(engine: Engine, request: Request) -> Request:
    """Run one request on an engine. Its answer must be that of an engine without prefix cache."""
    engine.add(request)
    for _ in iter_steps(engine):
        pass
    plain = make_request(request.prompt, request.input.max_tokens)
    assert run_to_completion(make_engine("llama"), [plain]) == [request.output_tokens]
    return request


def num_cached(requests: Sequence[Request]) -> int:
    return sum(r.stats.num_cached_tokens for r in requests)


def prefix_cache_of(engine: Engine) -> PrefixCache:
    assert isinstance(engine.cache.prefix_cache, PrefixCache)
    return engine.cache.prefix_cache


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", [0, 2])
def test_a_cached_prefix_changes_no_token(family: str, backend: str, seed: int) -> None:
    """One request after the other, so that each finds the prefixes of the earlier ones; then all of them again."""
    plain = run_to_completion(make_engine(family, backend=backend), related_requests(family, seed))
    engine = make_engine(family, backend=backend, prefix_cache="exact")
    for round_ in range(2):
        requests = related_requests(family, seed)
        assert [run_to_completion(engine, [r])[0] for r in requests] == plain
        assert num_cached(requests) > (round_ + 1) * 40
    if family in ("llama", "gpt2", "mpt"):  # without sliding layers all but one token of a full prompt is cached
        assert all(r.stats.num_cached_tokens == len(r.prompt) - 1 for r in requests[::2])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prefix_cache", ["exact", "exact:keep=prompt"])
@pytest.mark.parametrize("num_pages", [1000, 160])
def test_eviction_preemption_and_cancellation_beside_cached_prefixes_change_no_token(
    family: str, prefix_cache: str, num_pages: int
) -> None:
    plain = run_to_completion(make_engine(family, backend="cpu"), related_requests(family, 3, only_full=True))
    engine = make_engine(
        family,
        backend="cpu",
        prefix_cache=prefix_cache,
        num_pages=num_pages if family != "gemma3_text" else num_pages * 2 // 5,
        max_running_requests=8,
        max_batched_tokens=64,
    )
    rng, cached = random.Random(5), 0
    for _ in range(3):
        requests = run_disturbed(engine, related_requests(family, 3, only_full=True), rng)
        assert [r.output_tokens for r in requests] == plain[:4] + plain[5:]
        cached += num_cached(requests)
    assert cached > 100
    assert engine.cache.free_pages == engine.cache.total_pages


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_rejected_drafts_are_never_cached(family: str) -> None:
    plain = run_to_completion(make_engine(family, backend="cpu"), related_requests(family, 1, only_full=True)[::2])
    drafter = drafters.parse("self:k=5,budget=16,refresh=1")
    engine = make_engine(family, backend="cpu", prefix_cache="exact", drafter=drafter)
    for _ in range(3):
        requests = related_requests(family, 1, only_full=True)[::2]
        assert run_to_completion(engine, requests) == plain
    assert num_cached(requests) > 60
    assert sum(sum(r.stats.spec_decode.num_drafted_per_position) for r in requests) > 20


@pytest.mark.parametrize(("prefix_cache", "num_cached"), [("exact", 60 + 30 - 1), ("exact:keep=prompt", 60)])
def test_a_conversation_computes_only_new_tokens(prefix_cache: str, num_cached: int) -> None:
    """Answers are cached to the last token that was computed, or not at all where only prompts are kept."""
    engine, prompt = make_engine("llama", prefix_cache=prefix_cache), list(range(60))
    first = make_request(prompt, 30)
    run_to_completion(engine, [first])
    second = run_alone_on(engine, make_request([*prompt, *first.output_tokens, 7, 8, 9], 5))
    assert second.stats.num_cached_tokens == num_cached


# ---- isolation -------------------------------------------------------------------------------------------------------


def test_a_prefix_is_shared_neither_between_salts_nor_between_windows() -> None:
    engine, prompt = make_engine("llama", prefix_cache="exact"), list(range(100))
    run_to_completion(engine, [make_request(prompt, 4, salt="a")])
    for salt, policy, expected in (("b", "full", 0), ("", "full", 0), ("a", "ring:window=30", 0), ("a", "full", 99)):
        request = make_request(prompt, 4, policy, salt=salt)
        run_to_completion(engine, [request])
        assert request.stats.num_cached_tokens == expected


def test_equal_prompts_of_two_salts_share_no_page() -> None:
    engine, prompt = make_engine("llama", prefix_cache="exact"), list(range(70))
    requests = [make_request(prompt, 4, salt=s) for s in "aab"]
    engine.add(*requests)
    engine.step()
    pages = [set(engine.cache.tables.pages[row_of(engine, r).index, :, :, :4].flatten().tolist()) for r in requests]
    assert pages[0] == pages[1] and not pages[0] & pages[2]


# ---- pins ------------------------------------------------------------------------------------------------------------


def pin(engine: Engine, prompt: Sequence[int], seconds: float) -> int:
    return engine.cache.hints.retain(make_request(prompt).policy, Text(prompt), seconds)


def test_pins_outlive_drafts_and_other_requests() -> None:
    engine = make_engine("llama", prefix_cache="exact", num_pages=6 * 16, max_running_requests=4)
    prompt = list(range(64))
    run_to_completion(engine, [make_request(prompt, 2)])
    assert pin(engine, prompt, 1000.0) == 64
    engine.add(*[make_request([i] * 40, 80) for i in range(3)])
    for _ in iter_steps(engine):
        assert prefix_cache_of(engine).tree.pins
    assert prefix_cache_of(engine).tree.unpin_all()


def test_a_pinned_prefix_is_evicted_only_for_a_request_that_could_not_run_otherwise() -> None:
    engine = make_engine("llama", prefix_cache="exact", num_pages=4 * 2 * 12, max_running_requests=4)
    prompt = list(range(64))
    run_to_completion(engine, [make_request(prompt, 2)])
    assert pin(engine, prompt, 1000.0) == 64
    for i in range(6):
        run_alone_on(engine, make_request([i + 1] * 100, 4))
    assert run_alone_on(engine, make_request(prompt, 2)).stats.num_cached_tokens == 63
    run_alone_on(engine, make_request([99] * 240, 8))  # needs every page
    assert run_alone_on(engine, make_request(prompt, 2)).stats.num_cached_tokens == 0
    assert engine.cache.free_pages == engine.cache.total_pages


def test_pins_expire() -> None:
    engine, prompt = make_engine("llama", prefix_cache="exact", num_pages=4 * 2 * 12), list(range(64))
    run_to_completion(engine, [make_request(prompt, 2)])
    assert pin(engine, prompt, 0.0) == 64
    assert engine.cache.free_pages == engine.cache.total_pages


@pytest.mark.parametrize("owners", [["ann"] * 9, ["ann"] * 4 + ["bob"] * 5, [*"abcdefghi"]])
def test_pins_hold_half_of_the_pool_at_most_and_leave_room_to_other_owners(owners: list[str]) -> None:
    """Whoever comes next has room for a third of what is left, and who gets no room is told so."""
    engine = make_engine("llama", prefix_cache="exact", backend="cpu", num_pages=6 * 60)
    tree, max_pages = prefix_cache_of(engine).tree, (6 * 60 + 1) // 2
    pinned: dict[str, int] = {}
    for i, owner in enumerate(owners):
        prompt = [i + 1] * 64  # 4 pages of each head, of which there are 6
        run_to_completion_with_pins(engine, make_request(prompt, 1))
        policy, before = make_request(prompt).policy, sum(pinned.values())
        kept = engine.cache.hints.retain(policy, Text(prompt), 1000.0, owner)
        has_room = pinned.get(owner, 0) + 24 <= 2 * (max_pages - before - 24)
        assert kept == 64 * has_room
        pinned[owner] = pinned.get(owner, 0) + 24 * has_room
        assert sum(node.all_pages.size for node in tree.pins) == sum(pinned.values()) <= max_pages
    assert set(pinned.values()) != {0} and pinned[owners[4]] > 0
    assert engine.cache.hints.retain(policy, Text([1] * 64), 1000.0, owners[0]) == 64, (
        "a second time takes nothing more"
    )


def test_work_of_a_pin_is_linear_in_its_nodes() -> None:
    """However small the parts by which a text grew: each of them is a node."""

    def prepare(num_nodes: int) -> Callable[[], object]:
        nodes = [Node(i, np.zeros(16, np.int32), [], True, np.zeros((8, 1), np.int32)) for i in range(num_nodes)]
        return lambda: Pins().add(nodes, 1.0, "ann", 10**9)

    assert_linear(prepare, 200)


def run_to_completion_with_pins(engine: Engine, request: Request) -> None:
    engine.add(request)
    for _ in iter_steps(engine):
        pass


# ---- sliding layers --------------------------------------------------------------------------------------------------


def test_nodes_without_pages_are_evicted_too() -> None:
    """If every layer slides, only the windows at the ends of nodes hold pages."""
    rng = random.Random(0)
    engine = make_engine("mistral", backend="cpu", prefix_cache="exact", num_pages=300, max_running_requests=8)
    for _ in range(60):
        stem = [rng.randrange(128) for _ in range(48)]
        run_to_completion(engine, [make_request(stem + [rng.randrange(128) for _ in range(30)], 4) for _ in range(2)])
    leaves = [node for node in prefix_cache_of(engine).tree.iter_nodes() if not node.children]
    assert sum(not node.all_pages.size for node in leaves) <= 2


def test_windows_are_found_beside_longer_texts_without_windows_there() -> None:
    """Wherever the text ended that stored them."""
    stem = list(range(1, 41))
    engine = make_engine("gemma3_text", prefix_cache="exact")
    for prompt in ([*stem, *[9] * 80], stem):
        run_to_completion(engine, [make_request(prompt, 1)])
    request, plain = (make_request([*stem, 7, 7, 7], 4) for _ in range(2))
    assert run_to_completion(engine, [request]) == run_to_completion(make_engine("gemma3_text"), [plain])
    assert request.stats.num_cached_tokens == 40


def test_the_second_text_that_branches_off_stores_windows_for_the_third() -> None:
    stem = list(range(1, 101))
    requests = [make_request([*stem, *[x] * 60], 4) for x in (3, 4, 5, 6)]
    engine = make_engine("gemma3_text", prefix_cache="exact")
    for request in requests:
        run_to_completion(engine, [request])
    assert [r.stats.num_cached_tokens for r in requests] == [0, 0, 96, 96]
    plain = [make_request(r.prompt, 4) for r in requests]
    assert [r.output_tokens for r in requests] == run_to_completion(make_engine("gemma3_text"), plain)


# ---- sharing ---------------------------------------------------------------------------------------------------------


def test_running_requests_share_the_pages_of_a_cached_prefix() -> None:
    """So more of them fit."""
    prompt = list(range(128))
    engine = make_engine("llama", prefix_cache="exact", num_pages=4 * 2 * 12, max_running_requests=8)
    run_to_completion(engine, [make_request(prompt, 2)])
    requests = [make_request([*prompt, i], 14) for i in range(8)]
    engine.add(*requests)
    engine.step()
    assert len(engine.scheduler.running) >= 3
    used = [set(engine.cache.tables.pages[row.index, 0, 0, :8]) for row in engine.scheduler.running.values()]
    assert all(u == used[0] for u in used)
    for _ in iter_steps(engine):
        pass


@pytest.mark.parametrize("prefix_cache", ["exact", *slow("off")])
def test_equal_prompts_added_together_share_whole_pages(prefix_cache: str) -> None:
    engine, prompt = make_engine("llama", prefix_cache=prefix_cache), list(range(100))

    def make_requests() -> list[Request]:
        return [make_request(prompt, 20, params=SamplingParams(seed=i, ignore_eos=True)) for i in range(6)]

    requests = make_requests()
    engine.add(*requests)
    engine.step()
    tables = [engine.cache.tables.pages[row_of(engine, r).index, 0, 0].copy() for r in requests]
    assert all((t[:6] == tables[0][:6]).all() for t in tables)
    assert len({int(t[6]) for t in tables}) == 6
    for _ in iter_steps(engine):
        pass
    alone = [run_to_completion(make_engine("llama"), [r])[0] for r in make_requests()]
    assert alone == [r.output_tokens for r in requests]
