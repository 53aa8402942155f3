"""A row that begins with the important tokens of a prefix, and only they are read: a sequence that was born evicted.

Before a layer looks, its newest queries look at the sketches of the probe heads (kv/importance.py); what they look at
most comes into the row's pages, and the pages of the rest go back. Spans that have not been packed are loaded whole:
what is important lies scattered there. What is not known here: how spans are found and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import groupby
from threading import Event
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kv.offload.loader import LayerLoader
from retain.kv.offload.manager import Offloader
from retain.kv.offload.selective import importance
from retain.kv.offload.selective.block_cache import CachedReader
from retain.kv.offload.selective.importance import SpanMetadata
from retain.kv.offload.selective.repack import ProbeConfig
from retain.kv.offload.span import ReadJob, SpanRange
from retain.types import Ints

EMPTY = np.zeros(0, np.float32)


class SelectiveLoader(LayerLoader):
    """What one row waits for. `layers` see everything; `pages` [M, G, n] are the row's, for all rows of the spans of
    `parts`. `keep(layer, n)` gives back all but the first n of a layer's pages.
    """

    def __init__(
        self,
        offloader: Offloader,
        probe_config: ProbeConfig,
        ranges: Sequence[SpanRange],
        layers: Sequence[int],
        pages: Ints,
        trim_pages: Callable[[int, int], None],
        other_jobs: dict[int, list[ReadJob]],
    ):
        super().__init__(offloader, other_jobs)
        self.probe_config, self.ranges, self.pages, self.trim_pages = probe_config, ranges, pages, trim_pages
        self.layer_index = {layer: m for m, layer in enumerate(layers)}
        self.num_selected_blocks: dict[int, int] = {}  # pages, by layer
        self.layer_mass: list[NDArray[np.float32]] = []  # masses [N] of each layer
        self.metadata_futures: list[Future[SpanMetadata | None]] = []
        self.prefetches: dict[int, Future[Ints]] = {}
        self.urgent_read_seconds = 0.0
        self.urgent_reads: list[Future[bool]] = []  # what somebody waits for
        self.idle = Event()  # nobody does
        self.idle.set()
        for p in ranges:
            self._open_reader(p.store, p.span, partial(offloader.open_span, p.store))
        if self.failed:
            return
        self.metadata_futures = [offloader.read_executor.submit(self._read_metadata, p) for p in ranges]
        if self.is_selective:
            self.prefetches = {m: offloader.read_executor.submit(self._prefetch, m) for m in self.layer_index.values()}

    @property
    def is_selective(self) -> bool:
        """Or loads everything."""
        return all(p.span.is_reordered for p in self.ranges)

    def _read_metadata(self, span_range: SpanRange) -> SpanMetadata | None:
        try:
            reader = self.readers[span_range.span]
            notes = self.probe_config.parse_metadata(span_range.span, reader.read_metadata(), self.offloader.kv)
            if isinstance(reader, CachedReader):
                reader.attention_shares = notes.attention_shares(self.offloader.kv.page_size)
            return notes
        except Exception as error:
            self._fail(span_range.store, span_range.span, error)
            return None

    def _prefetch(self, m: int) -> Ints:
        """Most of what will be loaded of a layer is what was looked at most until now, and comes ahead of the queries;
        but who waits already goes first.
        """
        S = self.offloader.kv.page_size
        found = [
            importance.block_mass(n.mass[m], n.token_order[m], S) for f in self.metadata_futures if (n := f.result())
        ]
        rows = np.concatenate([EMPTY, *found])
        sure = np.sort(
            np.argsort(-rows)[: round(importance.PREFETCH_FRACTION * self.probe_config.ratio * len(rows))]
        ).astype(np.int32)
        for job in self._read_jobs(m, sure, 0):
            self.idle.wait()
            self._run_job(job)
        return sure

    def wait_layer(self, layer: int, q: Tensor) -> None:
        """Until what is important in a layer is there."""
        super().wait_layer(layer, q)
        notes = [f.result() for f in self.metadata_futures]
        m = self.layer_index.get(layer)
        if m is None or self.failed:
            return
        kv, probes, S = self.offloader.kv, self.probe_config, self.offloader.kv.page_size
        sketches = np.concatenate([n.sketches[m] for n in notes if n]).swapaxes(0, 1)  # [P, rows, bytes]
        room = self.offloader.scratch_buffer(sketches.shape[0] * sketches.shape[1])
        k = torch.from_numpy(importance.reconstruct_keys(sketches, S, kv.head_dim, room))  # [P, rows, S, D]
        each = [
            p.span.start_page * S + n.token_order[m].astype(np.int32)
            for p, n in zip(self.ranges, notes, strict=True)
            if n
        ]
        pos = np.concatenate(each)
        wanted = np.concatenate([self._in_range(p, x) for p, x in zip(self.ranges, each, strict=True)])
        q = q[-importance.NUM_QUERIES :].cpu()
        mass = importance.attention_mass(q, k.view(len(k), -1, kv.head_dim), probes.scale, probes.kv_heads).numpy()
        mass[:, ~wanted] = 0
        self.layer_mass.append(mass.mean(0))
        rows, sure = np.arange(sketches.shape[1], dtype=np.int32), EMPTY.astype(np.int32)
        if self.prefetches:
            sure = self.prefetches[m].result()
            rows = importance.select_blocks(mass, S, probes.ratio, sure)
        self.num_selected_blocks[m] = len(rows)
        began = perf_counter()
        self.idle.clear()
        try:
            for job in self._read_jobs(m, rows[len(sure) :], len(sure)):
                self.urgent_reads.append(self.offloader.urgent_executor.submit(self._run_job, job))
            for future in self.urgent_reads:
                future.result()
        finally:
            self.idle.set()
        self.urgent_read_seconds += perf_counter() - began
        if not self.failed:
            at = self.pages[m][:, : len(rows)]  # [G, n]
            self.offloader.transfer.set_positions(at, np.where(wanted, pos, -1).reshape(-1, S)[rows][None])
            self.offloader.transfer.wait_event(self.offloader.transfer.record_event())
            self.trim_pages(layer, len(rows))

    def _in_range(self, span_range: SpanRange, positions: Ints) -> NDArray[np.bool_]:
        """Which of a span's tokens, at these positions. (Spans may overlap, and reach beyond the text.)"""
        begin, end = (
            (span_range.span.start_page + i) * self.offloader.kv.page_size for i in (span_range.begin, span_range.end)
        )
        found: NDArray[np.bool_] = (positions >= begin) & (positions < end)
        return found

    def _read_jobs(self, m: int, blocks: Ints, first_page: int) -> Iterator[ReadJob]:
        """What reads rows of all spans, one behind the other, in order, into a layer's pages from `first` on."""
        begins = np.cumsum([0, *(p.span.num_blocks[m] for p in self.ranges)])
        parts = np.searchsorted(begins, blocks, "right") - 1
        for (part, _), run in groupby(
            zip(parts.tolist(), blocks.tolist(), range(len(blocks)), strict=True), lambda x: (x[0], x[1] - x[2])
        ):
            found = list(run)
            (_, row, at), p = found[0], self.ranges[part]
            pages = self.pages[m][:, first_page + at : first_page + at + len(found)]
            yield ReadJob(p.store, p.span, m, row - int(begins[part]), pages.T, 0)

    @property
    def futures(self) -> list[Future[Any]]:
        """See Fetch. Who waits for notes is cancelled before they are."""
        return [*self.urgent_reads, *self.prefetches.values(), *self.metadata_futures, *super().futures]

    @property
    def read_seconds(self) -> float:
        """See Fetch."""
        return self.urgent_read_seconds

    def finish(self) -> bool:
        """See Fetch. What queries looked at is remembered, and packed by."""
        if not super().finish():
            return False
        mass, at = np.stack(self.layer_mass), 0  # [M, N]
        for p, future in zip(self.ranges, self.metadata_futures, strict=True):
            n = p.span.num_blocks[0] * self.offloader.kv.page_size
            if self.offloader.repacker and (notes := future.result()):
                place = notes.token_order.argsort(axis=1)  # of every token, where it lies
                self.offloader.repacker.record_attention(
                    p.store, p.span, notes.mass, np.take_along_axis(mass[:, at : at + n], place, 1)
                )
            at += n
        return True
