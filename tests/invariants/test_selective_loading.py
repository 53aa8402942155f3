"""Selective loading: with ratio 1 it changes no token; with less, other requests still get theirs."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from retain.engine.engine import Engine
from retain.kernels.api import NO_WINDOW
from retain.kv.checkpoints import Demand
from retain.kv.stores.loader import write_pages
from retain.kv.stores.selective.block_cache import BlockCache
from retain.kv.stores.selective.loader import SelectiveLoader
from retain.kv.stores.store import ReadJob
from retain.kv.text import Text
from tests.helpers.engines import iter_steps, make_engine, make_request, row_of, run_to_completion
from tests.helpers.marks import slow
from tests.helpers.related_requests import related_prompts
from tests.helpers.slots import read_pages
from tests.helpers.tiers import clear_pool, disk_spec, disk_store_of, flip_a_bit, offloader_of

FAMILIES = ["gemma3_text", *slow("llama", "mpt")]
BACKENDS = ["cpu", *slow("reference")]


def make_selective_engine(family: str, path: Path, ratio: float, **options: object) -> Engine:
    options = {"backend": "cpu", **options}
    return make_engine(family, prefix_cache=f"selective:ratio={ratio}", tiers=[disk_spec(path)], **options)  # type: ignore


def finish_repacking(engine: Engine) -> None:
    """Wait until spans are reordered by the attention on them, and written."""
    offloader_of(engine).sync()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("looks", [False, *slow(True)])
def test_loading_everything_changes_no_token(family: str, backend: str, looks: bool, tmp_path: Path) -> None:
    """Before and after spans are reordered, alone and together, and after a restart."""
    prompts, max_tokens = related_prompts(4), 12 if backend == "cpu" else 6
    expected = run_to_completion(make_engine(family, backend=backend), [make_request(t, max_tokens) for t in prompts])
    for _ in range(2):
        engine = make_selective_engine(family, tmp_path, 1.0, backend=backend, looks=looks)
        for _ in range(2):
            clear_pool(engine)
            assert [run_to_completion(engine, [make_request(t, max_tokens)])[0] for t in prompts] == expected
            finish_repacking(engine)
            clear_pool(engine)
            assert run_to_completion(engine, [make_request(t, max_tokens) for t in prompts]) == expected
        assert family == "gemma3_text" or any(s.is_reordered for s in disk_store_of(engine).span_index.spans)
        engine.cache.prefix_cache.close_offloader()


def test_reordered_span_has_the_same_keys_and_values_in_another_order(tmp_path: Path) -> None:
    """In every layer and head they are those of the pool, the tokens with the most attention first."""
    text = list(range(100))
    engine = make_selective_engine("llama", tmp_path, 0.5)
    cache = engine.cache
    r = make_request(text)
    run_to_completion(engine, [r])
    start = cache.prefix_cache.find(Text(text), Demand(r.policy, max_length=96))
    (pages,) = cache.prefix_cache.layout.split(start.blocks[:, :6])  # [L, G, n]
    k, v = (x.view(*pages.shape, 16, -1) for x in read_kv(engine, pages))
    finish_repacking(engine)
    clear_pool(engine)
    run_to_completion(engine, [make_request(text)])
    finish_repacking(engine)
    store, offloader = disk_store_of(engine), offloader_of(engine)
    ((span, _),) = {store.find(key) for s in store.span_index.spans for key in s.keys[:1]}
    assert span.is_reordered
    reader = store.open(span)
    metadata = offloader.probe_config.parse_metadata(span, reader.read_metadata())
    for m in range(len(span.num_blocks)):
        assert (np.diff(metadata.mass[m][metadata.token_order[m]]) <= 0).all()
        loaded = cache.pool.allocate(pages[0].size).reshape(-1, pages.shape[1])  # [n, G]
        write_pages(offloader.transfer, ReadJob(store, span, m, 0, loaded, 0), reader.read_blocks(m, 0, 6))
        found = [x.view(6, -1, 16, x.shape[-1]) for x in read_kv(engine, loaded)]
        for ours, theirs in zip(found, (k[m], v[m]), strict=True):  # [n, G, S, D], [G, n, S, D]
            reordered = theirs.flatten(1, 2)[:, torch.from_numpy(metadata.token_order[m].astype(np.int64))]
            assert (ours.transpose(0, 1).flatten(1, 2) == reordered).all()
    reader.close()
    engine.cache.prefix_cache.close_offloader()


def read_kv(engine: Engine, pages: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return read_pages(engine.cache.backend, engine.cache.kv, torch.from_numpy(pages).long().flatten())


@pytest.mark.parametrize("family", FAMILIES)
def test_selected_tokens_are_a_row_that_has_already_evicted(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads have the selected tokens and those after the prefix. Other pages are free, and the row stores no prefix."""
    stem = [random.Random(1).randrange(128) for _ in range(160)]
    engine = make_selective_engine(family, tmp_path, 0.3)
    cache = engine.cache
    run_to_completion(engine, [make_request([*stem, 1, 2])])
    selected: list[dict[int, int]] = []
    finish = SelectiveLoader.finish
    monkeypatch.setattr(
        SelectiveLoader, "finish", lambda self: selected.append(self.num_selected_blocks) or finish(self)
    )
    monkeypatch.setattr("retain.kv.stores.selective.importance.heads_agree", lambda mass, ratio: True)
    for i in range(3):
        finish_repacking(engine)
        clear_pool(engine)
        r = make_request([*stem, 5, 6, i], 40)
        engine.add(r)
        engine.step()
        positions = row_of(engine, r).positions()
        for m, layer in enumerate(np.flatnonzero(cache.tables.window[row_of(engine, r).index] == NO_WINDOW)):
            heads = positions[layer]
            assert len(heads) == cache.spec.only_group.num_kv_heads and all(head == heads[0] for head in heads)
            assert selected[i][m] == (3 if i else 10) and len(heads[0]) == 16 * selected[i][m] + 3
            assert set(range(160, 163)) <= set(heads[0])
        for _ in iter_steps(engine):
            pass
        assert len(r.output_tokens) == 40 and r.stats.num_cached_tokens == 160
        assert cache.free_pages == cache.total_pages
        if i:
            assert cache.prefix_cache.find(Text(r.prompt), Demand(r.policy)).position == 0
    engine.cache.prefix_cache.close_offloader()


