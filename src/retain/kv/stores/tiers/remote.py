"""The remote tier: an object store that many engines share, in S3, Google Cloud Storage, Azure or a folder.

What one engine computes, all engines of the same model, precision and machine kind load. Objects are immutable and
named by their content, so writers never conflict. A bucket is not trusted to be there, fast, complete or undamaged:
that costs time, at most a fifth of what computing takes, and never a token. Who can write into the bucket can change
answers, and who can read it can read texts' keys and values: keep it private.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic
from typing import Annotated

from retain.kv.stores.bucket import Bucket
from retain.kv.stores.catalog import NUM_THREADS
from retain.kv.stores.folder import Folder
from retain.kv.stores.object_store import ObjectStore
from retain.kv.stores.reader import RANGE_BYTES, Read, ReadAhead, SpanReader
from retain.kv.stores.span import UNKNOWN_FORMAT, Span, SpanFormat
from retain.kv.stores.store import Store
from retain.kv.stores.throttle import Throttle
from retain.options import Bounds, Size, check_bounds
from retain.threads import reset_cpu_affinity
from retain.types import Bytes

MAX_OBJECTS = 100_000
NUM_READ_THREADS = 4
START_SECONDS = 1.0  # that the first listing gets
CLOSE_SECONDS = 10.0  # that pending writes get when the store is closed
# See load_time_limit.
SHARE_OF_COMPUTE = 0.2
EXTRA_SECONDS = 0.2
FIRST_SECONDS = 1.0


@dataclass(frozen=True)
class Tier:
    """Options of the remote tier; a wrong one raises ValueError. Credentials come from the environment."""

    url: str  # s3://bucket/folder, gs://, az://, file:///folder
    endpoint: str | None = None  # of a store that speaks S3: http://127.0.0.1:8333
    region: str | None = None  # of S3
    timeout: Annotated[float, Bounds(0, 3600, above=True)] = 10.0  # seconds that one answer may take
    refresh: Annotated[float, Bounds(0, 86400, above=True)] = 5.0  # seconds between two listings, at least
    read: Size | None = None  # most bytes read per second

    def __post_init__(self) -> None:
        check_bounds(self)

    def of_rank(self, rank: int, size: int) -> Tier:
        """Return the tier of a rank: the same, where the fingerprints of its spans differ from others'."""
        return self

    def open(self, span_format: SpanFormat = UNKNOWN_FORMAT) -> RemoteStore:
        """Open the store. It waits a second at most for the first listing, and for nothing afterwards."""
        return RemoteStore(self, span_format)

    def open_bucket(self) -> Bucket:
        """Return a client of the objects."""
        if not self.url.startswith("file://") or self.endpoint or self.region:
            return ObjectStore(self.url, self.endpoint, self.region, self.timeout)
        path = Path(self.url.removeprefix("file://"))
        if not path.is_absolute():
            raise ValueError(f"remote: url={self.url} should be file:// and an absolute path")
        return Folder(path)


