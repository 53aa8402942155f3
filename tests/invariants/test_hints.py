"""Hints change what is cached and when it is loaded, and nothing else: no token, no other salt, no page lost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event, Timer

import pytest

from retain.engine.engine import Engine
from retain.engine.hints import Hint, carry_out
from retain.engine.request import Request
from retain.kv.stores.loader import LayerLoader
from retain.kv.stores.store import ReadJob
from retain.kv.text import Text, salt_digest
from tests.helpers.chats import answers, ask, options_of, talk
from tests.helpers.engines import make_engine, make_request
from tests.helpers.marks import slow
from tests.helpers.places import PLACES, Place
from tests.helpers.tiers import disk_spec, offloader_of

POLICIES = [
    ("llama", "full"),
    ("gemma3_text", "full"),
    ("llama", "h2o:budget=25%"),
    *slow(("llama", "sinks:budget=32"), ("qwen3_5_text", "full"), ("gemma3_text", "h2o:budget=25%")),
]


def text_of(request: Request) -> Text:
    return Text(request.tokens, request.input.salt)


def prefetch(engine: Engine, request: Request, seconds: float = 1.0) -> int:
    """Load the text of a request before it is sent."""
    policy = engine.cache.planner.effective_policy(request.policy)
    return engine.cache.hints.prefetch(policy, request.row_task(), seconds)


def hint_at_random(engine: Engine, rng: random.Random, request: Request) -> None:
    """Say something about a text: true or not, no answer depends on it."""
    hints = engine.cache.hints
    policy = request.policy
    text = text_of(request)
    said = [
        lambda: hints.retain(policy, text, rng.choice([0.0, 1000.0])),
        lambda: hints.release(policy, text, rng.choice([0, 20, len(text)])),
        lambda: hints.demote(policy, text),
        lambda: hints.expect(policy, text, "", rng.choice([None, "tool"]), rng.choice([None, 0.0, 5.0])),
        lambda: hints.end_turn(policy, text, rng.randint(0, len(text)), rng.randint(0, len(text)), "", ""),
        lambda: hints.reset(text.salt, rng.random() < 0.5),
        lambda: prefetch(engine, make_request([*request.tokens, 1, 2], 4, policy, salt=text.salt)),
        lambda: hints.discard_loads(),
    ]
    for say in rng.choices(said, k=3):
        say()
        engine.cache.check()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", POLICIES)
def test_no_hint_changes_a_token(tmp_path: Path, case: tuple[str, str], place: str, num_ranks: int) -> None:
    """Under a budget what was lost is computed again, and its rows then keep other tokens: nothing is compared."""
    family, policy = case
    options = options_of(family, policy, num_pages=4000, num_ranks=num_ranks)
    plain = answers(talk(policy, partial(ask, make_engine(prefix_cache="exact", **options))))
    for seed in range(3):
        at = Place(place, tmp_path / str(seed), **options)
        rng = random.Random(seed)

        def answer(text: list[int], policy: str, at: Place = at, rng: random.Random = rng) -> Request:
            request = ask(at.engine, text, policy)
            for _ in range(2):
                hint_at_random(at.engine, rng, request)
                if rng.random() < 0.5 and num_ranks == 1:  # other ranks do not know of a pause
                    at.pause()
            return request

        hinted = answers(talk(policy, answer))
        at.close()
        assert hinted == plain or "budget" in policy


# ---- loading ahead ---------------------------------------------------------------------------------------------------


def wait_for_loads(engine: Engine) -> None:
    for prefetched in engine.cache.hints.loading.values():
        assert prefetched.row.load
        prefetched.row.load.wait()


@pytest.mark.parametrize("place", [place for place in PLACES if place != "pool"])
@pytest.mark.parametrize("case", POLICIES)
def test_a_request_loads_nothing_that_was_loaded_ahead(tmp_path: Path, case: tuple[str, str], place: str) -> None:
    """It begins where it begins without. The tokens count as those of the tier."""
    family, policy = case
    found = []
    for is_ahead in (False, True):
        at = Place(place, tmp_path / str(is_ahead), **options_of(family, policy, num_pages=8000))
        text = [*ask(at.engine, range(100), policy).tokens, 5, 6, 7]
        at.pause()
        request = make_request(text, 4, policy, num_system_tokens=5)
        num_ahead = prefetch(at.engine, request) if is_ahead else 0
        wait_for_loads(at.engine)
        at.engine.cache.check()
        request = ask(at.engine, text, policy, 4)
        assert bool(request.stats.loads) != is_ahead and not at.engine.cache.hints.loading
        hits = at.engine.cache.prefix_cache.hits_by_source()
        found.append((request.stats.num_cached_tokens, request.output_tokens, hits))
        at.close()
    assert found[0] == found[1]
    assert found[1][0] >= 64 and num_ahead >= found[1][0]


def test_a_request_waits_for_what_is_loaded_of_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = Place("folder", tmp_path, family="llama")
    first = ask(at.engine, range(100), "full")
    at.pause()
    may_read = Event()
    read = LayerLoader._run_job

    def run_job(self: LayerLoader, job: ReadJob) -> bool:
        may_read.wait(10)
        return read(self, job)

    monkeypatch.setattr(LayerLoader, "_run_job", run_job)
    text = [*first.tokens, 5, 6, 7]
    assert prefetch(at.engine, make_request(text, 4)) == 112
    assert prefetch(at.engine, make_request(text, 4)) == 112  # once
    assert len(at.engine.cache.hints.loading) == 1
    Timer(0.1, may_read.set).start()
    request = ask(at.engine, text, "full", 4)
    assert request.stats.num_cached_tokens == 112 and not request.stats.loads
    at.close()


@pytest.mark.parametrize("is_done", [False, True])
def test_a_request_gets_the_pages_and_the_row_of_a_load(tmp_path: Path, is_done: bool) -> None:
    """The pool and the rows count as free, and are."""
    engine = make_engine(
        "llama", num_pages=4 * 2 * 12, max_running_requests=1, prefix_cache="exact", tiers=[disk_spec(tmp_path)]
    )
    first = ask(engine, range(64), "full", 4)
    engine.cache.prefix_cache.tree.evict(engine.cache.prefix_cache.tree.num_evictable_pages)
    offloader_of(engine).sync()
    assert prefetch(engine, make_request([*first.tokens, 5, 6, 7], 4)) == 64
    if is_done:
        wait_for_loads(engine)
    engine.cache.check()
    assert engine.cache.free_pages == engine.cache.total_pages and engine.cache.free_rows == 1
    other = ask(engine, [99] * 150, "full", 30)  # needs nearly all of the pool
    alone = ask(make_engine("llama"), [99] * 150, "full", 30)
    assert answers([other]) == answers([alone])
    assert not engine.cache.hints.loading
    engine.cache.prefix_cache.close_offloader()


def test_loads_have_half_of_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded takes the place of what is worth least, also where all that is asked for is more than the pool."""
    engine = make_engine("llama", num_pages=6 * 60, prefix_cache="exact", tiers=[disk_spec(tmp_path)])
    texts = [[i + 1] * 64 for i in range(20)]
    for text in texts:
        ask(engine, text, "full", 1)
    tree = engine.cache.prefix_cache.tree
    tree.evict(tree.num_evictable_pages)
    offloader_of(engine).sync()
    monkeypatch.setattr(LayerLoader, "is_done", False)
    found = [prefetch(engine, make_request([*text, 1], 1)) for text in texts]
    num_pages = sum(p.row.num_pages for p in engine.cache.hints.loading.values())
    assert found == [64] * 7 + [0] * 13 and num_pages == 7 * 24 <= tree.max_pinned_pages
    wait_for_loads(engine)
    for text in texts:
        engine.cache.hints.end_loads(Text([*text, 1]))
    assert [prefetch(engine, make_request([*text, 1], 1)) for text in texts] == [64] * 14 + [0] * 6
    engine.cache.prefix_cache.close_offloader()


