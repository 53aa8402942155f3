"""Law 4 for layers that slide: a text goes on from a snapshot wherever there is one, and that changes no token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retain.engine import drafters
from retain.engine.engine import Engine
from retain.engine.request import FinishReason, Request
from retain.kv.checkpoints.windows_and_states import WindowsAndStates
from retain.kv.memory.pool import PagePool
from retain.kv.prefix.cache import PrefixCache
from retain.kv.prefix.checkpoint_ladder import NUM_DENSE, CheckpointLadder
from retain.kv.prefix.radix_tree import RadixTree
from retain.kv.stores.checkpoint_spans import PageRun
from retain.kv.text import Text
from tests.helpers.engines import iter_steps, make_engine, make_request, run_to_completion
from tests.helpers.marks import slow
from tests.helpers.state_family import state_family as state_family
from tests.helpers.unlike_family import UNLIKE
from tests.helpers.unlike_family import unlike_family as unlike_family

S = 16  # slots of a page
FAMILIES = ["gemma3_text", "state", *slow("mistral", UNLIKE, "state_parts", "state_mamba2", "state_pages")]
pytestmark = pytest.mark.usefixtures("unlike_family", "state_family")


def snapshot_engine(family: str, **options) -> Engine:
    """Build an engine that keeps a snapshot each 64 tokens."""
    if isinstance(drafter := options.get("drafter"), str):
        options = options | {"drafter": drafters.parse(drafter)}
    return make_engine(family, **{"backend": "cpu", "prefix_cache": "exact", "snapshot_interval": 64} | options)


def tree_of(engine: Engine) -> RadixTree:
    assert isinstance(engine.cache.prefix_cache, PrefixCache)
    return engine.cache.prefix_cache.tree


def random_tokens(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(128) for _ in range(n)]


def run_equal(engine: Engine, plain: Engine, prompt: list[int], max_tokens: int = 4) -> tuple[list[int], int]:
    """Run a prompt, whose answer must be that of an engine without prefixes. Returns it, and the cached tokens."""
    request = make_request(prompt, max_tokens)
    (answer,) = run_to_completion(engine, [request])
    assert [answer] == run_to_completion(plain, [make_request(prompt, max_tokens)])
    return answer, request.stats.num_cached_tokens


# ---- where texts go on -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, *slow({"max_batched_tokens": 72}, {"drafter": "ngram:k=4"})], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_computes_only_new_tokens_and_holds_one_window_beside_its_text(
    family: str, options: dict[str, Any]
) -> None:
    rng = random.Random(2)
    engine = snapshot_engine(family, snapshot_interval=0, **options)
    plain = make_engine(family, backend="cpu")
    tree = tree_of(engine)
    text = random_tokens(rng, 50)
    num_before = 0
    for _ in range(12):
        answer, num_cached = run_equal(engine, plain, text, 14)
        assert num_cached >= num_before
        num_before = len(text) + len(answer) - 1
        snapshots = [node for node in tree.iter_nodes() if node.checkpoints]
        assert len(snapshots) <= 3  # where the last turn began, the end of its prompt, and its end
        held = len(np.unique(tree.all_pages))
        full = engine.cache.planner.effective_policy(make_request(text).policy)
        copied = sum(g.group.num_kv_heads * g.group.windows.count(None) for g in engine.cache.planner.groups)
        # Where the last turn began is inside a page, of which the turn has a copy.
        beside = windows_of(engine, 20 + 2 * S) + copied
        assert held <= engine.cache.planner.pages_held(full, num_before, num_before) + beside
        text = text + answer + random_tokens(rng, 6)


def windows_of(engine: Engine, num_tokens: int) -> int:
    """Return the pages of so many tokens in all sliding layers."""
    groups = engine.cache.planner.groups
    return sum(
        g.group.num_kv_heads * sum(w is not None for w in g.group.windows) * -(-num_tokens // g.page_size)
        for g in groups
    )


@pytest.mark.parametrize("again", ["the same prompt", "another last message"])
def test_the_last_turn_can_be_repeated(again: str) -> None:
    rng = random.Random(3)
    engine = snapshot_engine("gemma3_text", snapshot_interval=0)
    plain = make_engine("gemma3_text", backend="cpu")
    first = random_tokens(rng, 70)
    answer, _ = run_equal(engine, plain, first)
    second = first + answer + random_tokens(rng, 40)
    run_equal(engine, plain, second)
    if again == "the same prompt":
        assert run_equal(engine, plain, second)[1] >= len(second) - S
    else:
        edited = first + answer + random_tokens(rng, 40)
        assert run_equal(engine, plain, edited)[1] >= len(first) + len(answer) - S


@pytest.mark.parametrize("family", ["gemma3_text", *slow("mistral")])
@pytest.mark.parametrize("case", ["keep=prompt", "dropped tokens"])
def test_a_snapshot_behind_what_was_computed_holds_no_later_token(family: str, case: str) -> None:
    """Answers that are not kept, and those whose last tokens a stop string drops, have written over dead tokens."""
    plain = make_engine(family, backend="cpu")
    for seed in range(6):
        rng = random.Random(seed)
        engine = snapshot_engine(family, prefix_cache="exact:keep=prompt" if case == "keep=prompt" else "exact")
        first = make_request(random_tokens(rng, rng.randint(5, 60)), rng.randint(8, 20))
        engine.add(first)
        while first.finish_reason is None:
            engine.step()
            if case != "keep=prompt" and first.num_output_tokens == 7:
                engine.finish(first, FinishReason.STOP, rng.randint(3, 6))
        for node in tree_of(engine).iter_nodes():
            for found in node.checkpoints.values():
                assert isinstance(found, WindowsAndStates)
                end = node.start_block * S + len(node.tokens)
                whole = found.before(end // S * S, [S])
                pos = engine.cache.kv.pos[engine.cache.kv.to_index(whole.page_list)]
                assert (pos < end).all()
        text = first.prompt if case == "keep=prompt" else first.tokens
        run_equal(engine, plain, [*text, *random_tokens(rng, rng.randint(1, 30))], 12)


def test_an_error_while_a_snapshot_is_stored_loses_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = snapshot_engine("gemma3_text", tiers=[f"disk:path={tmp_path},capacity=1GB"])

    def fail(*_) -> None:
        raise OSError("the tier failed")

    assert isinstance(engine.cache.prefix_cache, PrefixCache)
    monkeypatch.setattr(engine.cache.prefix_cache.offloader, "on_computed", fail)
    request = make_request(list(range(40)), 4)
    engine.add(request)
    with pytest.raises(OSError, match="the tier failed"):
        while engine.has_unfinished_requests:
            engine.step()
    with pytest.raises(OSError, match="the tier failed"):
        engine.scheduler.remove(request)
    engine.cache.check()


def test_a_request_that_was_preempted_leaves_the_snapshots_of_its_turn() -> None:
    rng = random.Random(0)
    engine = snapshot_engine("gemma3_text", snapshot_interval=0)
    first = make_request(random_tokens(rng, 70), 4)
    run_to_completion(engine, [first])
    prompt = first.tokens + random_tokens(rng, 40)
    request = make_request(prompt, 30)
    engine.add(request)
    while engine.has_unfinished_requests:
        engine.step()
        if request.num_output_tokens == 12 and not request.stats.num_preemptions:
            engine.scheduler.preempt(request)
    again = make_request(prompt, 4)
    run_to_completion(engine, [again])
    assert again.stats.num_cached_tokens >= len(prompt) - S


@pytest.mark.parametrize("keeps", ["a pin", "a branch"])
def test_a_pin_and_a_place_where_texts_parted_keep_their_snapshot(keeps: str) -> None:
    """Also when only one of the texts is left, and grows."""
    rng = random.Random(0)
    engine = snapshot_engine("gemma3_text", snapshot_interval=0)
    tree = tree_of(engine)
    system = random_tokens(rng, 96)

    def run(prompt: list[int]) -> Request:
        request = make_request(prompt, 4)
        engine.add(request)
        for _ in iter_steps(engine):
            pass
        return request

    chat = run(system)
    if keeps == "a pin":
        assert engine.cache.hints.retain(chat.policy, Text(system), 1000) == 96
    else:
        others = [run(system + random_tokens(rng, 40)) for _ in range(2)]
        assert others
    chat = run(system + random_tokens(rng, 40))
    for node in [n for n in tree.iter_nodes() if not n.children and n.start_block >= 6]:
        own = {*chat.tokens[node.start_block * S :]} >= {*node.tokens.tolist()} and len(node.tokens) < S
        if keeps == "a branch" and not own and not np.array_equal(node.tokens[:16], chat.tokens[96:112]):
            tree._evict_pages(node, 0)
    for _ in range(2):
        chat = run(chat.tokens + random_tokens(rng, 20))
    assert run(system + random_tokens(rng, 40)).stats.num_cached_tokens == 96


def test_a_text_that_is_computed_in_one_go_keeps_the_rungs_of_the_ladder_only() -> None:
    engine = snapshot_engine("gemma3_text", snapshot_interval=S)
    request = make_request(random_tokens(random.Random(0), 480), 4)
    run_to_completion(engine, [request])
    ladder = tree_of(engine).ladder
    rungs = [p for p in range(S, len(request.tokens), S) if ladder.keeps(p, len(request.tokens))]
    held = [node for node in tree_of(engine).iter_nodes() if node.checkpoints]
    assert len(held) == len(rungs) + 1  # and the end


# ---- what stays ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 7), st.integers(0, 10**4), st.integers(0, 10**4), st.integers(0, 200))
def test_what_left_the_ladder_never_returns_to_it(interval: int, position: int, length: int, more: int) -> None:
    ladder = CheckpointLadder(interval)
    length = max(length, position)
    if ladder.keeps(position, length + more):
        assert ladder.keeps(position, length) and position % interval == 0


@given(st.integers(1, 50), st.integers(0, 10**4))
def test_a_ladder_is_dense_at_the_end_and_grows_with_the_logarithm(interval: int, length: int) -> None:
    ladder = CheckpointLadder(interval)
    rungs = [p for p in ladder.crossed(0, length) if ladder.keeps(p, length)]
    near = [p for p in range(interval, length + 1, interval) if (length - p) // interval < NUM_DENSE]
    assert [p for p in rungs if (length - p) // interval < NUM_DENSE] == near
    assert len(rungs) <= NUM_DENSE * (2 + max(length // interval, 1).bit_length())


@given(st.integers(1, 5000), st.integers(1, 800), st.integers(0, 10**5), st.integers(0, 10**4))
def test_rungs_before_the_first_interval_are_whole_blocks_and_never_return(
    num_blocks: int, block_size: int, length: int, more: int
) -> None:
    ladder = CheckpointLadder(num_blocks * block_size, block_size)
    rungs = ladder.first_rungs
    assert all(rung % block_size == 0 and 256 <= rung < ladder.interval for rung in rungs)
    assert len(rungs) <= ladder.interval.bit_length()
    for rung in rungs:
        assert rung in ladder.crossed(rung - 1, rung) and ladder.has(rung)
        assert ladder.keeps(rung, length) or not ladder.keeps(rung, length + more)


@pytest.mark.parametrize("family", ["gemma3_text", *slow("state")])
def test_a_text_shorter_than_an_interval_is_left_at_small_rungs(family: str) -> None:
    rng = random.Random(3)
    text = random_tokens(rng, 1500)
    engine = snapshot_engine(family, snapshot_interval=2048, max_model_len=2048)
    run_to_completion(engine, [make_request(text, 2)])
    for cut, rung in {300: 256, 500: 256, 900: 512, 1400: 1024}.items():
        request = make_request(text[:cut] + random_tokens(rng, 5), 2)
        run_to_completion(engine, [request])
        assert request.stats.num_cached_tokens >= rung


KEY = b"one"


class OnePage:
    """A checkpoint of one page."""

    kind = "one"
    needs_pages = True
    ladder_reach = 0

    def __init__(self, pool: PagePool, position: int, num_pages: int = 1):
        self.page_list = pool.allocate(num_pages)
        self.position = self.resumes_from = position

    def runs(self) -> list[PageRun]:
        return [PageRun(0, False, self.page_list)]


def insert_text(tree: RadixTree, link: bytes, tokens: list[int], pages: Any, found: OnePage | None, begun_at: int = 0):
    checkpoints = {KEY: found} if found else None
    required = frozenset([KEY] if found else ())
    tree.insert(link, Text(tokens), len(tokens), pages, checkpoints, begun_at, required)


def test_snapshots_that_save_little_go_before_texts_and_those_that_save_much_after_them() -> None:
    """By tokens per page: neither kind starves the other."""
    pool = PagePool(200)
    tree = RadixTree(pool, 4)
    text = list(range(40))

    def insert(length: int, snapshot_pages: int) -> None:
        pages = pool.allocate(-(-length // 4))[None]
        insert_text(tree, b"root", text[:length], pages, OnePage(pool, length, snapshot_pages))
        pool.free(pages.ravel())

    insert(4, 20)  # 4 tokens for 20 pages
    insert(36, 1)  # 32 tokens for one page
    insert(40, 1)  # a leaf: 4 tokens for two pages
    held = [node.start_block * 4 + len(node.tokens) for node in tree.iter_nodes() if node.checkpoints]
    assert sorted(held) == [4, 36, 40]
    tree.evict(1)
    assert [n.start_block * 4 + len(n.tokens) for n in tree.iter_nodes() if n.checkpoints] != held
    left = sorted(n.start_block * 4 + len(n.tokens) for n in tree.iter_nodes() if n.checkpoints)
    assert left == [36, 40]
    tree.evict(1)
    assert [n.start_block * 4 + len(n.tokens) for n in tree.iter_nodes() if n.checkpoints] == [36]


def test_a_text_drops_the_snapshots_that_it_left_behind_but_for_branches_and_the_ladder() -> None:
    pool = PagePool(200)
    tree = RadixTree(pool, 4, CheckpointLadder(8))

    def insert(text: list[int], begun_at: int) -> None:
        pages = pool.allocate(-(-len(text) // 4))[None]
        insert_text(tree, b"root", text, pages, OnePage(pool, len(text)), begun_at)
        pool.free(pages.ravel())

    def held() -> list[int]:
        return sorted(n.start_block * 4 + len(n.tokens) for n in tree.iter_nodes() if n.checkpoints)

    text = list(range(30))
    insert(text[:4], 0)
    insert(text[:8], 4)
    insert(text[:14], 8)
    assert held() == [8, 14]
    insert([*text[:8], 99, 99, 99, 99], 8)  # another text leaves at 8
    insert(text[:22], 14)
    assert held() == [8, 12, 14, 22]
    insert(text[:30], 22)
    assert held() == [8, 12, 22, 30]
    pool.check(tree.all_pages)


def test_pages_of_two_snapshots_go_before_texts_in_use() -> None:
    """A leaf that a row uses frees nothing."""
    pool = PagePool(200)
    tree = RadixTree(pool, 4)

    def insert(root: bytes, text: list[int], snapshot: OnePage | None) -> np.ndarray:
        pages = pool.allocate(len(text) // 4)[None]
        insert_text(tree, root, text, pages, snapshot)
        return pages.ravel()

    insert(b"a", list(range(8)), None)  # a row holds its pages, too
    first = OnePage(pool, 8, 6)
    second = OnePage(pool, 24, 0)
    second.page_list = first.page_list
    pool.incref(first.page_list)
    text = list(range(100, 124))
    pool.free(insert(b"b", text[:8], first))
    insert(b"b", text, second)
    tree.evict(1)
    assert b"a" in tree.roots
