"""Places that keys share: a fair queue, and the pool of threads that stands on it."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict
from concurrent.futures import CancelledError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retain.server.preparation import FairQueue, PreparationPool, Ticket

KEYS = "abc"
QUEUES = st.tuples(st.integers(1, 4), st.integers(1, 4)).map(lambda sizes: (max(sizes), min(sizes)))
# Enter with a key, or leave: one that has a place (even numbers), or any that entered.
EVENTS = st.lists(st.sampled_from([*KEYS, *KEYS, *range(6), 0, 2]), max_size=80)


class Schedule:
    """A queue under a schedule of events, with a record of who got places in which order."""

    def __init__(self, num_places: int, places_per_key: int):
        self.queue = FairQueue(num_places, places_per_key)
        self.present: list[Ticket] = []  # in the order of arrival
        self.placed: list[str] = []  # keys, by place given

    def run(self, event: str | int) -> None:
        if isinstance(event, str):
            before = len(self.placed)
            ticket = self.queue.enter(event, lambda: self.placed.append(event))
            self.present.append(ticket)
            assert ticket.has_place == (len(self.placed) > before)
        elif candidates := [ticket for ticket in self.present if ticket.has_place or event % 2]:
            ticket = candidates[event // 2 % len(candidates)]
            self.present.remove(ticket)
            self.queue.leave(ticket)

    def held(self) -> Counter[str]:
        return Counter(ticket.key_name for ticket in self.present if ticket.has_place)

    def waiting(self) -> dict[str, list[Ticket]]:
        waiting = defaultdict(list)
        for ticket in self.present:
            if not ticket.has_place:
                waiting[ticket.key_name].append(ticket)
        return waiting


@given(QUEUES, EVENTS)
def test_no_key_exceeds_its_share_and_no_place_stays_free_for_one_that_may_have_it(sizes, events):
    schedule = Schedule(*sizes)
    for event in events:
        schedule.run(event)
        held = schedule.held()
        assert held.total() <= sizes[0] and max(held.values(), default=0) <= sizes[1]
        if held.total() < sizes[0]:
            assert all(held[key] == sizes[1] for key in schedule.waiting())


@given(QUEUES, EVENTS)
def test_a_key_is_served_in_the_order_of_arrival(sizes, events):
    schedule = Schedule(*sizes)
    for event in events:
        schedule.run(event)
        for key in KEYS:
            places = [ticket.has_place for ticket in schedule.present if ticket.key_name == key]
            assert places == sorted(places, reverse=True)


@given(QUEUES, EVENTS)
def test_no_other_key_gets_two_places_while_one_that_may_have_one_waits(sizes, events):
    schedule = Schedule(*sizes)
    passed: dict[str, Counter[str]] = {}  # of a key that waits below its share: places that others got
    for event in events:
        num_placed = len(schedule.placed)
        schedule.run(event)
        held = schedule.held()
        new = schedule.placed[num_placed:]
        may_have_one = {key for key in schedule.waiting() if held[key] < sizes[1]}
        passed = {key: passed.get(key, Counter()) + Counter(new) for key in may_have_one if key not in new}
        assert all(max(others.values(), default=0) <= 1 for others in passed.values())


@given(QUEUES, EVENTS)
def test_all_places_are_free_when_all_have_left(sizes, events):
    schedule = Schedule(*sizes)
    for event in events:
        schedule.run(event)
    while schedule.present:
        schedule.run(1 + 2 * len(schedule.placed))
    tickets = [schedule.queue.enter(f"new{i}", lambda: None) for i in range(sizes[0])]
    assert all(ticket.has_place for ticket in tickets)
    assert schedule.queue._num_held.total() == sizes[0] and not schedule.queue._waiting


def test_leaving_again_gives_no_second_place():
    queue = FairQueue(2, 2)
    first, _, other, last = (queue.enter(key, lambda: None) for key in "aabc")
    for _ in range(2):
        queue.leave(first)
    assert other.has_place and not last.has_place


# ---- the pool --------------------------------------------------------------------------------------------------------


async def until(condition) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("waited in vain")


def test_a_busy_key_leaves_threads_to_another_and_its_own_wait_in_line():
    async def run() -> None:
        pool, release, running = PreparationPool("test", 4, 2), threading.Event(), []

        def block() -> None:
            running.append(1)
            release.wait(60)

        busy = [asyncio.create_task(pool.run("ann", block)) for _ in range(10)]
        await until(lambda: len(running) == 2)
        assert await pool.run("bob", lambda: "done") == "done"
        assert len(running) == 2
        release.set()
        await asyncio.gather(*busy)
        pool.close()

    asyncio.run(run())


@pytest.mark.parametrize("has_place", [False, True])
def test_a_cancelled_caller_loses_no_place(has_place: bool):
    async def run() -> None:
        pool, release = PreparationPool("test", 1, 1), threading.Event()
        first = asyncio.create_task(pool.run("ann", lambda: release.wait(60)))
        await asyncio.sleep(0)
        second = asyncio.create_task(pool.run("bob", release.is_set))
        await asyncio.sleep(0)
        (first if has_place else second).cancel()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await (first if has_place else second)
        assert await pool.run("carol", lambda: 7) == 7
        await until(lambda: not pool._queue._num_held and not pool._queue._waiting)
        pool.close()

    asyncio.run(run())


def test_a_place_that_comes_with_the_cancellation_is_given_on():
    async def run() -> None:
        pool = PreparationPool("test", 1, 1)
        holder = pool._queue.enter("ann", lambda: None)
        waiting = asyncio.create_task(pool.run("bob", lambda: 1))
        await asyncio.sleep(0)
        pool._queue.leave(holder)  # the place goes to bob
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await pool.run("carol", lambda: 7) == 7
        pool.close()

    asyncio.run(run())


def test_a_function_that_raises_gives_its_place_back():
    async def run() -> None:
        pool = PreparationPool("test", 1, 1)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await pool.run("ann", lambda: 1 // 0)
        pool.close()
        with pytest.raises((RuntimeError, CancelledError)):  # no more functions
            await pool.run("ann", lambda: 1)
        await until(lambda: not pool._queue._num_held)

    asyncio.run(run())