class RemoteStore(Store):
    """A store of which this engine knows what a thread has listed.

    Lookups never wait. A miss lists the bucket again, at most once each `refresh` seconds. While the breaker is open
    nothing is found, and the thread probes the bucket by listing it.
    """

    name = "remote"
    is_shared = True
    distance = 2
    max_queued_bytes = 2**28
    num_writers = 2

    def __init__(self, options: Tier, span_format: SpanFormat):
        bucket = options.open_bucket()
        super().__init__(bucket, span_format, folder=span_format.fingerprint.hex(), max_objects=MAX_OBJECTS)
        self.throttle = Throttle(options.read)
        # Objects of a range or more where pages are small: a request costs milliseconds, whatever its size.
        self.max_keys = min(max(16, -(-RANGE_BYTES // max(span_format.page_bytes, 1))), 256)
        self.timeout = options.timeout
        self.refresh = options.refresh
        self.readers = ThreadPoolExecutor(NUM_READ_THREADS, f"retain-{self.name}-read", reset_cpu_affinity)
        self._requested = threading.Event()
        self._listed = threading.Condition()
        self._num_started = self._num_finished = 0  # listings, from the first name to the last
        self._is_resumed = False  # after a failure
        self._next_at = 0.0  # when a miss may ask for a listing again
        self._thread = threading.Thread(target=self._run, name=f"retain-{self.name}-list", daemon=True)
        self._thread.start()
        self.wait_listed(min(self.timeout, START_SECONDS))  # so that the first request finds what there is
        self._log_event("opened")

    # ---- called by the engine ------------------------------------------------------------------------------------

    def find(self, key: bytes) -> tuple[Span, int] | None:
        """Return the span that has the key, and the key's index in it, as far as this engine knows."""
        if self.breaker.is_open:
            self._requested.set()  # the thread begins to wait for the probe
            return None
        found = super().find(key)
        if not found and monotonic() >= self._next_at:
            self._requested.set()
        return found

    @property
    def latency(self) -> float:
        """Seconds that an answer with few bytes took, on average."""
        return self.catalog.latency

    def time_limit(self, compute_seconds: float | None) -> float:
        """Return the seconds that a load may take. See `load_time_limit`."""
        return load_time_limit(compute_seconds)

    def open(self, span: Span, deadline: float = inf) -> SpanReader:
        """Open a span for reading until `deadline`; the bucket is asked when blocks are read."""
        fetch = partial(self._fetch, partial(self.bucket.get, span.name))
        ahead = ReadAhead(span, lambda *ends: self.readers.submit(fetch, *ends), self.breaker, deadline)
        return SpanReader(span, ahead.read, ahead.close)

    def delete(self, span: Span, is_corrupted: bool = False) -> None:
        """Forget a span. A damaged object is ignored from here on, and replaced when its text is computed again."""
        if self.catalog.drop(span, is_unusable=is_corrupted):
            self._count("damaged", int(is_corrupted))

    def stats(self) -> dict[str, object]:
        """Return spans and bytes that this engine knows of, and the counts since the store was opened."""
        return super().stats() | {"unusable": len(self.catalog.unusable), "opened": self.breaker.num_openings}

    def sync(self) -> None:
        """Wait until all spans that were put are written, and until what the bucket has is known."""
        super().sync()
        self.wait_listed(self.timeout)

    def wait_listed(self, timeout: float) -> None:
        """Wait until a listing that starts now is done, or `timeout` seconds have passed."""
        with self._listed:
            goal = self._num_started + 1
            self._requested.set()
            self._listed.wait_for(lambda: self._num_finished >= goal or self.catalog.is_closed, timeout)

    def close(self) -> None:
        """Finish pending writes, as far as they are done within a few seconds."""
        end = monotonic() + CLOSE_SECONDS
        for task in list(self._tasks):
            try:
                task.exception(timeout=max(end - monotonic(), 0))
            except TimeoutError:
                self._count("skipped")
        self.catalog.is_closed = True
        self._requested.set()
        with self._listed:
            self._listed.notify_all()
        for executor in (self.writers, self.readers):
            executor.shutdown(wait=False, cancel_futures=True)
        self.warnings.close()
        self._log_event("closed")

    # ---- in the background ---------------------------------------------------------------------------------------

    def _fetch(self, read: Read, begin: int, end: int) -> Bytes:
        """Read a range of an object. Raises OSError."""
        try:
            return self._read(read, begin, end)
        except FileNotFoundError:
            self._count("missing")
            raise
        except OSError:
            self._count("failed")
            self.breaker.record_failure()
            raise

    def _publish(self, span: Span, data: Bytes, replaces: Span | None) -> None:
        """Write an object and index it. One that another engine has written is only indexed."""
        header, stored = self._encode(span, data)
        is_repair = stored.name in self.catalog.unusable
        info = None if is_repair else self.bucket.find(stored.name)
        if info is None:
            if self.bucket.put(stored.name, (header, data.data), overwrite=is_repair):
                self._count("written", stored.size)
                self._index(span, replace(stored, modified_at=inf))
                return
            info = self.bucket.find(stored.name)  # another engine was faster
        self._count("known")
        if info and self._is_wanted(span):
            self.catalog.read_header(info)

    def _run(self) -> None:
        reset_cpu_affinity()
        with ThreadPoolExecutor(NUM_THREADS, f"retain-{self.name}-headers", reset_cpu_affinity) as executor:
            while not self.catalog.is_closed:
                if self._requested.wait(self.breaker.seconds_until_probe) or self.breaker.is_open:
                    self._requested.clear()
                    if not self.breaker.seconds_until_probe and not self.catalog.is_closed:
                        self._list(executor)

    def _list(self, executor: ThreadPoolExecutor) -> None:
        with self._listed:
            if self._num_started == self._num_finished:
                self._num_started += 1
        try:
            self.catalog.update(executor)
            self.breaker.close()
        except Exception as error:
            self._is_resumed = bool(self.catalog.listed_to)
            self._fail("cannot list", error)
        else:
            if self.catalog.listed_to or self._is_resumed:  # what came since below that name is unknown
                self._is_resumed = self._is_resumed and bool(self.catalog.listed_to)
                self._requested.set()
                return
        with self._listed:
            self._num_finished = self._num_started
            self._next_at = monotonic() + self.refresh
            self._listed.notify_all()


def load_time_limit(compute_seconds: float | None) -> float:
    """Return the seconds that a load may take: a fifth of computing, and 0.2 more, so that trying costs little."""
    return FIRST_SECONDS if compute_seconds is None else SHARE_OF_COMPUTE * compute_seconds + EXTRA_SECONDS