def test_selective_rows_beside_budgets_equal_prompts_and_preemption(tmp_path: Path) -> None:
    """Requests without a cached prefix get the tokens that they always get."""
    rng, prompts = random.Random(3), related_prompts(9)
    others = [[7, *t] for t in prompts]
    expected = run_to_completion(make_engine("llama", backend="cpu"), [make_request(t) for t in others])
    engine = make_selective_engine("llama", tmp_path, 0.4, num_pages=400, max_running_requests=8, max_batched_tokens=64)
    run_to_completion(engine, [make_request(t) for t in prompts])
    finish_repacking(engine)
    for round in range(3):
        clear_pool(engine)
        policies = ["full", "h2o:budget=30%", "full", "ring:window=40"]
        selective = [make_request(t, 20, policies[i % 4]) for i, t in enumerate(prompts)]
        equal = [make_request(max(prompts, key=len), 9) for _ in range(3)]
        plain = [make_request(t) for t in others] if not round else []
        engine.add(*equal, *selective, *plain)
        for step in iter_steps(engine):
            if step in (2, 5, 11) and engine.scheduler.running:
                engine.scheduler.preempt(rng.choice([*engine.scheduler.running]))
            if step == 7:
                engine.cancel(selective[3])
        assert [r.output_tokens for r in plain] == (expected if not round else [])
        finished = [*selective[:3], *selective[4:], *equal]
        assert all(len(r.output_tokens) == r.input.max_tokens for r in finished)
        assert not engine.cache.rows
        finish_repacking(engine)
    assert disk_store_of(engine).counts["read"] > 0
    engine.cache.prefix_cache.close_offloader()


