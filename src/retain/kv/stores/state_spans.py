"""Spans of evicted states: whole pages of several pools, and metadata that says what they are.

A state is a span of two keys: one names its text, up to its position, and one the blocks of the text before that, as
states end at any token. Each of its layers has some pages of one pool, a page a block. The keys and the metadata are
the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import TypeVar

from retain.kernels.api import KV
from retain.kv.stores.manager import Offloader, describe_span
from retain.kv.stores.store import SpanRange, Store
from retain.kv.stores.whole_pages import create_whole_page_transfers
from retain.types import Bytes, Ints

State = TypeVar("State")


@dataclass(frozen=True)
class PageRun:
    """Some pages of the pool of this number."""

    pool: int
    pages: Ints


class StateSpans:
    """Puts states into the stores of an offloader, finds them and reads them. `pools` are of one memory."""

    def __init__(self, offloader: Offloader, pools: Sequence[KV]):
        self.offloader = offloader
        self.transfers = create_whole_page_transfers(pools)

    # ---- storing -------------------------------------------------------------------------------------------------

    def put(
        self,
        stores: Sequence[Store],
        keys: tuple[bytes, bytes],
        position: int,
        start_page: int,
        runs: Sequence[PageRun],
        metadata: bytes,
    ) -> None:
        """Put a state into stores that lack it. `keys`: its own, and that of its blocks.

        It is at a position of a text, behind `start_page` whole blocks.
        """
        layers = [(self.transfers[run.pool], run.pages) for run in runs]
        for store in stores:
            span = describe_span(keys, layers, kind="state", start_page=start_page, metadata_bytes=len(metadata))
            span.resumes_from = position
            self.offloader.put_span(store, span, layers, metadata)

    def discard(self, key: bytes) -> None:
        """Remove the state of this key from stores of this engine alone."""
        for store in self.offloader.stores:
            if not store.is_shared and (found := store.find(key)):
                store.delete(found[0])

    # ---- loading -------------------------------------------------------------------------------------------------

    def has(self, key: bytes) -> bool:
        """Return whether a store has a state of this key."""
        return any(store.find(key) for store in self.offloader.stores)

    def find(self, key: bytes) -> SpanRange | None:
        """Return the whole span of a state, if a store has it."""
        for store in self.offloader.stores:
            if found := store.find(key):
                span = found[0]
                return SpanRange(store, span, 0, len(span.keys))
        return None

    def read(
        self, found: SpanRange, num_tokens: int, decode: Callable[[bytes], State | None]
    ) -> tuple[State, list[Bytes]] | None:
        """Read a state that saves computing so many tokens: what `decode` makes of its metadata, and pages [p, n].

        None where that is None. After any error, also of `decode`, the span is dropped, and None is returned.
        """
        store = found.store
        span = found.span
        started_at = perf_counter()
        num_read = 0
        pages = []
        try:
            with closing(store.open(span, monotonic() + self.offloader.time_limit([store], num_tokens))) as reader:
                state = decode(bytes(reader.read_metadata()))
                if state is None:
                    return None
                for layer, n in enumerate(span.num_blocks):
                    pages.append(reader.read_blocks(layer, 0, n).copy())
                    num_read += pages[-1].size
        except Exception as error:
            self.offloader.drop_unreadable(store, span, error, num_read, perf_counter() - started_at)
            return None
        self.offloader.cost_model.record_read(store.name, span.size, max(perf_counter() - started_at, 1e-6))
        return state, pages

    def upload(self, runs: Sequence[PageRun], data: Sequence[Bytes]) -> None:
        """Write the bytes of each run's pages, [p, n]."""
        for run, pages in zip(runs, data, strict=True):
            transfer = self.transfers[run.pool]
            transfer.upload(run.pages, pages[:, : transfer.page_bytes])