@pytest.mark.parametrize("num_read", [0, 1, 2])
def test_a_kill_at_any_point_of_a_load_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_read: int
) -> None:
    at = Place("folder", tmp_path, family="llama")
    first = ask(at.engine, range(100), "full")
    at.pause()
    text = [*first.tokens, 5, 6, 7]
    may_read = Event()
    reads = count()
    read = LayerLoader._run_job

    def run_job(self: LayerLoader, job: ReadJob) -> bool:
        if next(reads) >= num_read:
            may_read.wait(10)
        return read(self, job)

    with monkeypatch.context() as patch:
        patch.setattr(LayerLoader, "_run_job", run_job)
        assert prefetch(at.engine, make_request(text, 4)) == 112
        at.kill()
        may_read.set()
        wait_for_loads(at.engines[0])
    request = ask(at.engine, text, "full", 4)
    assert request.stats.num_cached_tokens == 112
    at.close()


# ---- giving up -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_released_branch_leaves_what_others_share(tmp_path: Path, family: str) -> None:
    engine = make_engine(family, prefix_cache="exact", tiers=[disk_spec(tmp_path)])
    system = list(range(64))
    kept, done = (ask(engine, [*system, *[i] * 50], "full", 20) for i in (1, 2))
    again = ask(engine, [*kept.tokens, 3, 4, 5], "full", 4)
    before = engine.cache.pool_stats().pages_by_state
    assert engine.cache.hints.release(done.policy, text_of(done)) >= 50
    offloader_of(engine).sync()
    engine.cache.check()
    assert engine.cache.pool_stats().pages_by_state["free"] > before["free"]
    assert ask(engine, done.tokens, "full", 1).stats.num_cached_tokens <= 64
    engine.cache.prefix_cache.tree.clear()
    assert ask(engine, again.tokens, "full", 1).stats.num_cached_tokens == len(again.tokens) // 16 * 16
    engine.cache.prefix_cache.close_offloader()


