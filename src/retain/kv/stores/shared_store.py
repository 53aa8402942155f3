"""A store of spans in a bucket that many engines use, and that may be away, slow or damaged."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import inf
from time import monotonic

from retain.kv.stores.bucket import Bucket
from retain.kv.stores.catalog import NUM_THREADS
from retain.kv.stores.reader import RANGE_BYTES, Read, ReadAhead, SpanReader
from retain.kv.stores.span import Span, SpanFormat
from retain.kv.stores.store import Store
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


def load_time_limit(compute_seconds: float | None) -> float:
    """Return the seconds that a load may take: a fifth of computing, and 0.2 more, so that trying costs little."""
    return FIRST_SECONDS if compute_seconds is None else SHARE_OF_COMPUTE * compute_seconds + EXTRA_SECONDS


class SharedStore(Store):
    """A store of which this engine knows what a thread has listed.

    Lookups never wait. A miss lists the bucket again, at most once each `refresh` seconds. While the breaker is open
    nothing is found, and the thread probes the bucket by listing it.
    """

    is_shared = True
    distance = 2
    max_queued_bytes = 2**28
    num_writers = 2

    def __init__(self, bucket: Bucket, span_format: SpanFormat, timeout: float, refresh: float):
        super().__init__(bucket, span_format, folder=span_format.fingerprint.hex(), max_objects=MAX_OBJECTS)
        # Objects of a range or more where pages are small: a request costs milliseconds, whatever its size.
        self.max_keys = min(max(16, -(-RANGE_BYTES // max(span_format.page_bytes, 1))), 256)
        self.timeout = timeout
        self.refresh = refresh
        self.readers = ThreadPoolExecutor(NUM_READ_THREADS, f"retain-{self.name}-read", reset_cpu_affinity)
        self._requested = threading.Event()
        self._listed = threading.Condition()
        self._num_started = self._num_finished = 0  # listings, from the first name to the last
        self._is_resumed = False  # after a failure
        self._next_at = 0.0  # when a miss may ask for a listing again
        self._thread = threading.Thread(target=self._run, name=f"retain-{self.name}-list", daemon=True)
        self._thread.start()
        self.wait_listed(min(timeout, START_SECONDS))  # so that the first request finds what there is
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
                self.catalog.add(replace(stored, modified_at=inf))
                return
            info = self.bucket.find(stored.name)  # another engine was faster
        self._count("known")
        if info:
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
