"""The remote tier: an object store that many engines share, in S3, Google Cloud Storage, Azure or a folder.

What one engine computes, all engines of the same model, precision and machine kind load. Objects are immutable and
named by their content, so writers never conflict. A bucket is not trusted to be there, fast, complete or undamaged:
that costs time, at most a fifth of what computing takes, and never a token. Who can write into the bucket can change
answers, and who can read it can read texts' keys and values: keep it private.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from retain.kv.stores.bucket import Bucket
from retain.kv.stores.folder import Folder
from retain.kv.stores.object_store import ObjectStore
from retain.kv.stores.shared_store import SharedStore
from retain.kv.stores.span import UNKNOWN_FORMAT, SpanFormat
from retain.kv.stores.throttle import Throttle
from retain.options import Bounds, Size, check_bounds


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
        store = RemoteStore(self.open_bucket(), span_format, self.timeout, self.refresh)
        store.throttle = Throttle(self.read)
        return store

    def open_bucket(self) -> Bucket:
        """Return a client of the objects."""
        if not self.url.startswith("file://") or self.endpoint or self.region:
            return ObjectStore(self.url, self.endpoint, self.region, self.timeout)
        path = Path(self.url.removeprefix("file://"))
        if not path.is_absolute():
            raise ValueError(f"remote: url={self.url} should be file:// and an absolute path")
        return Folder(path)


class RemoteStore(SharedStore):
    """A store in an object store, or in a folder that engines share."""

    name = "remote"
