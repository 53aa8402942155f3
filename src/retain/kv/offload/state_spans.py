"""Spans of evicted states: whole pages of several pools, and metadata that says what they are.

A state is a span of two keys: one names its text, up to its position, and one the blocks of the text before that, as
states end at any token. Each of its layers has some pages of one pool, a page a block. The keys and the metadata are
the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from time import monotonic, perf_counter

from retain.kernels.api import KV
from retain.kv.offload.manager import Offloader
from retain.kv.offload.span import Span, SpanRange, Store, alloc_aligned
from retain.kv.offload.whole_pages import create_whole_page_transfers
from retain.types import Bytes, Ints


@dataclass(frozen=True)
class PageRun:
    """Some pages of the pool of this number."""

    pool: int
    pages: Ints


@dataclass(frozen=True)
class StateBytes:
    """A state as it was read: its metadata, and the pages of each run, [p, n]."""

    metadata: bytes
    runs: Sequence[Bytes]

    @property
    def num_pages(self) -> int:
        """The pages of all runs."""
        return sum(len(pages) for pages in self.runs)


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
        """Put a state into those of the stores that lack it. `keys`: its own, and that of its blocks.

        It is at a position of a text, behind `start_page` whole blocks.
        """
        for store in stores:
            if store.contains(keys[0]):
                continue
            span = Span(
                keys=keys,
                num_blocks=tuple(len(run.pages) for run in runs),
                block_bytes=max(self.transfers[run.pool].page_bytes for run in runs),
                start_page=start_page,
                min_resume_position=position,
                metadata_bytes=len(metadata),
            )
            data = self.offloader.allocate_span(store, span)
            if data is None:
                continue
            for layer, run in enumerate(runs):
                if len(run.pages):
                    self.transfers[run.pool].download(run.pages, span.view_layer(data, layer))
            span.view_metadata(data)[:] = bytearray(metadata)
            store.put(span, data)

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

    def read(self, found: SpanRange, num_tokens: int) -> StateBytes | None:
        """Read a state that saves computing so many tokens. After an error it is dropped, and None is returned."""
        store = found.store
        span = found.span
        started_at = perf_counter()
        num_read = 0
        try:
            with closing(store.open(span, monotonic() + self.offloader.time_limit([store], num_tokens))) as reader:
                metadata = bytes(reader.read_metadata())
                runs = []
                for layer, n in enumerate(span.num_blocks):
                    data = alloc_aligned(n * span.block_bytes).reshape(n, span.block_bytes)
                    data[:] = reader.read_blocks(layer, 0, n) if n else data
                    runs.append(data)
                    num_read += data.size
        except Exception as error:
            self.offloader.drop_unreadable(store, span, error, num_read, perf_counter() - started_at)
            return None
        self.offloader.cost_model.record_read(store.name, span.size, max(perf_counter() - started_at, 1e-6))
        return StateBytes(metadata, runs)

    def upload(self, state: StateBytes, runs: Sequence[PageRun]) -> None:
        """Write the bytes of a state into pages, as many as it has in each run."""
        for data, run in zip(state.runs, runs, strict=True):
            if len(run.pages):
                transfer = self.transfers[run.pool]
                transfer.upload(run.pages, data[:, : transfer.page_bytes])
