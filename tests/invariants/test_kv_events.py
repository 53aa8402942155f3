"""Whoever follows KV events knows what the prefix cache holds: no more, no less, whatever was dropped on the way."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.engine.engine import Engine
from retain.kernels.slots.pool_dtypes import INT8
from retain.kv.memory.pool import PagePool
from retain.kv.prefix.cache import PrefixCache
from retain.kv.prefix.radix_tree import RadixTree
from retain.kv.text import Text
from retain.server.observers.kv_events.queue import KVEventQueue
from retain.server.observers.kv_events.wire import Event, to_block_number
from tests.helpers.engines import make_engine, make_request, run_to_completion
from tests.helpers.kv_events import Consumer, Prefix, digest_salt, tree_content
from tests.helpers.related_requests import related_requests, run_disturbed

S = 4  # page size of the trees
SALTS = {b"a": "", b"b": "salt of b"}  # by root hash

texts = st.tuples(st.sampled_from(sorted(SALTS)), st.lists(st.integers(0, 1), min_size=1, max_size=30))
operations = st.lists(
    st.one_of(texts, st.integers(1, 12), st.sampled_from(["take", "restate", "clear"])), min_size=1, max_size=60
)


@settings(max_examples=200)
@given(operations, st.sampled_from([0, 1, 3, 100]))
def test_events_rebuild_the_tree(schedule: list[tuple[bytes, list[int]] | int | str], max_pending: int) -> None:
    """Random texts are inserted and pages evicted, while the publisher takes events now and then, or loses them."""
    pool, consumer = PagePool(60), Consumer(S)
    tree, queue = RadixTree(pool, S), KVEventQueue(lambda: None, max_pending)
    tree.observer, pool.evict_callback = queue, tree.evict
    for step in schedule:
        if isinstance(step, tuple):
            root, text = step
            if not pool.ensure_free(n := -(-len(text) // S)):
                continue
            pages = pool.allocate(n)
            stored = tree.insert(root, Text(text), len(text), pages[None]).stored
            pool.free(pages)
            if stored:
                queue.on_stored(stored, SALTS[root])
        elif isinstance(step, int):
            tree.evict(step)
        elif step == "clear":
            tree.clear()
        elif step == "restate":
            queue.restate()
        else:
            consumer.apply(queue.take().events)
            assert consumer.content == tree_content(tree, SALTS)
    consumer.apply(queue.take().events)
    assert consumer.content == tree_content(tree, SALTS)
    assert not list(queue.take().events)


def test_a_block_number_is_the_low_half_of_the_key_and_never_0() -> None:
    assert to_block_number(bytes(range(16))) == 0x08090A0B0C0D0E0F
    assert to_block_number(b"\1" * 8 + bytes(8)) == 1


# ---- engines ---------------------------------------------------------------------------------------------------------


class FollowedEngine:
    """An engine whose events a consumer follows."""

    def __init__(self, family: str = "llama", **options: object):
        self.engine: Engine = make_engine(family, backend="cpu", prefix_cache="exact", **options)  # type: ignore[arg-type]
        prefix = self.engine.cache.prefix_cache
        assert isinstance(prefix, PrefixCache)
        self.prefix, self.queue = prefix, KVEventQueue(lambda: None)
        prefix.tree.observer = self.queue
        self.consumer = Consumer(self.engine.cache.planner.block_size)
        self.events: list[Event] = []
        self.follow()  # the beginning of all events

    def follow(self) -> set[Prefix]:
        """Return what the consumer knows now."""
        events = list(self.queue.take().events)
        self.events += events
        self.consumer.apply(events)
        return self.consumer.content

    def roots(self, *salts: str) -> dict[bytes, str]:
        """Return the roots of texts under the model's own windows."""
        windows = self.prefix.planner.model_windows
        return {Text(salt=salt).first_link(windows): salt for salt in salts}


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("num_pages", [1000, 160])
def test_events_follow_an_engine(family: str, num_pages: int) -> None:
    """Requests of many policies evict, are preempted and cancelled."""
    followed = FollowedEngine(family, num_pages=num_pages, max_running_requests=8, max_batched_tokens=64)
    rng = random.Random(5)
    for seed in range(3):
        run_disturbed(followed.engine, related_requests(family, seed), rng)
        assert followed.follow() == tree_content(followed.prefix.tree, followed.roots(""))
    assert followed.consumer.content and any(e["type"] == "BlockRemoved" for e in followed.events) == (num_pages < 1000)


def test_rows_with_windows_of_their_own_publish_nothing() -> None:
    policy = "ring:window=24"
    followed, prompt = FollowedEngine(), [7] * 100
    run_to_completion(followed.engine, [make_request(prompt, policy=policy)])
    assert not followed.follow()
    run_to_completion(followed.engine, [make_request(prompt)])
    known = followed.follow()
    assert Prefix("", tuple(prompt[:96])) in known
    run_to_completion(followed.engine, [make_request([8] * 100, policy=policy)])
    assert followed.follow() == known


@pytest.mark.parametrize("policy", ["h2o:budget=32", "sinks:budget=32"])
def test_rows_with_a_budget_publish_their_prompt_alone(policy: str) -> None:
    """Its pages were left before the budget began: every request may begin with them."""
    followed, prompt = FollowedEngine(), [7] * 100
    run_to_completion(followed.engine, [make_request(prompt, 40, policy=policy)])
    assert followed.follow() == {Prefix("", tuple(prompt[:n])) for n in range(16, 97, 16)}


def test_a_ring_no_shorter_than_the_models_windows_is_no_ring() -> None:
    """Its pages are those that every request may begin with."""
    followed = FollowedEngine("mistral")
    planner, ring = followed.prefix.planner, make_request([7] * 100, policy="ring:window=24")
    assert np.array_equal(planner.windows(ring.policy), planner.model_windows)
    run_to_completion(followed.engine, [ring])
    assert followed.follow() == tree_content(followed.prefix.tree, followed.roots("")) != set()


def test_a_salt_is_named_at_the_beginning_of_a_text_only() -> None:
    followed, salt = FollowedEngine(), "salt of a key"
    for salted in (salt, ""):
        run_to_completion(followed.engine, [make_request([7] * 100, salt=salted)])
        run_to_completion(followed.engine, [make_request([7] * 160, salt=salted)])
    assert followed.follow() == tree_content(followed.prefix.tree, followed.roots(salt, ""))
    beginnings = [e for e in followed.events if e["type"] == "BlockStored" and e["parent_block_hash"] is None]
    assert [e.get("extra_keys", [None])[0] for e in beginnings] == [[digest_salt(salt)], None]
    assert salt not in str(followed.events) and len({p.salt for p in followed.consumer.content}) == 2


def test_a_page_of_8_bits_is_a_longer_block() -> None:
    followed = FollowedEngine(page_size=32, dtype=torch.bfloat16, kv_dtype=INT8)
    run_to_completion(followed.engine, [make_request([7] * 100)])
    assert {len(p.tokens) for p in followed.follow()} == {32, 64, 96}