def test_a_text_is_released_behind_a_position() -> None:
    engine = make_engine("llama", prefix_cache="exact")
    request = ask(engine, range(70), "full", 40)
    assert engine.cache.hints.release(request.policy, text_of(request), 72) == 109 - 72
    engine.cache.check()
    assert ask(engine, request.tokens, "full", 1).stats.num_cached_tokens == 72


def test_a_text_that_is_not_cached_gives_up_nothing_of_another() -> None:
    """Also where it was released before, and where another is the only one that goes on from what they share."""
    engine = make_engine("llama", prefix_cache="exact")
    other, done = (ask(engine, [*range(64), *[i] * 48], "full", 20) for i in (1, 2))
    hints = engine.cache.hints
    assert hints.release(done.policy, text_of(done)) == 67
    for text in (text_of(done), Text([*range(64), *[7] * 40]), Text(other.tokens[:90] + [9] * 20)):
        assert hints.release(done.policy, text) == hints.demote(done.policy, text) == 0
        assert hints.end_turn(done.policy, text, 60, 70, "", "") == 0
    assert all(node.expected is None for node in engine.cache.prefix_cache.tree.iter_nodes())
    assert ask(engine, other.tokens, "full", 1).stats.num_cached_tokens == len(other.tokens) - 1


@pytest.mark.parametrize("history_len", [80, 120])
def test_a_turn_that_goes_on_already_is_not_ended(history_len: int) -> None:
    engine = make_engine("llama", prefix_cache="exact")
    first = ask(engine, range(100), "full", 20)
    following = ask(engine, [*first.tokens, 1, 2, 3], "full", 4)
    before = engine.cache.pool_stats().pages_by_state
    assert engine.cache.hints.end_turn(first.policy, text_of(first), 100, history_len, "", "") == 0
    assert engine.cache.pool_stats().pages_by_state == before
    assert all(node.expected is None for node in engine.cache.prefix_cache.tree.iter_nodes())
    assert ask(engine, following.tokens, "full", 1).stats.num_cached_tokens == len(following.tokens) - 1


def test_a_prompt_stays_where_its_answers_are_released() -> None:
    """It is found again, and kept once."""
    engine = make_engine("llama", prefix_cache="exact")
    prompt = list(range(100))
    request = ask(engine, prompt, "full", 20)
    assert engine.cache.hints.release(request.policy, Text(prompt), 200) == 19
    engine.cache.check()
    tree = engine.cache.prefix_cache.tree
    assert sum(len(node.tokens) for node in tree.iter_nodes()) == 100
    assert ask(engine, prompt, "full", 1).stats.num_cached_tokens == 99
    assert sum(len(node.tokens) for node in tree.iter_nodes()) == 100


def test_what_was_loaded_ahead_can_be_pinned_and_released(tmp_path: Path) -> None:
    for action in ("retain", "release", "demote"):
        at = Place("folder", tmp_path / action, family="llama")
        first = ask(at.engine, range(100), "full")
        at.pause()
        text = text_of(first)
        assert carry_out(at.engine.cache, Hint("prefetch"), first, text) == 112
        assert carry_out(at.engine.cache, Hint(action, 1000.0), first, text) == 112
        assert not at.engine.cache.hints.loading
        at.close()


def test_what_is_demoted_is_in_a_tier_alone(tmp_path: Path) -> None:
    engine = make_engine("gemma3_text", prefix_cache="exact", tiers=["ram:capacity=100MB", disk_spec(tmp_path)])
    request = ask(engine, range(100), "full", 20)
    assert engine.cache.hints.demote(request.policy, text_of(request)) == len(request.tokens) - 1
    assert engine.cache.total_pages == engine.cache.pool.num_free
    offloader_of(engine).sync()
    following = ask(engine, [*request.tokens, 5, 6, 7], "full", 4)
    assert following.stats.num_cached_tokens >= 112 and following.stats.loads
    engine.cache.prefix_cache.close_offloader()


def test_what_no_tier_takes_is_not_demoted(tmp_path: Path) -> None:
    for tiers in ([], ["ram:capacity=1KiB"]):
        engine = make_engine("llama", prefix_cache="exact", tiers=tiers)
        request = ask(engine, range(100), "full", 20)
        assert engine.cache.hints.demote(request.policy, text_of(request)) == 0
        assert ask(engine, request.tokens, "full", 1).stats.num_cached_tokens == len(request.tokens) - 1
        if tiers:
            engine.cache.prefix_cache.close_offloader()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("salt", "whole_tenant"), [("a/", True), ("a/x", False)])
