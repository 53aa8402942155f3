"""Loads blocks of spans into a row's own pages, layer by layer, while a step computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, wait
from itertools import chain
from time import monotonic, perf_counter
from typing import Any

import numpy as np
from torch import Tensor

from retain.kv.stores.offloader import Offloader
from retain.kv.stores.reader import SpanReader
from retain.kv.stores.span import TEXT, Span
from retain.kv.stores.store import ReadJob, Store
from retain.kv.stores.transfer import PageTransfer
from retain.types import Bytes


class LayerLoader:
    """The load of one row. All layers are submitted at once, the first layers of the model first.

    `failed` is set when a read fails, or is not done `time_limit` seconds from now; the row then has to be computed.
    """

    def __init__(self, offloader: Offloader, jobs_by_layer: dict[int, list[ReadJob]], time_limit: float):
        self.offloader = offloader
        self.num_tokens = 0  # for statistics
        self.failed = False
        self.cancelled = False
        self.deadline = monotonic() + time_limit
        self.bytes_read = Counter[str]()  # by store
        self.loaded_spans: set[tuple[Store, Span]] = set()  # spans of which every block was loaded
        self.started_at = self.finished_at = perf_counter()
        self.readers: dict[Span, SpanReader] = {}
        for job in chain.from_iterable(jobs_by_layer.values()):
            self._open_reader(job.store, job.span)
        offloader.transfer.fence()
        self.layer_futures: dict[int, Future[Any]] = {
            layer: offloader.read_executor.submit(self._load_layer, jobs)
            for layer, jobs in sorted(jobs_by_layer.items())
        }

    def _open_reader(self, store: Store, span: Span) -> None:
        if not self.failed and span not in self.readers:
            try:
                self.readers[span] = self.offloader.open_span(store, span, self.deadline)
            except OSError as error:
                self._fail(store, span, error)

    def _load_layer(self, jobs: Sequence[ReadJob]) -> Any:
        """Load a layer on a reader thread. Returns the transfer event to wait for, or None after a failure."""
        for job in jobs:
            if not self._run_job(job):
                return None
            if len(job.pages) == job.span.num_blocks[job.layer]:
                self.loaded_spans.add((job.store, job.span))
        try:
            write_positions(self.offloader.transfers[jobs[0].pool], jobs)
            self.finished_at = perf_counter()
            return self.offloader.transfer.record_event()
        except Exception as error:
            self._fail(jobs[0].store, jobs[0].span, error)
            return None

    def _run_job(self, job: ReadJob) -> bool:
        """Read and upload the blocks of a job. Whether they were loaded: an error only fails this row's load."""
        if self.failed or self.cancelled:
            return False
        try:
            blocks = self.readers[job.span].read_blocks(job.layer, job.start_block, job.start_block + len(job.pages))
            write_pages(self.offloader.transfers[job.pool], job, blocks)
            self.bytes_read[job.store.name] += blocks.size
        except Exception as error:
            self._fail(job.store, job.span, error)
        return not self.failed

    def _fail(self, store: Store, span: Span, error: Exception) -> None:
        """Mark the load as failed, and remove the span from its store."""
        self.failed = True
        seconds = perf_counter() - self.started_at
        self.offloader.drop_unreadable(store, span, error, self.bytes_read[store.name], seconds)

    def wait_layer(self, layer: int, q: Tensor) -> None:
        """Block until a layer is loaded. `q` is unused here; SelectiveLoader uses it."""
        if layer in self.layer_futures:
            self.offloader.transfer.wait_event(self.layer_futures[layer].result())

    @property
    def is_done(self) -> bool:
        """Whether nothing is being read any more."""
        return all(future.done() for future in self.futures)

    def wait(self) -> None:
        """Block until all layers are loaded, or one has failed."""
        for future in self.layer_futures.values():
            self.offloader.transfer.wait_event(future.result())

    @property
    def futures(self) -> list[Future[Any]]:
        """All submitted work. A future comes before those that it waits for."""
        return list(self.layer_futures.values())

    def cancel(self) -> None:
        """Stop the load. Nothing is written into the row's pages after this returns."""
        self.cancelled = True
        try:
            wait([f for f in self.futures if not f.cancel()])
            self.offloader.transfer.synchronize()
        finally:
            self._close_readers()

    @property
    def read_seconds(self) -> float:
        """Seconds from the start of the load until its last layer was read."""
        return self.finished_at - self.started_at

    def _close_readers(self) -> None:
        for reader in self.readers.values():
            reader.close()

    def finish(self) -> bool:
        """End a load whose layers were all waited for. Whether all of it was loaded."""
        if self.failed:
            self.cancel()
            return False
        self.offloader.transfer.synchronize()  # the readers' buffers may be released now
        self._close_readers()
        if len(self.bytes_read) == 1:
            ((name, size),) = self.bytes_read.items()
            self.offloader.cost_model.record_read(name, size, max(self.read_seconds, 1e-6))
        return True

    def delete_loaded_spans(self) -> None:
        """Delete the spans of which every block was loaded, where a store need not keep them."""
        for store, span in self.loaded_spans:
            if not store.write_through and span.kind == TEXT:
                store.delete(span)


def write_pages(transfer: PageTransfer, job: ReadJob, blocks: Bytes) -> None:
    """Upload blocks [n, block_bytes] into the pages of a job; the last bytes of a block may be padding."""
    n, G = job.pages.shape
    size = transfer.page_bytes(job.span.kind)
    transfer.upload(job.pages, blocks[:, : G * size].reshape(n, G, size))


def write_positions(transfer: PageTransfer, jobs: Sequence[ReadJob]) -> None:
    """Set the positions of all pages of a layer's jobs at once, where their blocks are of a text."""
    S = transfer.kv.page_size
    placed = [(job.pages, job.start_position + S * np.arange(len(job.pages))) for job in jobs if job.span.kind == TEXT]
    if placed:
        pages, firsts = map(np.concatenate, zip(*placed, strict=True))
        transfer.set_positions(pages, (firsts[:, None, None] + np.arange(S)).astype(np.int32))  # [n, 1, S]
