"""Rows: none is ever lost, whatever fails."""

from __future__ import annotations

import pytest

from retain.engine.engine import Engine
from retain.kv.eviction import evictor
from retain.kv.memory.cache import KVCache
from tests.helpers.engines import make_engine, make_request, run_alone, run_to_completion
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
        patch.setattr(evictor, operation, fail)
        with pytest.raises(RuntimeError):
            for _ in range(10):
                engine.step()
    assert engine.cache.rows
    assert_recovers(engine)
