"""The remote tier: an object store that many engines share, in S3, Google Cloud Storage, Azure or a folder.

What one engine computes, all engines of the same model, precision and machine kind load. Objects are immutable and
named by their content, so writers never conflict. A bucket is not trusted to be there, fast, complete or undamaged:
that costs time, at most a fifth of what computing takes, and never a token. Who can write into the bucket can change
answers, and who can read it can read texts' keys and values: keep it private.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import inf
from time import monotonic
from typing import Annotated, Any

from retain.kv.stores.circuit_breaker import CircuitBreaker
from retain.kv.stores.remote.bucket import Bucket, ObjectInfo, ObjectStore
from retain.kv.stores.remote.folder import Folder
from retain.kv.stores.remote.index import RemoteIndex
from retain.kv.stores.remote.object_format import RemoteSpan, decode_header, encode_header, object_name
from retain.kv.stores.remote.reader import RANGE_BYTES, RemoteReader
from retain.kv.stores.span import UNKNOWN_FORMAT, CorruptionError, Span, SpanFormat
from retain.kv.stores.throttle import Throttle
from retain.kv.stores.warning_log import WarningLog
from retain.options import Bounds, Size, check_bounds
from retain.threads import reset_cpu_affinity
from retain.types import Bytes

log = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 2**28  # bytes that may wait to be written
NUM_READ_THREADS = 4
NUM_WRITE_THREADS = 2
START_SECONDS = 1.0  # that the first listing gets
CLOSE_SECONDS = 10.0  # that pending writes get when the store is closed
# See load_time_limit.
SHARE_OF_COMPUTE = 0.2
EXTRA_SECONDS = 0.2
FIRST_SECONDS = 1.0


@dataclass(frozen=True)
class Tier:
    """Options of the remote tier. Raises ValueError. Credentials come from the environment."""

    url: str  # s3://bucket/folder, gs://, az://, file:///folder
    endpoint: str | None = None  # of a store that speaks S3: http://127.0.0.1:8333
    region: str | None = None  # of S3
    timeout: Annotated[float, Bounds(0, 3600, above=True)] = 10.0  # seconds that one answer may take
    refresh: Annotated[float, Bounds(0, 86400, above=True)] = 5.0  # seconds between two listings, at least
    read: Size | None = None  # most bytes read per second

    def __post_init__(self) -> None:
        check_bounds(self)

    def open(self, span_format: SpanFormat = UNKNOWN_FORMAT) -> RemoteStore:
        """Open the store. It waits a second at most for the first listing, and for nothing afterwards."""
        return RemoteStore(self, self.open_bucket(), span_format)

    def open_bucket(self) -> Bucket:
        """Return a client of the objects."""
        if self.url.startswith("file://") and not (self.endpoint or self.region):
            return Folder(self.url)
        return ObjectStore(self.url, self.endpoint, self.region, self.timeout)


def load_time_limit(compute_seconds: float | None) -> float:
    """Return the seconds that a load may take: a fifth of computing, and 0.2 more, so that trying costs little."""
    return FIRST_SECONDS if compute_seconds is None else SHARE_OF_COMPUTE * compute_seconds + EXTRA_SECONDS


class RemoteStore:
    """A store in a bucket. See `Store` for its methods."""

    name = "remote"
    write_through = True
    is_shared = True
    distance = 2

    def __init__(self, options: Tier, bucket: Bucket, span_format: SpanFormat):
        self.options = options
        self.bucket = bucket
        self.span_format = span_format
        # Objects of a range or more where pages are small: a request costs milliseconds, whatever its size.
        self.max_keys = min(max(16, -(-RANGE_BYTES // max(span_format.page_bytes, 1))), 256)
        self.counts = dict.fromkeys(("written", "read", "known", "damaged", "missing", "failed", "skipped"), 0)
        self.warnings = WarningLog(log)
        self.throttle = Throttle(options.read)
        self.breaker = CircuitBreaker()
        folder = span_format.fingerprint.hex()
        self.index = RemoteIndex(bucket, folder, self.breaker, options.refresh, self.warnings)
        self.formats = {span_format.fingerprint: span_format.description}
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._in_flight_keys = set[bytes]()
        self._writes = set[Future[None]]()
        self.readers = ThreadPoolExecutor(NUM_READ_THREADS, "retain-remote-read", reset_cpu_affinity)
        self.writers = ThreadPoolExecutor(NUM_WRITE_THREADS, "retain-remote-write", reset_cpu_affinity)
        self.index.sync(min(options.timeout, START_SECONDS))  # so that the first request finds what there is
        log.info("tier remote: opened %s, %d spans", options.url, len(self.index.span_index.spans))

    # ---- called by the engine ------------------------------------------------------------------------------------

    def find(self, key: bytes) -> tuple[Span, int] | None:
        """Return the span that has the key, and the key's index in it, as far as this engine knows."""
        return self.index.find(key)

    def touch(self, spans: Sequence[Span]) -> None:
        """Record a use of these spans."""
        self.index.span_index.touch(spans)

    @property
    def latency(self) -> float:
        """Seconds that an answer with few bytes took, on average."""
        return self.index.latency

    def time_limit(self, compute_seconds: float | None) -> float:
        """Return the seconds that a load may take. See `load_time_limit`."""
        return load_time_limit(compute_seconds)

    def contains(self, key: bytes) -> bool:
        """Whether a span has the key, or a span that is being written will have it."""
        return key in self._in_flight_keys or self.index.span_index.find(key) is not None

    def accepts(self, size: int) -> bool:
        """Whether the store answers, and not too much waits to be written."""
        is_accepted = not self.breaker.is_open and self._queued_bytes + size <= MAX_QUEUED_BYTES
        if not is_accepted:
            self._count("skipped")
            self.warnings.warn("tier remote: too slow or away, spans are skipped")
        return is_accepted

    def put(self, span: Span, data: Bytes, replaces: Span | None = None) -> None:
        """Write a span in the background. `replaces` stays in the bucket, for engines that read it."""
        with self._lock:
            self._in_flight_keys |= set(span.keys)
            self._queued_bytes += span.size
            self._writes.add(future := self.writers.submit(self._write, span, data))
        future.add_done_callback(partial(self._finish_write, span))

    def open(self, span: Span, deadline: float = inf) -> RemoteReader:
        """Open a span for reading until `deadline`; the network is asked when blocks are read."""
        assert isinstance(span, RemoteSpan)
        return RemoteReader(span, self._fetch, self.breaker, deadline)

    def delete(self, span: Span, is_corrupted: bool = False) -> None:
        """Forget a span. A damaged object is ignored from here on, and replaced when its text is computed again."""
        assert isinstance(span, RemoteSpan)
        if self.index.drop(span, is_unusable=is_corrupted) and is_corrupted:
            self._count("damaged")

    def stats(self) -> dict[str, Any]:
        """Return spans and bytes that this engine knows of, and the counts since the store was opened."""
        counts = {**self.counts, "unusable": self.index.num_unusable, "opened": self.breaker.num_openings}
        return {"tier": self.name, **self.index.span_index.stats(), **counts}

    def sync(self) -> None:
        """Wait until all spans that were put are written, and until what the bucket has is known."""
        with self._lock:
            writes = list(self._writes)
        for future in writes:
            future.exception()
        self.index.sync(self.options.timeout)

    def close(self) -> None:
        """Finish pending writes, as far as they are done within a few seconds."""
        end = monotonic() + CLOSE_SECONDS
        with self._lock:
            writes = list(self._writes)
        for future in writes:
            try:
                future.exception(timeout=max(end - monotonic(), 0))
            except TimeoutError:
                self._count("skipped")
        self.index.close()
        self.writers.shutdown(wait=False, cancel_futures=True)
        self.readers.shutdown(wait=False, cancel_futures=True)
        self.warnings.close()
        log.info("tier remote: closed %s; %s", self.options.url, self.counts)

    def _count(self, event: str, n: int = 1) -> None:
        with self._lock:
            self.counts[event] += n

    # ---- run by threads ------------------------------------------------------------------------------------------

    def _fetch(self, span: RemoteSpan, begin: int, end: int) -> Future[Bytes]:
        return self.readers.submit(self._read, span, span.data_offset + begin, span.data_offset + end)

    def _read(self, span: RemoteSpan, begin: int, end: int) -> Bytes:
        """Read a range of an object. Raises OSError."""
        self._count("read", end - begin)
        self.throttle.wait(end - begin)
        try:
            data = self.bucket.get(span.name, begin, end)
        except FileNotFoundError:
            self._count("missing")
            raise
        except OSError:
            self._count("failed")
            self.breaker.record_failure()
            raise
        if len(data) < end - begin:
            raise CorruptionError(f"object {span.name} is shorter than it was written")
        return data

    def _write(self, span: Span, data: Bytes) -> None:
        """Write an object and index it. One that another engine has written is only indexed."""
        if self.breaker.is_open:
            self._count("skipped")
            return
        try:
            self._publish(object_name(self.span_format.fingerprint, span.keys, span.is_reordered), span, data)
        except Exception as error:
            self._count("failed")
            self.breaker.record_failure()
            self.warnings.warn(f"tier remote: cannot write to {self.options.url}", error)

    def _publish(self, name: str, span: Span, data: Bytes) -> None:
        is_repair = self.index.is_unusable(name)
        info = None if is_repair else self.bucket.find(name)
        if info is None:
            header = encode_header(self.span_format.fingerprint, span, data, self.span_format.description)
            if self.bucket.put(name, (header, data.data), overwrite=is_repair):
                self._count("written", len(header) + span.size)
                self.index.add(decode_header(header, ObjectInfo(name, len(header) + span.size, inf)))
                return
            info = self.bucket.find(name)  # another engine was faster
        self._count("known")
        if info:
            self.index.read_header(info)

    def _finish_write(self, span: Span, future: Future[None]) -> None:
        with self._lock:
            self._writes.discard(future)
            self._queued_bytes -= span.size
            self._in_flight_keys -= set(span.keys)
