"""A store of spans in a bucket that one engine uses; `tiers/remote.py` has what differs where many do."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from time import time
from typing import Any

from retain.kv.stores.bucket import Bucket, LocalBucket, ObjectInfo
from retain.kv.stores.catalog import Catalog
from retain.kv.stores.circuit_breaker import CircuitBreaker
from retain.kv.stores.index import SpanIndex
from retain.kv.stores.reader import Read, SpanReader
from retain.kv.stores.span import Span, SpanFormat
from retain.kv.stores.span_file import decode_header, encode_header, span_name
from retain.kv.stores.throttle import Throttle
from retain.kv.stores.warning_log import WarningLog
from retain.threads import reset_cpu_affinity
from retain.types import Bytes, Ints

UNLIMITED = 2**62  # bytes, or objects
EVENTS = ("written", "read", "evicted", "known", "damaged", "missing", "failed", "skipped")

log = logging.getLogger(__name__)


class Store:
    """A set of spans in a bucket. Subclasses say whose it is, and where.

    Methods may be called while other threads read; only `open` raises.
    """

    name: str  # of its tier
    max_keys = 16  # most keys of a span
    write_through = True  # it takes pages when they are computed. False: when the pool evicts them
    is_shared = False  # whether other engines use its spans, too
    distance = 1  # the nearest stores are searched first
    max_queued_bytes = 2**29  # bytes that may wait to be written
    num_writers = 1

    def __init__(
        self,
        bucket: Bucket,
        span_format: SpanFormat,
        capacity: int = UNLIMITED,
        replacement: str = "lru",
        folder: str = "",
        max_objects: int = UNLIMITED,
    ):
        self.bucket = bucket
        self.span_format = span_format
        self.span_index = SpanIndex(capacity, replacement)
        self.counts = dict.fromkeys(EVENTS, 0)
        self.warnings = WarningLog(log)
        self.throttle = Throttle(None)
        self.breaker = CircuitBreaker()
        self.catalog = Catalog(bucket, folder, self.span_index, max_objects, self.warnings, self.name)
        self.formats = self.catalog.formats
        if span_format.description:
            self.formats[span_format.fingerprint] = span_format.description
        self._lock = threading.RLock()  # for what follows, and the counts
        self._queued_bytes = 0
        self._in_flight = dict[bytes, Span]()  # spans that are being written, by each of their keys
        self._tasks = set[Future[None]]()
        self.writers = ThreadPoolExecutor(self.num_writers, f"retain-{self.name}", _init_writer)

    # ---- called by the engine ------------------------------------------------------------------------------------

    def find(self, key: bytes) -> tuple[Span, int] | None:
        """Return the span that has the key, and the key's index in it."""
        return self.span_index.find(key)

    def touch(self, spans: Sequence[Span]) -> None:
        """Record a use of these spans."""
        with self.catalog.lock:
            self.span_index.touch(spans)

    @property
    def latency(self) -> float:
        """Seconds until the first byte of a read, about."""
        return 0.0

    def time_limit(self, compute_seconds: float | None) -> float:
        """Return the seconds that a load may take of tokens that take `compute_seconds` to compute (None: unknown)."""
        return inf

    def contains(self, key: bytes) -> bool:
        """Whether a span has the key, or a span that is being written will have it."""
        return key in self._in_flight or self.span_index.find(key) is not None

    def accepts(self, size: int) -> bool:
        """Whether a span of this many bytes fits, the bucket can be written, and not too much waits for that."""
        if size > self.span_index.capacity:
            return False
        is_away = bool(self.breaker.seconds_until_probe)
        if is_away or self._queued_bytes + size > self.max_queued_bytes:
            self._count("skipped")
            self.warnings.warn(f"tier {self.name}: {'away' if is_away else 'too slow'}, spans are skipped")
            return False
        return True

    def put(self, span: Span, data: Bytes, replaces: Span | None = None) -> None:
        """Keep a span, now or in the background. The store owns `data` [span.size] from here on.

        It takes the place of `replaces`, a span with the same keys. Open readers of that one go on.
        """
        with self._lock:
            self._in_flight |= dict.fromkeys(span.keys, span)
            self._queued_bytes += span.size
        self._submit(self._write, span, data, replaces)

    def open(self, span: Span, deadline: float = inf) -> SpanReader:
        """Open a span for reading; it stays readable if the store evicts it. Raises OSError.

        Readers of stores with a time limit raise TimeoutError after `deadline`, a time of `monotonic`.
        """
        opened = self._local.open(span.name)
        return SpanReader(span, partial(self._read, opened.read), opened.close)

    def delete(self, span: Span, is_corrupted: bool = False) -> None:
        """Remove a span from the index at once, and its bytes in the background."""
        if self.catalog.drop(span, is_unusable=True):
            self._count("damaged", int(is_corrupted))
            self._submit(self._change, "delete a span", self._delete_unusable)

    def delete_salt(self, digest: bytes) -> None:
        """Remove the spans of a salt, or of all salts whose digests begin so. Spans of files that lack one stay."""
        self._delete_where(lambda span: span.salt_digest.startswith(digest))

    def delete_keys(self, keys: Collection[bytes]) -> None:
        """Remove the spans that have one of these keys."""
        wanted = set(keys)
        self._delete_where(lambda span: not wanted.isdisjoint(span.keys), wanted)

    def _delete_where(self, is_meant: Callable[[Span], bool], keys: Collection[bytes] | None = None) -> None:
        """Remove spans, also those that are being written; with `keys` those that are indexed by one of them.

        They are no longer found when this returns. Their bytes are deleted in the background.
        """
        with self._lock:
            self._in_flight = {key: span for key, span in self._in_flight.items() if not is_meant(span)}
            with self.catalog.lock:
                indexed = self.span_index.spans if keys is None else self.span_index.spans_of(keys)
                found = [span for span in indexed if is_meant(span)]
            for span in found:
                self.catalog.drop(span, is_unusable=True)
        self._submit(self._change, "delete spans", partial(self._delete_names, [span.name for span in found]))

    def stats(self) -> dict[str, Any]:
        """Return spans, bytes and capacity, and the counts since the store was opened."""
        return {"tier": self.name, **self.span_index.stats(), **self.counts}

    def sync(self) -> None:
        """Wait until all spans that were put are written."""
        while tasks := list(self._tasks):
            for task in tasks:
                task.exception()
                self._tasks.discard(task)

    def close(self) -> None:
        """Wait for the pending writes, then stop the threads of the store."""
        self.writers.shutdown()
        self.warnings.close()
        self._log_event("closed")

    # ---- in the background ---------------------------------------------------------------------------------------

    @property
    def _local(self) -> LocalBucket:
        return self.bucket  # type: ignore[return-value]

    def _count(self, event: str, n: int = 1) -> None:
        with self._lock:
            self.counts[event] += n

    def _log_event(self, event: str) -> None:
        size = self.span_index.used_bytes / 2**20
        place = f"{self.bucket.url}, {len(self.span_index.spans)} spans, {size:.1f} MiB"
        log.info("tier %s: %s %s; %s", self.name, event, place, self.counts)

    def _submit(self, task: Callable[..., None], *args: Any) -> None:
        with self._lock:
            self._tasks.add(future := self.writers.submit(task, *args))
        future.add_done_callback(self._tasks.discard)

    def _read(self, read: Read, begin: int, end: int) -> Bytes:
        self._count("read", end - begin)
        self.throttle.wait(end - begin)
        return read(begin, end)

    def _write(self, span: Span, data: Bytes, replaces: Span | None) -> None:
        self._change("write a span", lambda: self._publish(span, data, replaces))
        with self._lock:
            self._queued_bytes -= span.size
            for key in span.keys:
                if self._in_flight.get(key) is span:
                    del self._in_flight[key]

    def _change(self, action: str, task: Callable[[], None]) -> None:
        """Change the bucket. If that fails, as on a full disk, nothing is stored for a while; requests go on."""
        if self.breaker.seconds_until_probe:
            self._count("skipped")
            return
        try:
            task()
        except Exception as error:
            self._count("failed")
            self._fail(f"cannot {action}", error)

    def _fail(self, problem: str, error: Exception) -> None:
        self.breaker.record_failure()
        self.warnings.warn(f"tier {self.name}: {self.bucket.url}: {problem}", error)

    def _encode(self, span: Span, data: Bytes) -> tuple[bytes, Span]:
        """Return the header of a span's file, and the span as it is stored."""
        header = encode_header(self.span_format, span, data)
        name = span_name(self.span_format.fingerprint, span.keys, span.is_reordered)
        return header, decode_header(header, ObjectInfo(name, len(header) + span.size, time()))[0]

    def _publish(self, span: Span, data: Bytes, replaces: Span | None) -> None:
        """Write a span and index it."""
        header, stored = self._encode(span, data)
        stored.hits = span.hits
        stored.last_used_at = span.last_used_at
        if replaces and replaces not in self.span_index.spans:
            return  # it was deleted, or replaced already
        num_victims = self.catalog.evict(stored.size, replaces)
        if num_victims is None:
            return
        self._count("evicted", num_victims)
        self._delete_unusable()
        if not self.bucket.put(stored.name, (header, data.data), overwrite=True):
            raise FileExistsError(f"something else has the name {stored.name}")
        self._count("written", stored.size)
        self._index(span, stored)
        self._delete_unusable()

    def _is_wanted(self, span: Span) -> bool:
        """Return whether a span that is being written was not deleted meanwhile. Its first key is its own."""
        return self._in_flight.get(span.keys[0]) is span

    def _index(self, span: Span, stored: Span) -> None:
        """Index what was written of a span, unless its salt was deleted meanwhile."""
        with self._lock:
            if self._is_wanted(span):
                self.catalog.add(stored)
                return
            if stored.name in self.catalog.span_of_name:
                return  # it was put again
        self._delete_names([stored.name])

    def _delete_names(self, names: Sequence[str]) -> None:
        """Delete objects that nobody wants any more."""
        for name in names:
            self.bucket.delete(name)
            self.catalog.unusable.pop(name, None)

    def _delete_unusable(self) -> None:
        """Delete what is damaged or not wanted any more, also what could not be deleted before."""
        for name in list(self.catalog.unusable):
            self.bucket.delete(name)
            self.catalog.unusable.pop(name, None)


@dataclass(frozen=True)
class SpanRange:
    """Keys `begin` to `end` of a span and their blocks, or the whole of a span of another kind than text."""

    store: Store
    span: Span
    begin: int
    end: int


@dataclass(frozen=True)
class ReadJob:
    """Blocks of one layer of a span, to be read into pages [blocks, G] of a pool, by its number.

    Those of a text get the positions from `start_position` on. Of others they are in the blocks, or known later.
    """

    store: Store
    span: Span
    layer: int  # of the span
    start_block: int
    pages: Ints
    pool: int = 0
    start_position: int = 0


def _init_writer() -> None:
    """Let a writer run on any core, and below the priority of threads that compute."""
    reset_cpu_affinity()
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
