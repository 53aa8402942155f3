"""Rows: none is ever lost, whatever fails."""

from __future__ import annotations

from typing import Any

import pytest

from retain.engine.engine import Engine
from retain.kv.eviction import evictor, policies
from retain.kv.memory.cache import KVCache
from retain.kv.prefix.radix_tree import RadixTree
from tests.helpers.engines import make_engine, make_request, row_of, run_alone, run_to_completion
from tests.unit.test_kv_cache import FULL, compute, make_cache

POLICY = "h2o:budget=20,interval=3"


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("a bug")


def assert_recovers(engine: Engine) -> None:
    """Cancel every request, as the engine thread does after an error: nothing is lost, and the next one is answered."""
    engine.cache.check()
    for request in (*engine.scheduler.running, *engine.scheduler.waiting):
        engine.cancel(request)
    engine.pending_steps.clear()
    engine.cache.check()
    assert engine.cache.free_pages == engine.cache.total_pages and not engine.cache.rows
    assert run_to_completion(engine, [make_request(range(40), 12, POLICY)]) == [
        run_alone("llama", range(40), 12, POLICY)
    ]


def test_a_row_that_cannot_be_opened_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request neither waits nor runs, by which the engine thread knows what to end."""
    engine = make_engine("llama")
    request = make_request(range(40), 12, POLICY)
    engine.add(request)
    with monkeypatch.context() as patch:
        patch.setattr("retain.kv.row.BudgetEvictor", fail)
        with pytest.raises(RuntimeError):
            engine.step()
    assert request not in engine.scheduler.waiting and not engine.cache.rows
    engine.cancel(request)
    assert_recovers(engine)


def test_a_fork_that_fails_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache([None, 20])
    row = cache.open(FULL, 50)
    compute(cache, row, 0, 50)
    monkeypatch.setattr(KVCache, "fork_row", fail)
    with pytest.raises(RuntimeError):
        row.fork(FULL, 50)
    cache.check()
    assert list(cache.rows.values()) == [row] and cache.free_rows == 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("operation", ["compact", "punch"])
def test_an_eviction_that_fails_loses_no_page(operation: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("llama")
    engine.depth = depth
    engine.add(*(make_request([7, *range(30 + i)], 40, POLICY) for i in range(3)))
    with monkeypatch.context() as patch:
        patch.setattr(engine.cache.backend if operation == "punch" else evictor, operation, fail)
        with pytest.raises(RuntimeError):
            for _ in range(10):
                engine.step()
    assert engine.cache.rows
    assert_recovers(engine)


@pytest.mark.parametrize("num_calls", [1, 2])  # at the end of the prompt, and of the request
def test_a_prefix_that_cannot_be_stored_ends_its_request(num_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("llama", prefix_cache="exact")
    insert = RadixTree.insert
    calls: list[int] = []

    def insert_or_fail(*args: Any, **more: Any) -> Any:
        calls.append(1)
        return fail() if len(calls) == num_calls else insert(*args, **more)

    engine.add(make_request(range(40), 3))
    with monkeypatch.context() as patch:
        patch.setattr(RadixTree, "insert", insert_or_fail)
        with pytest.raises(RuntimeError):
            run_to_completion(engine, [])
    assert_recovers(engine)


def test_a_row_computes_the_text_of_its_request() -> None:
    engine = make_engine("llama")
    request = make_request(range(40), 3)
    engine.add(request)
    engine.step()
    task = row_of(engine, request).task
    assert task and task.text is request.text and request.tokens is request.text.ids
    run_to_completion(engine, [])
    assert request.text.tokens.tolist() == [*range(40), *request.output_tokens]


def test_a_step_stops_where_something_is_due() -> None:
    """At an eviction, at the end of a prompt that others fork, and where a step has no more room."""
    cache = make_engine("gemma3_text", prefix_cache="exact", max_batched_tokens=64).cache
    request = make_request(range(100), 3)
    row = cache.open(FULL, 100)
    task = request.row_task(stops_at_prompt_end=True)
    row.start(task, cache.find(FULL, task))
    assert [row.next_stop(p) for p in (0, 64, 99, 100)] == [64, 100, 100, 164]
    policy = cache.plan_policy(policies.parse(POLICY), 50)
    evicting = cache.open(policy, 50)
    assert evicting.reserve(50)
    assert evicting.next_stop(20) == 50
    evicting.advance(50, 1)
    cache.evict()
    assert evicting.next_stop(50) == 53
    row.close()
    evicting.close()
    cache.check()


@pytest.mark.parametrize("uncomputed", [0, 1])
def test_what_gives_slots_up_comes_after_forks(uncomputed: int) -> None:
    """A fork may have more to compute than shrunk rings have room for."""
    cache = make_cache([None, 20])
    row = cache.open(FULL, 60)
    compute(cache, row, 0, 60)
    capacity = cache.tables.capacity[row.index].copy()
    row.advance(60, uncomputed)
    fork = row.fork(FULL, 60)
    assert fork and (cache.tables.capacity[fork.index] == capacity).all()
    cache.evict()
    has_shrunk = (cache.tables.capacity[row.index] < capacity).any()
    assert has_shrunk != bool(uncomputed) and (cache.tables.capacity[fork.index] == capacity).all()
    cache.check()


@pytest.mark.slow
def test_a_fork_that_cannot_evict_is_not_made() -> None:
    """Demoted tokens need pages as soon as the prompt is forked: with too few the follower waits for them alone."""
    policy = "sinks:budget=3,recent=2,interval=2,demote=int4:42"
    expected = run_alone("llama", range(1, 10), 4, policy, demotes=True)
    num_refused = 0
    for num_pages in range(6, 34):
        engine = make_engine("llama", num_pages=num_pages, demotes=True, max_running_requests=4)
        try:
            engine.add(*(requests := [make_request(range(1, 10), 4, policy) for _ in range(2)]))
        except ValueError:  # not even one fits
            num_refused += 1
            continue
        assert run_to_completion(engine, []) == [] and [r.output_tokens for r in requests] == [expected] * 2
        engine.cache.check()
    assert 0 < num_refused < 20
