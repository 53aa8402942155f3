"""Loads only the important tokens of an offloaded prefix into a row.

Before a layer attends, its newest queries attend to the sketches of the probe heads (see importance.py). The blocks
with the most attention go into the row's pages; the pages of the rest are freed. Spans that are not reordered yet are
loaded whole, because their important tokens are scattered over all blocks.
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

from retain.kv.stores.loader import LayerLoader
from retain.kv.stores.manager import Offloader
from retain.kv.stores.selective import importance
from retain.kv.stores.selective.block_cache import CachedReader
from retain.kv.stores.selective.importance import SpanMetadata
from retain.kv.stores.selective.repack import ProbeConfig
from retain.kv.stores.store import ReadJob, SpanRange
from retain.types import Floats, Ints

NO_BLOCKS: Ints = np.zeros(0, np.int32)
NO_MASS: Floats = np.zeros(0, np.float32)


class SelectiveLoader(LayerLoader):
    """The load of one row that keeps only important blocks of the layers without a window.

    `ranges` are the row's prefix; their spans have blocks for all of `layers`. `pages` [M, G, n] are the row's pages
    for every block of these spans. `trim_pages(layer, n)` frees all but the first n of them. `other_jobs` are the
    reads of the remaining layers.
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
        time_limit: float,
    ):
        super().__init__(offloader, other_jobs, time_limit)
        self.probe_config = probe_config
        self.ranges = ranges
        self.pages = pages
        self.trim_pages = trim_pages
        self.layer_index = {layer: m for m, layer in enumerate(layers)}
        self.num_selected_blocks: dict[int, int] = {}  # by index of the layer
        self.layer_mass: list[Floats] = []  # of each layer, [N]
        self.metadata_futures: list[Future[SpanMetadata | None]] = []
        self.prefetches: dict[int, Future[Ints]] = {}
        self.urgent_read_seconds = 0.0
        self.urgent_reads: list[Future[bool]] = []  # reads that the step waits for
        self.idle = Event()  # set while the step waits for no read
        self.idle.set()
        for r in ranges:
            open_reader = partial(offloader.open_span, r.store, deadline=self.deadline)
            self._open_reader(r.store, r.span, open_reader)
        if self.failed:
            return
        self.metadata_futures = [offloader.read_executor.submit(self._read_metadata, r) for r in ranges]
        if self.is_selective:
            self.prefetches = {m: offloader.read_executor.submit(self._prefetch, m) for m in self.layer_index.values()}

    @property
    def is_selective(self) -> bool:
        """Whether blocks are selected. Otherwise all blocks are loaded."""
        return all(r.span.is_reordered for r in self.ranges)

    def _read_metadata(self, span_range: SpanRange) -> SpanMetadata | None:
        try:
            reader = self.readers[span_range.span]
            metadata = self.probe_config.parse_metadata(span_range.span, reader.read_metadata(), self.offloader.kv)
            if isinstance(reader, CachedReader):
                reader.attention_shares = metadata.attention_shares(self.offloader.kv.page_size)
            return metadata
        except Exception as error:
            self._fail(span_range.store, span_range.span, error)
            return None

    def _metadata(self) -> list[SpanMetadata]:
        """Wait for the metadata of all spans. Those that could not be read are left out."""
        return [metadata for future in self.metadata_futures if (metadata := future.result())]

    def _prefetch(self, m: int) -> Ints:
        """Load the blocks with the most past attention, before the queries are known. Yields to urgent reads."""
        S = self.offloader.kv.page_size
        mass = [importance.block_mass(x.mass[m], x.token_order[m], S) for x in self._metadata()]
        mass_of_blocks = np.concatenate([NO_MASS, *mass])
        n = round(importance.PREFETCH_FRACTION * self.probe_config.ratio * len(mass_of_blocks))
        blocks = np.sort(np.argsort(-mass_of_blocks)[:n]).astype(np.int32)
        for job in self._read_jobs(m, blocks, 0):
            self.idle.wait()
            self._run_job(job)
        return blocks

    def wait_layer(self, layer: int, q: Tensor) -> None:
        """Block until the blocks that are important to queries `q` [T, H, D] are loaded, and free the other pages."""
        super().wait_layer(layer, q)
        metadata = self._metadata()
        m = self.layer_index.get(layer)
        if m is None or self.failed:
            return
        S = self.offloader.kv.page_size
        starts = [r.span.start_page * S for r in self.ranges]
        positions = [s + x.token_order[m].astype(np.int32) for s, x in zip(starts, metadata, strict=True)]
        wanted = np.concatenate([self._in_range(r, x) for r, x in zip(self.ranges, positions, strict=True)])
        mass = self._attention_mass(m, q, metadata)
        mass[:, ~wanted] = 0
        self.layer_mass.append(mass.mean(0))
        prefetched = self.prefetches[m].result() if self.prefetches else NO_BLOCKS
        blocks = np.arange(mass.shape[1] // S, dtype=np.int32)
        if self.prefetches:
            blocks = importance.select_blocks(mass, S, self.probe_config.ratio, prefetched)
        self.num_selected_blocks[m] = len(blocks)
        self._read_now(m, blocks[len(prefetched) :], len(prefetched))
        if not self.failed:
            pages = self.pages[m][:, : len(blocks)]  # [G, n]
            slots = np.where(wanted, np.concatenate(positions), -1).reshape(-1, S)[blocks]
            self.offloader.transfer.set_positions(pages, slots[None])
            self.offloader.transfer.wait_event(self.offloader.transfer.record_event())
            self.trim_pages(layer, len(blocks))

    def _attention_mass(self, m: int, q: Tensor, metadata: Sequence[SpanMetadata]) -> Floats:
        """Return the mass [P, N] that the newest queries leave on the sketched keys of a layer."""
        kv = self.offloader.kv
        probes = self.probe_config
        sketches = np.concatenate([x.sketches[m] for x in metadata]).swapaxes(0, 1)  # [P, blocks, bytes]
        scratch = self.offloader.scratch_buffer(sketches.shape[0] * sketches.shape[1])
        k = torch.from_numpy(importance.reconstruct_keys(sketches, kv.page_size, kv.k_dim, scratch))
        q = q[-importance.NUM_QUERIES :].cpu()
        k = k.view(len(k), -1, kv.k_dim)  # [P, N, D]
        mass: Floats = importance.attention_mass(q, k, probes.scale, probes.kv_heads).numpy()
        return mass

    def _read_now(self, m: int, blocks: Ints, first_page: int) -> None:
        """Read blocks of a layer ahead of all prefetches, and wait for them."""
        started_at = perf_counter()
        self.idle.clear()
        try:
            for job in self._read_jobs(m, blocks, first_page):
                self.urgent_reads.append(self.offloader.urgent_executor.submit(self._run_job, job))
            for future in self.urgent_reads:
                future.result()
        finally:
            self.idle.set()
        self.urgent_read_seconds += perf_counter() - started_at

    def _in_range(self, span_range: SpanRange, positions: Ints) -> NDArray[np.bool_]:
        """Which positions are in the range: spans may overlap each other and extend beyond the prefix."""
        begin, end = (
            (span_range.span.start_page + i) * self.offloader.kv.page_size for i in (span_range.begin, span_range.end)
        )
        found: NDArray[np.bool_] = (positions >= begin) & (positions < end)
        return found

    def _read_jobs(self, m: int, blocks: Ints, first_page: int) -> Iterator[ReadJob]:
        """Yield reads of blocks into a layer's pages from `first_page` on, one for each run of consecutive blocks.

        Blocks are numbered through all spans.
        """
        first_blocks = np.cumsum([0, *(r.span.num_blocks[m] for r in self.ranges)])
        owners = np.searchsorted(first_blocks, blocks, "right") - 1
        numbered = zip(owners.tolist(), blocks.tolist(), range(len(blocks)), strict=True)
        for (owner, _), group in groupby(numbered, lambda x: (x[0], x[1] - x[2])):
            run = list(group)
            _, block, i = run[0]
            r = self.ranges[owner]
            pages = self.pages[m][:, first_page + i : first_page + i + len(run)]
            yield ReadJob(r.store, r.span, m, block - int(first_blocks[owner]), pages.T, 0)

    @property
    def futures(self) -> list[Future[Any]]:
        """All submitted work. A future comes before those that it waits for."""
        return [*self.urgent_reads, *self.prefetches.values(), *self.metadata_futures, *super().futures]

    @property
    def read_seconds(self) -> float:
        """Seconds that steps waited for urgent reads."""
        return self.urgent_read_seconds

    def finish(self) -> bool:
        """End the load, and record the attention of its queries for reordering. Whether all of it was loaded."""
        if not super().finish():
            return False
        mass = np.stack(self.layer_mass)  # [M, N]
        begin = 0
        for r, future in zip(self.ranges, self.metadata_futures, strict=True):
            n = r.span.num_blocks[0] * self.offloader.kv.page_size
            if self.offloader.repacker and (metadata := future.result()):
                place = metadata.token_order.argsort(axis=1)  # of each token
                in_text_order = np.take_along_axis(mass[:, begin : begin + n], place, 1)
                self.offloader.repacker.record_attention(r.store, r.span, metadata.mass, in_text_order)
            begin += n
        return True
