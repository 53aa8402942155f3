"""Checkpoints as spans: whole pages of several pools, and metadata that says what they are.

A checkpoint ends at any token. So it has two keys: one names its text, up to its position, and one the next block of
that text. Who looks for the latest one asks for each block, from the end of a text, whether there is one in it, and
where there is, for each of the block's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Any, TypeVar

from retain.kv.memory.block_tables import BlockTables
from retain.kv.stores.loader import write_pages
from retain.kv.stores.offloader import Offloader, describe_span
from retain.kv.stores.store import ReadJob, SpanRange, Store
from retain.kv.text import Text, hash_key
from retain.types import Bytes, Ints

Found = TypeVar("Found")


@dataclass(frozen=True)
class PageRun:
    """Pages [n] of one KV cache group, or of its demoted slots; `layer` is the first of the model that reads them.

    Where it is None, something reads them before the step.
    """

    group: int
    is_demoted: bool
    pages: Ints
    layer: int | None = None


class CheckpointSpans:
    """Puts checkpoints into the stores of an offloader, finds them and reads them. Keys say what they depend on."""

    def __init__(self, offloader: Offloader, groups: Sequence[BlockTables], block_size: int):
        self.offloader = offloader
        self.block_size = block_size
        demoted = [((g, True), t.demoted.store) for g, t in enumerate(groups) if t.demoted]
        pools = [*(((g, False), t.store) for g, t in enumerate(groups)), *demoted]
        self.pool_of = {pool: i for i, (pool, _) in enumerate(pools)}  # a group and whether demoted, to a number
        self.page_stores = [store for _, store in pools]
        sizes = [(t.ends[-1], t.kv.page_size) for t in offloader.transfers]
        self._format = repr(sizes).encode()  # of the pages of each pool

    # ---- keys ----------------------------------------------------------------------------------------------------

    def name(self, text_hash: bytes, key: bytes) -> bytes:
        """Return the key of the checkpoint at the end of a text."""
        return hash_key(text_hash + key + self._format)

    def name_of_block(self, block_hash: bytes, key: bytes) -> bytes:
        """Return the key of all checkpoints in the block behind the one of a hash, its beginning included."""
        return hash_key(block_hash + b"in the next block" + key + self._format)

    # ---- storing -------------------------------------------------------------------------------------------------

    def put(
        self,
        stores: Sequence[Store],
        keys: tuple[bytes, bytes],
        pages: Sequence[PageRun],
        metadata: bytes,
        **place: Any,
    ) -> None:
        """Put pages and metadata into these stores. `place` has the further fields of the span."""
        runs = [(self.offloader.transfers[self._pool(run)], run.pages[:, None]) for run in pages]
        for store in stores:
            span = describe_span(keys, runs, metadata_bytes=len(metadata), **place)
            self.offloader.put_span(store, span, runs, lambda: metadata)

    def discard(self, name: bytes) -> None:
        """Remove a checkpoint from stores of this engine alone."""
        for store in self.offloader.stores:
            if not store.is_shared and (found := store.find(name)):
                store.delete(found[0])

    # ---- loading -------------------------------------------------------------------------------------------------

    def find(self, key: bytes, text: Text, first_link: bytes, last: int, after: int) -> Iterator[tuple[int, SpanRange]]:
        """Yield the checkpoints of a text after more than `after` tokens, the latest first, with their positions.

        They are after at most `last` tokens.
        """
        B = self.block_size
        block_hashes = text.block_hashes(first_link, B, last)
        for n in range(len(block_hashes), max(after // B, 1) - 1, -1):
            if self.offloader.find_key(self.name_of_block(block_hashes[n - 1], key)):
                for end, text_hash in text.iter_end_hashes(first_link, B, n, last):
                    if end > after and (place := self.find_at(key, text_hash)):
                        yield end, place

    def find_at(self, key: bytes, text_hash: bytes) -> SpanRange | None:
        """Return the checkpoint at the end of a text, if a store has it."""
        found = self.offloader.find_key(self.name(text_hash, key))
        return SpanRange(found[0], found[1], 0, len(found[1].keys)) if found else None

    def read(
        self, found: SpanRange, num_tokens: int, decode: Callable[[bytes], Found | None], with_pages: bool
    ) -> tuple[Found, list[Bytes]] | None:
        """Return what `decode` makes of the metadata of a span, and its pages [p, n], or none of them.

        The span saves computing so many tokens. None where `decode` returns that, and after any error, also of
        `decode`: then the span is dropped.
        """
        store = found.store
        span = found.span
        started_at = perf_counter()
        num_read = 0
        pages = []
        try:
            with closing(store.open(span, monotonic() + self.offloader.time_limit([store], num_tokens))) as reader:
                decoded = decode(bytes(reader.read_metadata()) if span.metadata_bytes else b"")
                if decoded is None:
                    return None
                for layer, n in enumerate(span.num_blocks if with_pages else ()):
                    pages.append(reader.read_blocks(layer, 0, n).copy())
                    num_read += pages[-1].size
        except Exception as error:
            self.offloader.drop_unreadable(store, span, error, num_read, perf_counter() - started_at)
            return None
        if num_read:
            self.offloader.cost_model.record_read(store.name, span.size, max(perf_counter() - started_at, 1e-6))
        return decoded, pages

    def allocate(self, runs: Sequence[PageRun]) -> list[Ints]:
        """Take pages for each of these runs, which the pool has."""
        with self.page_stores[0].pool.owned() as owned:
            for run in runs:
                owned.append(self.page_stores[self._pool(run)].allocate(len(run.pages)))
        return owned

    def upload(self, place: SpanRange, runs: Sequence[PageRun], data: Sequence[Bytes]) -> None:
        """Write the blocks of each run of a span into its pages."""
        transfer = self.offloader.transfer
        transfer.fence()
        for job, blocks in zip(self.read_jobs(place, runs), data, strict=True):
            write_pages(self.offloader.transfers[job.pool], job, blocks)
        transfer.wait_event(transfer.record_event())
        transfer.synchronize()

    def read_jobs(self, place: SpanRange, runs: Sequence[PageRun]) -> list[ReadJob]:
        """Return the reads of the runs of a span."""
        return [
            ReadJob(place.store, place.span, i, 0, run.pages[:, None], self._pool(run)) for i, run in enumerate(runs)
        ]

    def _pool(self, run: PageRun) -> int:
        return self.pool_of[run.group, run.is_demoted]
