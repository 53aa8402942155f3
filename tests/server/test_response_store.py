"""Laws of the response store: bytes add up, the bound holds, keys are apart, conversations stay whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from random import Random

import pytest

from retain.server.openai.responses.store import TURN_OVERHEAD, ResponseStore, StoredItem, StoredTurn
from tests.helpers.counted_work import assert_linear


def build_turn(size: int, previous: StoredTurn | None = None, item_ids: Sequence[str] = ()) -> StoredTurn:
    items = [StoredItem(item_id, b"i" * len(item_id), 1) for item_id in item_ids]
    return StoredTurn(b"r" * size, items, len(items), previous)


def find_reachable_turns(store: ResponseStore) -> set[tuple[str, StoredTurn]]:
    """Return the turns that an id leads to, with their keys."""
    turns_by_key = store._turns_by_key.items()
    return {(key, turn) for key, by_id in turns_by_key for end in by_id.values() for turn in end.iter_backwards()}


@pytest.mark.parametrize("seed", range(5))
def test_bytes_add_up_and_stay_below_the_bound(seed: int) -> None:
    random, store, ids = Random(seed), ResponseStore(20_000), []
    for step in range(400):
        key = random.choice(["ann", "bob", "carol"])
        action = random.random()
        if action < 0.6:
            previous = store.get(key, random.choice(ids)) if ids and random.random() < 0.7 else None
            if previous and random.random() < 0.2:
                store.delete(key, next(i for i, t in store._turns_by_key[key].items() if t is previous))
            ids.append(f"resp_{step}")
            store.put(key, ids[-1], build_turn(random.randrange(3000), previous, [f"msg_{step}", f"fc_{step}"]))
        elif ids:
            store.delete(key, random.choice(ids))
        reachable = find_reachable_turns(store)
        assert store.num_bytes == sum(turn.num_bytes for _, turn in reachable) <= store.max_bytes
        assert store._items == {(key, item.id): item for key, turn in reachable for item in turn.items}
    for key in ("ann", "bob", "carol"):
        for response_id in ids:
            store.delete(key, response_id)
    assert not store.num_bytes and not store._turns_by_key and not store.num_bytes_by_key and not store._items


def test_the_newest_turn_with_an_item_is_found() -> None:
    """Clients send items back with their ids, so several turns have them."""
    store = ResponseStore(10_000)
    first, second = build_turn(10, None, ["msg_1"]), build_turn(10, None, ["msg_1"])
    store.put("ann", "first", first)
    store.put("ann", "second", second)
    assert store.find_item("ann", "msg_1") is second.items[0] and store.find_item("bob", "msg_1") is None
    store.delete("ann", "first")
    assert store.find_item("ann", "msg_1") is second.items[0]


def test_least_recently_used_is_evicted() -> None:
    store = ResponseStore(3 * (TURN_OVERHEAD + 100))
    for name in "abc":
        store.put("ann", name, build_turn(100))
    store.get("ann", "a")
    store.put("ann", "d", build_turn(100))
    assert [name for name in "abcd" if store.get("ann", name)] == ["a", "c", "d"]


def test_a_key_below_its_share_loses_nothing_to_another() -> None:
    store = ResponseStore(10 * (TURN_OVERHEAD + 100))
    for i in range(5):
        store.put("ann", f"a{i}", build_turn(100))
    for i in range(50):
        store.put("bob", f"b{i}", build_turn(100))
    assert all(store.get("ann", f"a{i}") for i in range(5)) and not store.get("bob", "b0")


def test_another_key_finds_and_deletes_nothing() -> None:
    store = ResponseStore(10_000)
    store.put("ann", "a", build_turn(100))
    assert store.get("bob", "a") is None and not store.delete("bob", "a") and store.get("ann", "a")


def test_a_turn_keeps_the_turns_that_it_continues() -> None:
    """Also where they were deleted, or evicted while the turn was generated."""
    store = ResponseStore(10_000)
    first = build_turn(1000)
    store.put("ann", "first", first)
    store.delete("ann", "first")
    assert store.num_bytes == 0
    second = build_turn(1000, first)
    store.put("ann", "second", second)
    assert not store.get("ann", "first") and list(second.iter_backwards()) == [second, first]
    assert store.num_bytes == 2 * (1000 + TURN_OVERHEAD)


def test_a_conversation_costs_its_bytes_once() -> None:
    store, turn = ResponseStore(100_000), None
    for i in range(20):
        turn = build_turn(1000, turn)
        store.put("ann", str(i), turn)
    assert store.num_bytes == 20 * (1000 + TURN_OVERHEAD) and all(store.get("ann", str(i)) for i in range(20))


def test_a_conversation_larger_than_the_store_evicts_nothing() -> None:
    store = ResponseStore(2000)
    store.put("ann", "small", build_turn(100))
    store.put("ann", "large", build_turn(3000))
    assert store.get("ann", "small") and not store.get("ann", "large")


def test_a_long_chain_is_stored_and_forgotten_in_steps_of_its_length() -> None:
    """A turn refers to the one before it, and holds nothing else of it."""

    def prepare(num_turns: int) -> Callable[[], object]:
        def store_and_forget() -> None:
            store = ResponseStore(num_turns * (TURN_OVERHEAD + 100))
            turn = None
            for i in range(num_turns):
                turn = build_turn(100, turn)
                store.put("ann", str(i), turn)
                store.get("ann", "0")
            for i in range(num_turns):
                assert store.delete("ann", str(i))
            assert not store.num_bytes

        return store_and_forget

    assert_linear(prepare, 100)


def test_a_chain_of_any_length_is_freed() -> None:
    """Neither deleting nor freeing it recurses."""
    store = ResponseStore(10**9)
    turn = None
    for i in range(20_000):
        turn = build_turn(1, turn)
        store.put("ann", str(i), turn)
    for i in range(20_000):
        store.delete("ann", str(i))
    assert not store.num_bytes
    last = weakref.ref(turn)
    del turn
    assert last() is None
