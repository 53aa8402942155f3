"""Only what is important is loaded: all of it is everything; less is a choice, and nobody else notices."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from retain.engine.engine import Engine
from retain.kernels.api import NO_WINDOW
from retain.kv.offload.selective.loader import SelectiveLoader
from retain.kv.offload.selective.row_cache import BlockCache
from tests.helpers.engines import iter_steps, make_engine, make_request, run_to_completion
from tests.invariants.test_prefix import texts
from tests.invariants.test_tiers import disk, flip, restart, store

FAMILIES = ["llama", "mpt", "gemma3_text"]


def important(family: str, path: Path, ratio: float, **options: object) -> Engine:
    tiers = [disk(path)]
    return make_engine(family, prefix_cache=f"important:ratio={ratio}", tiers=tiers, **{"backend": "cpu", **options})  # type: ignore


def pack(engine: Engine) -> None:
    """Wait until what was looked at is packed and written."""
    engine.cache.prefix_cache.offloader.sync()


def forget(engine: Engine) -> None:
    """What is in the pool goes; what sleeps stays."""
    engine.cache.prefix_cache.tree.clear()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_all_of_it_is_everything(family: str, backend: str, tmp_path: Path) -> None:
    """Unpacked, packed, in company, after a restart: with ratio=1 the tokens are those of a full cache."""
    made = texts(4)
    plain = run_to_completion(make_engine(family, backend=backend), [make_request(t) for t in made])
    for _ in range(2):
        engine = important(family, tmp_path, 1.0, backend=backend)
        for _ in range(2):
            forget(engine)
            assert [run_to_completion(engine, [make_request(t)])[0] for t in made] == plain
            pack(engine)
            forget(engine)
            assert run_to_completion(engine, [make_request(t) for t in made]) == plain
        assert family == "gemma3_text" or any(s.is_reordered for s in store(engine).span_index)
        restart(engine)


def test_a_packed_span_has_the_same_tokens_elsewhere(tmp_path: Path) -> None:
    """Keys and values of every layer and head are those of the pool, in another order: most looked at first."""
    text = list(range(100))
    engine = important("llama", tmp_path, 0.5)
    c = engine.cache
    r = make_request(text)
    run_to_completion(engine, [r])
    hit = c.prefix_cache.match_prefix(r.policy, text, 96, "")
    pages = hit.pages[..., :6]  # [L, G, n]
    k, v = (x.view(*pages.shape, 16, -1) for x in c.backend.read(c.kv, torch.from_numpy(pages).long().flatten()))
    pack(engine)
    forget(engine)
    run_to_completion(engine, [make_request(text)])
    pack(engine)
    ((span, _),) = {store(engine).find(key) for s in store(engine).span_index for key in s.keys[:1]}
    assert span.is_reordered
    sleep = c.prefix_cache.offloader
    reader = store(engine).open(span)
    notes = sleep.probe_config.parse_metadata(span, reader.read_metadata(), c.kv)
    for m in range(len(span.num_blocks)):
        assert (np.diff(notes.mass[m][notes.token_order[m]]) <= 0).all()
        at = c.pool.allocate(pages[0].size).reshape(-1, pages.shape[1])  # [n, G]
        from retain.kv.offload.loader import ReadJob

        sleep.write_pages(ReadJob(store(engine), span, m, 0, at, 0), reader.read_blocks(m, 0, 6))
        ours = [x.view(6, -1, 16, x.shape[-1]) for x in c.backend.read(c.kv, torch.from_numpy(at).long().flatten())]
        for mine, theirs in zip(ours, (k[m], v[m]), strict=True):  # [n, G, S, D], [G, n, S, D]
            flat = theirs.flatten(1, 2)[:, torch.from_numpy(notes.token_order[m].astype(np.int64))]
            assert (mine.transpose(0, 1).flatten(1, 2) == flat).all()
    reader.close()
    restart(engine)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_choice_is_born_evicted(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads have what was chosen and what came after; the rest is free; what they have is nobody else's beginning."""
    stem = [random.Random(1).randrange(128) for _ in range(160)]
    engine = important(family, tmp_path, 0.3)
    cache = engine.cache
    run_to_completion(engine, [make_request([*stem, 1, 2])])
    chosen: list[dict[int, int]] = []
    done = SelectiveLoader.finish
    monkeypatch.setattr(SelectiveLoader, "done", lambda self: chosen.append(self.chosen) or done(self))
    monkeypatch.setattr("retain.kv.offload.selective.importance.agree", lambda mass, ratio: True)
    for i in range(3):
        pack(engine)
        forget(engine)
        r = make_request([*stem, 5, 6, i], 40)
        engine.add(r)
        engine.step()
        kept = cache.positions(r.row)
        sees_all = np.flatnonzero(cache.window[r.row] == NO_WINDOW)
        for m, layer in enumerate(sees_all):
            assert len(kept[layer]) == cache.spec.kv_heads and all(k == kept[layer][0] for k in kept[layer])
            assert chosen[i][m] == (3 if i else 10) and len(kept[layer][0]) == 16 * chosen[i][m] + 3
            assert set(range(160, 163)) <= set(kept[layer][0])
        for _ in iter_steps(engine):
            pass
        assert len(r.output_tokens) == 40 and r.stats.num_cached_tokens == 160
        assert cache.free_pages == cache.total_pages
        if i:
            hit = cache.prefix_cache.match_prefix(r.policy, r.prompt, 160, "")
            assert hit is None or hit.length == 0  # it leaves nothing
    restart(engine)


