"""Reads spans out of objects: by large ranges ahead of the layers that need them, or by exact ranges."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import accumulate
from time import monotonic

from retain.kv.stores.checksums import verify_blocks
from retain.kv.stores.circuit_breaker import CircuitBreaker
from retain.kv.stores.remote.object_format import RemoteSpan
from retain.types import Bytes

RANGE_BYTES = 8 * 2**20  # of a read ahead, about

Fetch = Callable[[RemoteSpan, int, int], Future[Bytes]]  # (span, begin, end) in the span's bytes


class RemoteReader:
    """Reads a span's object, and compares each block with its checksum.

    A read of a whole layer fetches a range of several layers, and the range after it in the background. Other reads
    fetch what they need. Bytes arrive in buffers of their own: a read that comes too late lands in no page.
    `deadline` is a time of `monotonic`; reads that are not done by then raise TimeoutError.
    """

    def __init__(self, span: RemoteSpan, fetch: Fetch, breaker: CircuitBreaker, deadline: float):
        self.span = span
        self.fetch = fetch
        self.breaker = breaker
        self.deadline = deadline
        self.first_checksum = [0, *accumulate(span.num_blocks)]
        self.range_of_layer = _group_layers(span)
        self.num_unread = [self.range_of_layer.count(i) for i in range(max(self.range_of_layer, default=0) + 1)]
        self.ranges: dict[int, Future[Bytes]] = {}  # under way, or read and still needed
        self.has_read = self.has_failed = False
        self._lock = threading.Lock()

    def read_blocks(self, layer: int, begin: int, end: int) -> Bytes:
        """Read blocks of a layer, [end - begin, block_bytes]."""
        size = self.span.block_bytes
        offset = self.span.offsets[layer]
        if end - begin == self.span.num_blocks[layer]:
            data = self._read_ahead(layer)
        else:
            data = self._wait(self.fetch(self.span, offset + begin * size, offset + end * size))
        blocks = data.reshape(-1, size)
        return verify_blocks(self.span.checksums, self.first_checksum[layer] + begin, blocks, self.span.name)

    def read_metadata(self) -> Bytes:
        """Read the metadata."""
        begin = self.span.offsets[-2]
        data = self._wait(self.fetch(self.span, begin, begin + self.span.metadata_bytes))
        metadata: Bytes = verify_blocks(self.span.checksums, self.first_checksum[-1], data[None], self.span.name)[0]
        return metadata

    def close(self) -> None:
        """Forget what is under way."""
        with self._lock:
            ranges = self.ranges
            self.ranges = {}
        for future in ranges.values():
            future.cancel()
        if self.has_read and not self.has_failed:
            self.breaker.reset_delay()

    def _read_ahead(self, layer: int) -> Bytes:
        """Return the bytes of a layer's blocks, out of a range that several layers share."""
        i = self.range_of_layer[layer]
        future = self._start_range(i)
        if i + 1 < len(self.num_unread):
            self._start_range(i + 1)
        data = self._wait(future)
        begin = self.span.offsets[layer] - self.span.offsets[self.range_of_layer.index(i)]
        with self._lock:
            self.num_unread[i] -= 1
            if self.num_unread[i] <= 0:
                self.ranges.pop(i, None)
        return data[begin : begin + self.span.num_blocks[layer] * self.span.block_bytes]

    def _start_range(self, i: int) -> Future[Bytes]:
        with self._lock:
            if i not in self.ranges:
                layers = [layer for layer, j in enumerate(self.range_of_layer) if j == i]
                begin = self.span.offsets[layers[0]]
                end = self.span.offsets[layers[-1] + 1]
                self.ranges[i] = self.fetch(self.span, begin, end)
            return self.ranges[i]

    def _wait(self, future: Future[Bytes]) -> Bytes:
        """Return what is read. Raises OSError."""
        try:
            data = future.result(timeout=min(max(self.deadline - monotonic(), 0), threading.TIMEOUT_MAX))
        except BaseException as error:
            self.has_failed = True
            if isinstance(error, TimeoutError) and not future.done():
                self.breaker.record_failure()
                raise TimeoutError("loading takes too long beside computing") from None
            raise
        self.has_read = True
        return data


def _group_layers(span: RemoteSpan) -> list[int]:
    """Return the range of each layer: consecutive layers share one, up to about RANGE_BYTES."""
    groups: list[int] = []
    first = 0
    for layer in range(len(span.num_blocks)):
        if span.offsets[layer + 1] - span.offsets[first] > RANGE_BYTES and layer > first:
            first = layer
        groups.append(groups[-1] + (first == layer) if groups else 0)
    return groups