def test_a_reset_forgets_a_salt_everywhere(tmp_path: Path, place: str, salt: str, whole_tenant: bool) -> None:
    """In the pool, in tiers and after a restart, also what is being written; nothing of another salt."""
    at = Place(place, tmp_path, family="gemma3_text")
    salts = ["a/", "a/x", "b/x", "b/", ""]
    texts = {s: ask(at.engine, range(100), "full", 20, salt=s).tokens for s in salts}
    at.pause()
    for s in salts:
        ask(at.engine, range(100), "full", 4, salt=s)  # in the pool again
    at.engine.cache.hints.reset(salt, whole_tenant)
    at.engine.cache.check()
    at.sync()
    at.pause()
    for s in salts:
        is_meant = s == salt or (whole_tenant and s.startswith("a/"))
        request = ask(at.engine, texts[s], "full", 1, salt=s)
        assert (request.stats.num_cached_tokens == 0) == is_meant, s
    at.close()


def test_hints_of_a_salt_change_nothing_of_another(tmp_path: Path) -> None:
    at = Place("folder", tmp_path, family="gemma3_text", num_pages=8000)
    other = ask(at.engine, range(100), "full", 20, salt="b")
    mine = ask(at.engine, range(100), "full", 20, salt="a")
    rng = random.Random(0)
    (store,) = offloader_of(at.engine).stores
    store.sync()

    def look() -> tuple[object, ...]:
        tree = at.engine.cache.prefix_cache.tree
        digest = salt_digest("b")
        nodes = [node for node in tree.iter_nodes() if node.root.salt_digest == digest]
        held = [(node.block_hashes, node.all_pages.tolist(), node.expected, node in tree.pins) for node in nodes]
        spans = [span.keys for span in store.span_index.spans if span.salt_digest == digest]
        return sorted(held), spans

    before = look()
    assert all(before)
    for _ in range(50):
        hint_at_random(at.engine, rng, mine)
        store.sync()
        assert look() == before
    assert ask(at.engine, other.tokens, "full", 1, salt="b").stats.num_cached_tokens == len(other.tokens) - 1
    at.close()


# ---- returns ---------------------------------------------------------------------------------------------------------


def cached_after_pressure(engine: Engine, texts: Sequence[Request]) -> list[bool]:
    """Evict as many pages as one of these texts has. Returns which of them are cached."""
    tree = engine.cache.prefix_cache.tree
    tree.evict(tree.num_evictable_pages // len(texts))
    found = [engine.cache.find(r.policy, make_request(r.tokens).row_task()).position for r in texts]
    return [position > 90 for position in found]


def test_the_text_that_is_back_last_is_evicted_first() -> None:
    engine = make_engine("llama", prefix_cache="exact")
    now = [0.0]
    engine.cache.prefix_cache.set_clock(lambda: now[0])
    texts = []
    for i in range(4):
        texts.append(ask(engine, [i] * 100, "full", 2))
        now[0] += 1
    for request, seconds in zip(texts, (50.0, 5.0, 500.0, 20.0), strict=True):
        assert engine.cache.hints.expect(request.policy, text_of(request), "", None, seconds)
    engine.cache.check()
    assert cached_after_pressure(engine, texts) == [True, True, False, True]


@pytest.mark.parametrize("in_tier", [False, True])
def test_returns_are_learned_by_label(tmp_path: Path, in_tier: bool) -> None:
    """Also those of texts that were evicted meanwhile. What is overdue goes before what is due."""
    at = Place("folder" if in_tier else "pool", tmp_path, family="llama")
    now = [0.0]
    at.engine.cache.prefix_cache.set_clock(lambda: now[0])
    hints = at.engine.cache.hints
    for label, pause in (("quick", 3.0), ("slow", 300.0)):
        request = ask(at.engine, [1] * 40, "full", 8, salt=label)
        for turn in range(4):
            is_known = hints.expect(request.policy, text_of(request), "ann", label)
            assert not is_known, turn
            now[0] += pause
            at.pause()
            request = ask(at.engine, [*request.tokens, 1, 2, 3], "full", 8, salt=label)
        assert list(at.engine.cache.prefix_cache.returns.owners["ann"].pauses[label]) == [pause] * 4
    texts = []
    for i, label in enumerate(("slow", "quick", "slow")):
        texts.append(ask(at.engine, [i + 10] * 100, "full", 2))
        assert hints.expect(texts[-1].policy, text_of(texts[-1]), "ann", label)
        now[0] += 1
    tree = at.engine.cache.prefix_cache.tree
    values = sorted((leaf.expected.remaining(now[0]), leaf.tokens[0]) for leaf in tree.iter_nodes() if leaf.expected)
    assert list(dict.fromkeys(int(token) for _, token in values)) == [11, 10, 12]
    at.close()
