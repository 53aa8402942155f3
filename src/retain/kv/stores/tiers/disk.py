"""The disk tier: a folder with everything that was computed, bounded, and found again after a restart.

A span's file is written completely, synced and renamed before its row in the index (sqlite_index.py) publishes it. A
process that is killed in between leaves a file without a row, which the next process removes. Files are read and
written past the page cache where the file system allows it: memory has a tier of its own.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from retain.kv.stores.checksums import span_checksums
from retain.kv.stores.direct_io import open_direct, sync_folder, write_and_sync
from retain.kv.stores.disk_reader import DiskReader
from retain.kv.stores.index import SpanIndex
from retain.kv.stores.span import UNKNOWN_FORMAT, Span, SpanFormat
from retain.kv.stores.sqlite_index import StoredSpan, StoreIndex
from retain.kv.stores.store_connection import StoreConnection
from retain.kv.stores.store_folder import remove_file, span_file
from retain.kv.stores.throttle import Throttle
from retain.kv.stores.warning_log import WarningLog
from retain.options import Size, check_bounds
from retain.plugins import check_choice
from retain.threads import reset_cpu_affinity
from retain.types import Bytes

log = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 2**29  # bytes that may wait to be written


@dataclass(frozen=True)
class Tier:
    """Options of the disk tier. Raises ValueError."""

    path: str
    capacity: Size
    evict: str = "lru"  # or lfu
    read: Size | None = None  # most bytes read per second

    def __post_init__(self) -> None:
        check_bounds(self)
        check_choice("evict", self.evict, "lru", "lfu")

    def open(self, span_format: SpanFormat = UNKNOWN_FORMAT) -> DiskStore:
        """Open the store in the folder, which is created if needed, and remember the format there.

        Raises ValueError for a folder that must not be used; one that cannot be written is used as far as it can be.
        """
        return DiskStore(self, span_format)


class DiskStore:
    """A store in a folder. See `Store` for its methods. One thread writes, and only that thread uses the database."""

    name = "disk"
    max_keys = 16
    write_through = True
    is_shared = False
    distance = 1
    latency = 0.0

    def __init__(self, options: Tier, span_format: SpanFormat):
        self.options = options
        self.path = expand_path(options.path)
        self.span_index = SpanIndex(options.capacity, options.evict)
        self.counts = dict.fromkeys(("written", "read", "evicted", "damaged", "failed", "skipped"), 0)
        self.warnings = WarningLog(log)
        self.throttle = Throttle(options.read)
        self._lock = threading.Lock()  # for the span index and for all that follows
        self._queued_bytes = 0
        self._in_flight_keys = set[bytes]()
        self._touched_spans = set[StoredSpan]()
        self._last_file_number = 0
        self.connection = StoreConnection(self.path, span_format, self._adopt, self.warnings)
        self.formats = self.connection.formats
        self.writer = ThreadPoolExecutor(1, "retain-disk", _init_writer_thread)

    def _adopt(self, spans: Sequence[StoredSpan | None]) -> list[int]:
        """Index what the folder has, the last used first, and forget other spans.

        Returns the file numbers of those beyond the capacity.
        """
        found = {span.file_number: span for span in spans if span}
        excess = []
        with self._lock:
            for span in self.span_index:
                assert isinstance(span, StoredSpan)
                known = found.get(span.file_number)
                if known and known.row_checksum == span.row_checksum:
                    del found[span.file_number]  # readers may hold the one that is indexed
                else:
                    self.span_index.remove(span)
            for number, stored in found.items():
                self._last_file_number = max(self._last_file_number, number)
                if self.span_index.used_bytes + stored.size <= self.options.capacity:
                    self.span_index.add(stored)
                else:
                    excess.append(number)
            self.counts["damaged"] += (num_damaged := spans.count(None))
        self._log_event("opened")
        if excess or num_damaged:
            log.info("tier disk: dropped %d damaged spans, and %d beyond the capacity", num_damaged, len(excess))
        return excess

    def _log_event(self, event: str) -> None:
        spans = len(self.span_index.spans)
        size = self.span_index.used_bytes / 2**20
        log.info("tier disk: %s %s, %d spans, %.1f MiB; %s", event, self.path, spans, size, self.counts)

    # ---- called by the engine ------------------------------------------------------------------------------------

    def find(self, key: bytes) -> tuple[Span, int] | None:
        """Return the span that has the key, and the key's index in it."""
        return self.span_index.find(key)

    def touch(self, spans: Sequence[Span]) -> None:
        """Record a use of these spans. The database gets it with the next write."""
        with self._lock:
            self.span_index.touch(spans)
            self._touched_spans |= {s for s in spans if isinstance(s, StoredSpan)}

    def time_limit(self, compute_seconds: float | None) -> float:
        """Return no limit: reads of a local disk are not given up."""
        return inf

    def contains(self, key: bytes) -> bool:
        """Whether a span has the key, or a span that is being written will have it."""
        return key in self._in_flight_keys or self.span_index.find(key) is not None

    def accepts(self, size: int) -> bool:
        """Whether a span of this many bytes fits, the folder can be written, and not too much waits for that."""
        if size > self.span_index.capacity:
            return False
        if not self.connection.is_writable:
            self.counts["skipped"] += 1
            return False
        is_full = self._queued_bytes + size > MAX_QUEUED_BYTES
        if is_full:
            self.counts["skipped"] += 1
            self.warnings.warn("tier disk: too slow, spans are skipped because too many bytes wait to be written")
        return not is_full

    def put(self, span: Span, data: Bytes, replaces: Span | None = None) -> None:
        """Write a span in the background."""
        with self._lock:
            self._in_flight_keys |= set(span.keys)
            self._queued_bytes += span.size
        self.writer.submit(self._write, span, data, replaces)

    def open(self, span: Span, deadline: float = inf) -> DiskReader:
        """Open a span's file for reading. Raises OSError."""
        assert isinstance(span, StoredSpan)
        return DiskReader(span, open_direct(span_file(self.path, span.file_number), os.O_RDONLY), self.begin_read)

    def delete(self, span: Span, is_corrupted: bool = False) -> None:
        """Remove a span from the index at once, and its file in the background."""
        assert isinstance(span, StoredSpan)
        with self._lock:
            was_indexed = self.span_index.remove(span)
            self.counts["damaged"] += is_corrupted and was_indexed
        if was_indexed:
            self.writer.submit(self._run_logged, "delete a span", lambda index: index.delete([span.file_number]))

    def begin_read(self, num_bytes: int) -> None:
        """Count a read, and wait until the limit on reads allows it."""
        with self._lock:
            self.counts["read"] += num_bytes
        self.throttle.wait(num_bytes)

    def stats(self) -> dict[str, Any]:
        """Return spans, bytes and capacity, and the counts since the store was opened."""
        return {"tier": self.name, **self.span_index.stats(), **self.counts}

    def sync(self) -> None:
        """Wait until all spans that were put are written."""
        self.writer.submit(lambda: None).result()

    def verify(self) -> int:
        """Read every span, and delete those whose bytes have changed. Returns their number."""
        num_damaged = 0
        for span in self.span_index:
            try:
                with closing(self.open(span)) as file:
                    for layer, blocks in enumerate(span.num_blocks):
                        file.read_blocks(layer, 0, blocks)
                    file.read_metadata()
            except OSError:
                self.delete(span, is_corrupted=True)
                num_damaged += 1
        log.info("tier disk: verified %s; dropped %d damaged spans", self.path, num_damaged)
        return num_damaged

    def clear(self) -> None:
        """Delete every span."""
        spans = list(self.span_index)
        for span in spans:
            if not self.connection.is_writable:  # a full disk can be written again once files are gone
                self._remove_unindexed(span)
            self.delete(span)
        log.info("tier disk: cleared %s; dropped %d spans", self.path, len(spans))

    def _remove_unindexed(self, span: Span) -> None:
        """Remove the file of a span whose row cannot be removed. The row counts as damage later."""
        assert isinstance(span, StoredSpan)
        with suppress(OSError):
            remove_file(span_file(self.path, span.file_number))
            self.connection.breaker.close()

    def close(self) -> None:
        """Finish pending writes, and let other processes use the folder."""
        self.writer.submit(self._save_usage)
        try:
            self.writer.shutdown()
        finally:
            self.connection.close()
            self.warnings.close()
            self._log_event("closed")

    # ---- run by the writer thread --------------------------------------------------------------------------------

    def _write(self, span: Span, data: Bytes, replaces: Span | None) -> None:
        self._run_logged("write a span", lambda index: self._publish(index, span, data, replaces))
        with self._lock:
            self._queued_bytes -= span.size
            self._in_flight_keys -= set(span.keys)
        self._save_usage()

    def _save_usage(self) -> None:
        with self._lock:
            spans = self._touched_spans
            self._touched_spans = set()
        if spans:
            self._run_logged("save when spans were used", lambda index: index.update_usage(list(spans)))

    def _run_logged(self, action: str, task: Callable[[StoreIndex], None]) -> None:
        """Run a task. If it fails, as on a full disk, count and log that; requests go on without the span."""
        index = self.connection.get_index()
        if not index:
            self.counts["skipped"] += 1
            return
        try:
            task(index)
        except Exception as error:
            self.counts["failed"] += 1
            self.warnings.warn(f"tier disk: cannot {action} in {self.path}", error)
            self.connection.on_error(error)

    def _publish(self, index: StoreIndex, span: Span, data: Bytes, replaces: Span | None) -> None:
        with self._lock:
            if replaces and replaces not in self.span_index.spans:
                return  # it was deleted, or replaced already
            victims = self.span_index.make_room(span.size, replaces=replaces)
        if victims is None:
            return
        self.counts["evicted"] += len(victims)
        index.delete([s.file_number for s in victims if isinstance(s, StoredSpan)])
        self._last_file_number += 1
        stored = StoredSpan.from_span(span, self._last_file_number, span_checksums(span, data))
        file = span_file(self.path, stored.file_number)
        draft = file.with_suffix(".tmp")
        try:
            write_and_sync(draft, data)
            draft.rename(file)
            sync_folder(file.parent)
            index.add(stored, replaces.file_number if isinstance(replaces, StoredSpan) else None)
        except BaseException:
            for path in (draft, file):
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            raise
        with self._lock:
            self.counts["written"] += span.size
            self.span_index.add(stored)
            if replaces:
                self.span_index.remove(replaces)


def _init_writer_thread() -> None:
    """Let the writer run on any core, and below the priority of threads that compute."""
    reset_cpu_affinity()
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def expand_path(path: str) -> Path:
    """Return a path with `~` replaced. Raises ValueError."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"disk: path={path}: there is no such user") from None
