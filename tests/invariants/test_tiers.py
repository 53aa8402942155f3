"""Law 4 for tiers: pages from memory or a disk change no token, and neither does any failure of a tier."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import retain.kv.stores.loader
from retain.kv.prefix.cache import PrefixCache
from tests.helpers.disk_faults import FAULTS, Fault
from tests.helpers.engines import AlwaysLoad, iter_steps, make_engine, make_request, row_of, run_to_completion
from tests.helpers.marks import slow
from tests.helpers.related_requests import related_prompts, related_requests
from tests.helpers.stored_spans import names_in, span_files, verify
from tests.helpers.tiers import clear_pool, disk_spec, disk_store_of, offloader_of

Texts = list[list[int]]
FillStore = Callable[..., tuple[Texts, Texts]]

FAMILIES = ["gemma3_text", *slow("llama", "mpt", "mistral")]
BACKENDS = ["cpu", pytest.param("reference", marks=pytest.mark.slow)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", [0, 2])
def test_engine_after_a_restart_finds_prefixes_on_the_disk(
    family: str, backend: str, seed: int, tmp_path: Path
) -> None:
    """The first engine computes all requests together, the second loads for each alone, the third for all together."""
    expected = run_to_completion(make_engine(family, backend=backend), related_requests(family, seed))
    for num_restarts in range(3):
        engine = make_engine(family, backend=backend, prefix_cache="exact", tiers=[disk_spec(tmp_path)])
        requests = related_requests(family, seed)
        if num_restarts == 1:
            assert [run_to_completion(engine, [r])[0] for r in requests] == expected
        else:
            assert run_to_completion(engine, requests) == expected
        if num_restarts:
            assert disk_store_of(engine).counts["read"] > 0
        assert sum(r.stats.num_cached_tokens for r in requests) > (num_restarts > 0) * 40
        engine.cache.prefix_cache.close_offloader()


@pytest.mark.parametrize("window", [1, 2, *slow(16, 17)])
@pytest.mark.parametrize("prompt_len", [17, 33, *slow(32)])
def test_windows_of_any_length_go_to_a_tier_and_back(window: int, prompt_len: int) -> None:
    """A window of one token has no pages where a page begins."""
    engine = make_engine("llama", backend="cpu", prefix_cache="exact", tiers=["ram:capacity=10MB"])
    prompt, policy = [5 + i % 20 for i in range(prompt_len)], f"ring:window={window}"
    expected = run_to_completion(make_engine("llama", backend="cpu"), [make_request(prompt, 9, policy)])
    for _ in range(3):
        assert run_to_completion(engine, [make_request(prompt, 9, policy)]) == expected
        tree = engine.cache.prefix_cache.tree
        tree.evict(tree.num_evictable_pages)
    engine.cache.prefix_cache.close_offloader()


@pytest.fixture(scope="module")
def fill_store(tmp_path_factory: pytest.TempPathFactory) -> FillStore:
    """Fill a folder with a store: a function of the folder and the family that returns prompts and their answers."""

    @cache
    def original(family: str) -> tuple[Path, Texts, Texts]:
        path, prompts = tmp_path_factory.mktemp(family), related_prompts(7)
        engine = make_engine(family, backend="cpu", prefix_cache="exact", tiers=[disk_spec(path)])
        answers = [run_to_completion(engine, [make_request(t)])[0] for t in prompts]
        engine.cache.prefix_cache.close_offloader()
        return path, prompts, answers

    def fill(path: Path, family: str = "llama") -> tuple[Texts, Texts]:
        source, prompts, answers = original(family)
        shutil.copytree(source, path, dirs_exist_ok=True)
        return prompts, answers

    return fill


@pytest.mark.parametrize("call", ["preadv", "pwritev", "fsync"])
def test_a_failing_disk_costs_only_time(
    call: str, fill_store: FillStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full or broken disk: prefixes that cannot be read are computed, spans that cannot be written are dropped."""
    prompts, answers = fill_store(tmp_path)
    engine = make_engine("llama", backend="cpu", prefix_cache="exact", tiers=[disk_spec(tmp_path)])
    store = disk_store_of(engine)
    used_bytes = store.span_index.used_bytes

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    others = [[9, *t] for t in prompts]
    requests = [make_request(t) for t in prompts]
    assert [run_to_completion(engine, [r])[0] for r in requests] == answers
    run_to_completion(engine, [make_request(t) for t in others])
    store.sync()
    if call == "preadv":
        assert requests[0].stats.num_cached_tokens == 0
    else:
        assert store.counts["failed"] > 0 and store.span_index.used_bytes == used_bytes
        assert {f.name for f in span_files(tmp_path)} == names_in(store)
    monkeypatch.undo()
    run_to_completion(engine, [make_request(t) for t in others])  # the disk works again
    store.sync()
    assert verify(store) == 0
    engine.cache.prefix_cache.close_offloader()


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_engine_starts_on_a_disk_that_cannot_be_written(fault: Fault, fill_store: FillStore, tmp_path: Path) -> None:
    """It reads what the disk has, and its answers are those of an engine without tiers."""
    prompts, answers = fill_store(tmp_path)
    with fault(tmp_path):
        engine = make_engine("llama", backend="cpu", prefix_cache="exact", tiers=[disk_spec(tmp_path)])
        offloader_of(engine).cost_model = AlwaysLoad()
        requests = [make_request(t) for t in prompts]
        assert [run_to_completion(engine, [r])[0] for r in requests] == answers
        assert disk_store_of(engine).counts["read"] > 0 and sum(r.stats.num_cached_tokens for r in requests) > 0
        engine.cache.prefix_cache.close_offloader()


