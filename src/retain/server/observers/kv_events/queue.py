"""Events between the engine's thread, which records them, and the publisher's, which sends them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import NamedTuple

from retain.kv.prefix.events import StoredPages
from retain.server.observers.kv_events.wire import (
    Block,
    Event,
    all_blocks_cleared,
    block_removed,
    block_stored,
    to_block_number,
)

MAX_PENDING_EVENTS = 10_000


class Taken(NamedTuple):
    """Events to send. A restatement begins with AllBlocksCleared and needs no event before it."""

    events: Iterator[Event]
    is_restatement: bool


class KVEventQueue:
    """A PrefixObserver that keeps what is cached, and what of it the publisher has not taken.

    The engine never waits for the publisher. Events beyond `max_pending` are dropped; then everything that is cached is
    stated again.
    """

    def __init__(self, wake: Callable[[], None], max_pending: int = MAX_PENDING_EVENTS):
        """`wake`: tells the publisher that there is something to take; must not wait."""
        self._wake = wake
        self.max_pending = max_pending
        self._lock = Lock()  # held for moments only: nothing is encoded or sent under it
        self._cached: dict[int, Block] = {}  # by number; parents come before their children
        self._pending: list[Callable[[], Event]] = []
        self._must_restate = True  # the first batch is the beginning of a replay
        self.num_dropped = 0

    # ---- in the engine's thread ----------------------------------------------------------------------------------

    def on_stored(self, pages: StoredPages, group: str) -> None:
        """Record pages that are cached from now on."""
        numbers = [to_block_number(h) for h in pages.block_hashes]
        parent = None if pages.parent_hash is None else to_block_number(pages.parent_hash)
        tokens = pages.tokens.reshape(len(numbers), -1)
        blocks = map(Block, [parent, *numbers], tokens, [group] * len(numbers))
        with self._lock:
            self._cached.update(zip(numbers, blocks, strict=True))
            self._add(lambda: block_stored(parent, numbers, pages.tokens.tolist(), group))
        self._wake()

    def on_removed(self, block_hashes: Sequence[bytes]) -> None:
        """Record pages that were evicted."""
        with self._lock:
            numbers = [n for n in map(to_block_number, block_hashes) if self._cached.pop(n, None)]
            if not numbers:
                return
            self._add(lambda: block_removed(numbers))
        self._wake()

    def on_cleared(self) -> None:
        """Record that nothing is cached any more."""
        with self._lock:
            self._cached.clear()
            self._pending.clear()
            self._add(all_blocks_cleared)
        self._wake()

    def _add(self, build: Callable[[], Event]) -> None:
        if self._must_restate:
            return
        self._pending.append(build)
        if len(self._pending) > self.max_pending:
            self.num_dropped += len(self._pending)
            self._pending = []
            self._must_restate = True

    # ---- in the publisher's thread -------------------------------------------------------------------------------

    def restate(self) -> None:
        """Let the next `take` state everything that is cached."""
        with self._lock:
            self._must_restate = True

    def take(self) -> Taken:
        """Return what is to be sent now."""
        with self._lock:
            pending = self._pending
            is_restatement = self._must_restate
            cached = list(self._cached.items()) if is_restatement else []
            self._pending = []
            self._must_restate = False
        if is_restatement:
            return Taken(_state_all(cached), True)
        return Taken((build() for build in pending), False)


def _state_all(cached: Sequence[tuple[int, Block]]) -> Iterator[Event]:
    yield all_blocks_cleared()
    for number, block in cached:
        yield block_stored(block.parent, [number], block.tokens.tolist(), block.group)