def test_company_budgets_followers_and_preemption(tmp_path: Path) -> None:
    """Rows that were born evicted beside others, who get what they always get."""
    rng, made = random.Random(3), texts(9)
    others = [[7, *t] for t in made]
    plain = run_to_completion(make_engine("llama", backend="cpu"), [make_request(t) for t in others])
    engine = important("llama", tmp_path, 0.4, pages=400, max_running_requests=8, max_batched_tokens=64)
    run_to_completion(engine, [make_request(t) for t in made])
    pack(engine)
    for round in range(3):
        forget(engine)
        policies = ["full", "h2o:budget=30%", "full", "ring:window=40"]
        mine = [make_request(t, 20, policies[i % 4]) for i, t in enumerate(made)]
        twins = [make_request(max(made, key=len), 9) for _ in range(3)]
        theirs = [make_request(t) for t in others] if not round else []
        engine.add(*twins, *mine, *theirs)
        for step in iter_steps(engine):
            if step in (2, 5, 11) and engine.scheduler.running:
                engine.scheduler.preempt(rng.choice(engine.scheduler.running))
            if step == 7:
                engine.cancel(mine[3])
        assert [r.output_tokens for r in theirs] == (plain if not round else [])
        assert all(len(r.output_tokens) == r.max_tokens for r in [*mine[:3], *mine[4:], *twins])
        assert not engine.cache.prefix_cache.sparse_rows and not engine.cache.prefix_cache.loads
        pack(engine)
    assert sum(store(engine).counts["read"] for _ in range(1)) > 0
    restart(engine)


def test_damage_is_found_and_computed_again(tmp_path: Path) -> None:
    made = texts(7)
    engine = important("llama", tmp_path, 1.0)
    answers = [run_to_completion(engine, [make_request(t)])[0] for t in made]
    pack(engine)
    forget(engine)
    run_to_completion(engine, [make_request(t) for t in made])
    pack(engine)
    restart(engine)
    flip(tmp_path)
    engine = important("llama", tmp_path, 1.0)
    for r in (requests := [make_request(t) for t in made]):
        engine.add(r)
    for _ in iter_steps(engine):
        pass
    assert [r.output_tokens for r in requests] == answers
    assert store(engine).counts["damaged"] > 0
    restart(engine)


def test_spans_that_are_longer_than_what_is_wanted_of_them(tmp_path: Path) -> None:
    """A table that is as long as the context, a pool that is as large as the request: it fits, and ends."""
    rng = random.Random(2)
    stem = [rng.randrange(128) for _ in range(64)]
    texts = [stem + [rng.randrange(128) for _ in range(85)] for _ in range(4)]
    engine = important("llama", tmp_path, 0.5, context=160)
    for t in texts:
        run_to_completion(engine, [make_request(t, 5)])
    pack(engine)
    restart(engine)
    for pages in (1000, 15 * 3 * 2):
        engine = important("llama", tmp_path, 0.5, context=240, pages=pages, max_running_requests=4)
        for t in texts:
            r = make_request(t, 240 - len(t))
            engine.add(r)
            for step in iter_steps(engine):
                assert step < 500
            assert len(r.output_tokens) == r.max_tokens and r.stats.num_preemptions <= 2
        pack(engine)
        restart(engine)


@pytest.mark.parametrize("by", ["lru", "lfu", "worth"])
def test_rows_that_stay_in_memory_change_nothing(by: str, tmp_path: Path) -> None:
    """The same choices, the same tokens; less is read."""
    made, answers, read = texts(4), [], []
    for n, hot in enumerate((None, BlockCache(150_000, by))):
        engine = important("llama", tmp_path / str(n), 0.4)
        for _ in range(2):
            for t in made:
                run_to_completion(engine, [make_request(t)])
                pack(engine)  # spans are the same in both
            forget(engine)
        before = store(engine).counts["read"]
        engine.cache.prefix_cache.offloader.block_cache = hot
        answers.append([])
        for t in [*made, *made]:
            answers[-1] += run_to_completion(engine, [make_request(t)])
            pack(engine)
            forget(engine)
        read.append(store(engine).counts["read"] - before)
        restart(engine)
    assert answers[0] == answers[1] and read[1] < read[0]