def test_damaged_spans_are_found_and_computed_again(tmp_path: Path) -> None:
    prompts = related_prompts(7)
    engine = make_selective_engine("llama", tmp_path, 1.0)
    answers = [run_to_completion(engine, [make_request(t)])[0] for t in prompts]
    finish_repacking(engine)
    clear_pool(engine)
    run_to_completion(engine, [make_request(t) for t in prompts])
    finish_repacking(engine)
    engine.cache.prefix_cache.close_offloader()
    flip_a_bit(tmp_path)
    engine = make_selective_engine("llama", tmp_path, 1.0)
    for r in (requests := [make_request(t) for t in prompts]):
        engine.add(r)
    for _ in iter_steps(engine):
        pass
    assert [r.output_tokens for r in requests] == answers
    assert disk_store_of(engine).counts["damaged"] > 0
    engine.cache.prefix_cache.close_offloader()


def test_failed_reordering_is_logged_and_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("retain.kv.stores.selective.repack.reorder_span", fail)
    prompts = related_prompts(7)
    engine = make_selective_engine("llama", tmp_path, 1.0)
    answers = [run_to_completion(engine, [make_request(t)])[0] for t in prompts]
    finish_repacking(engine)
    clear_pool(engine)
    assert run_to_completion(engine, [make_request(t) for t in prompts]) == answers
    finish_repacking(engine)
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "tier disk: a span could not be reordered: RuntimeError: broken" in warning.getMessage()
    assert warning.exc_info and not any(s.is_reordered for s in disk_store_of(engine).span_index.spans)
    engine.cache.prefix_cache.close_offloader()


def test_spans_longer_than_the_prefix_fit_into_the_tables_and_the_pool(tmp_path: Path) -> None:
    """With a table as long as the context, and a pool as large as the request, every request ends."""
    rng = random.Random(2)
    stem = [rng.randrange(128) for _ in range(64)]
    prompts = [stem + [rng.randrange(128) for _ in range(85)] for _ in range(4)]
    engine = make_selective_engine("llama", tmp_path, 0.5, max_model_len=160)
    for t in prompts:
        run_to_completion(engine, [make_request(t, 5)])
    finish_repacking(engine)
    engine.cache.prefix_cache.close_offloader()
    for num_pages in (1000, 15 * 3 * 2):
        engine = make_selective_engine(
            "llama", tmp_path, 0.5, max_model_len=240, num_pages=num_pages, max_running_requests=4
        )
        for t in prompts:
            r = make_request(t, 240 - len(t))
            engine.add(r)
            for step in iter_steps(engine):
                assert step < 500
            assert len(r.output_tokens) == r.input.max_tokens and r.stats.num_preemptions <= 2
        finish_repacking(engine)
        engine.cache.prefix_cache.close_offloader()


@pytest.mark.parametrize(
    "evict", ["importance", *(pytest.param(evict, marks=pytest.mark.slow) for evict in ("lru", "lfu"))]
)
def test_the_block_cache_changes_no_token_and_saves_reads(evict: str, tmp_path: Path) -> None:
    prompts, answers, bytes_read = related_prompts(4), [], []
    for n, block_cache in enumerate((None, BlockCache(150_000, evict))):
        engine = make_selective_engine("llama", tmp_path / str(n), 0.4)
        for _ in range(2):
            for t in prompts:
                run_to_completion(engine, [make_request(t, 5)])
                finish_repacking(engine)  # so that both engines have the same spans
            clear_pool(engine)
        before = disk_store_of(engine).counts["read"]
        offloader_of(engine).block_cache = block_cache
        answers.append([])
        for t in [*prompts, *prompts]:
            answers[-1] += run_to_completion(engine, [make_request(t, 5)])
            finish_repacking(engine)
            clear_pool(engine)
        bytes_read.append(disk_store_of(engine).counts["read"] - before)
        engine.cache.prefix_cache.close_offloader()
    assert answers[0] == answers[1] and bytes_read[1] < bytes_read[0]