def test_slow_layers_are_waited_for(fill_store: FillStore, tmp_path: Path) -> None:
    """On a slow disk; and a request that is preempted or cancelled stops reading."""
    prompts, answers = fill_store(tmp_path)
    engine = make_engine("llama", backend="cpu", prefix_cache="exact", tiers=[disk_spec(tmp_path) + ",read=3MB"])
    assert [run_to_completion(engine, [make_request(t)])[0] for t in prompts] == answers
    longest = max(prompts, key=len)
    for stop in (engine.scheduler.preempt, engine.cancel):
        clear_pool(engine)
        r = make_request(longest)
        engine.add(r)
        engine.scheduler.schedule()
        load = row_of(engine, r).load
        assert load
        stop(r)
        assert load.cancelled and not engine.cache.rows
        engine.cache.check()
        for _ in iter_steps(engine):
            pass
        assert r.output_tokens in ([], answers[prompts.index(longest)])
    engine.cache.prefix_cache.close_offloader()


def test_prefixes_are_computed_when_no_pages_are_free_for_a_load(
    fill_store: FillStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, answers = fill_store(tmp_path, "gemma3_text")
    engine = make_engine("gemma3_text", backend="cpu", prefix_cache="exact", tiers=[disk_spec(tmp_path)])
    pool, refused, attach = engine.cache.pool, [], PrefixCache._attach

    def attach_without_pages(*args: object, **keywords: object) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool, "ensure_free", lambda n: refused.append(n))
            return attach(*args, **keywords)

    monkeypatch.setattr(PrefixCache, "_attach", attach_without_pages)
    assert [run_to_completion(engine, [make_request(t)])[0] for t in prompts] == answers and refused
    engine.cache.prefix_cache.close_offloader()


@pytest.mark.parametrize("error", [MemoryError, RuntimeError, OSError])
def test_an_error_of_a_reader_fails_only_its_load_and_is_logged_once(
    error: type[Exception],
    fill_store: FillStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts, answers = fill_store(tmp_path)
    engine = make_engine("llama", backend="cpu", prefix_cache="exact", tiers=[disk_spec(tmp_path)])

    def fail(*_: object) -> None:
        raise error("broken")

    monkeypatch.setattr(retain.kv.stores.loader, "write_pages", fail)
    for r in (requests := [make_request(t) for t in prompts]):
        engine.add(r)
    for _ in iter_steps(engine):
        pass
    assert [r.output_tokens for r in requests] == answers
    engine.cache.prefix_cache.close_offloader()
    # A load that finds its file deleted, because another load failed on it, is a problem of another kind.
    problem = f"tier disk: a span could not be loaded and is dropped: {error.__name__}: "
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    first, last = (w for w in warnings if w.startswith(problem))
    assert first.startswith(f"{problem}broken") and last.endswith("times in all")
