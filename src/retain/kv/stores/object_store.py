"""A client of an object store, by the library obstore: S3, Google Cloud Storage, Azure.

Every call has a time limit and is tried twice at most. Errors are OSError; a missing object is FileNotFoundError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import numpy as np

from retain.kv.stores.bucket import ObjectInfo
from retain.plugins import needs_extra
from retain.types import Bytes

SCHEMES = ("s3", "gs", "az", "file", "memory")
LIST_CHUNK = 1000  # objects of one answer


class ObjectStore:
    """The objects of a bucket. See `Bucket` for the methods. Connects to nothing yet.

    Raises ValueError for a URL that cannot be used.

    Credentials come from the environment, as the provider's own tools take them (AWS_ACCESS_KEY_ID, ...).
    """

    def __init__(self, url: str, endpoint: str | None, region: str | None, timeout: float):
        scheme = url.partition("://")[0]
        if scheme not in SCHEMES or "://" not in url:
            raise ValueError(f"remote: url={url} should begin with {', '.join(f'{s}://' for s in SCHEMES)}")
        with needs_extra("the remote tier", "remote"):
            import obstore
            from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError
            from obstore.store import from_url
        self.url = url
        self._api = obstore
        self._exists = AlreadyExistsError
        self._denied = PermissionDeniedError
        self._error = BaseError
        try:
            self._store: Any = from_url(url, **self._client_options(scheme, endpoint, region, timeout))
        except BaseError as error:
            raise ValueError(f"remote: url={url}: {_first_line(error)}") from None

    def _client_options(self, scheme: str, endpoint: str | None, region: str | None, timeout: float) -> dict[str, Any]:
        config = {key: text for key, text in (("endpoint", endpoint), ("region", region)) if text}
        if config and scheme != "s3":
            raise ValueError(f"remote: endpoint and region are options of s3://, not of {self.url}")
        options: dict[str, Any] = {}
        if scheme != "memory":
            seconds = timedelta(seconds=timeout)
            options["client_options"] = {
                "timeout": seconds,
                "connect_timeout": min(seconds, timedelta(seconds=2)),
                "allow_http": bool(endpoint and endpoint.startswith("http://")),
            }
            waits = {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(milliseconds=200), "base": 2}
            options["retry_config"] = {"max_retries": 1, "retry_timeout": seconds, "backoff": waits}
            options["config"] = config
        return options

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn the library's errors into OSError with one line."""
        try:
            yield
        except self._denied as error:
            raise PermissionError(_first_line(error)) from None
        except self._error as error:
            raise OSError(_first_line(error)) from None

    def get(self, name: str, begin: int, end: int) -> Bytes:
        """Read bytes `begin` to `end` of an object; fewer where it ends earlier."""
        if begin == end:
            return np.empty(0, np.uint8)
        with self._errors():
            return np.frombuffer(memoryview(self._api.get_range(self._store, name, start=begin, end=end)), np.uint8)

    def put(self, name: str, parts: Sequence[Any], overwrite: bool = False) -> bool:
        """Write an object of these buffers in one piece. False where it exists and must not be overwritten."""
        mode: Literal["overwrite", "create"] = "overwrite" if overwrite else "create"
        with self._errors():
            try:
                self._api.put(self._store, name, iter(parts), mode=mode, use_multipart=False)
            except self._exists:
                return False
        return True

    def find(self, name: str) -> ObjectInfo | None:
        """Return what the store says of an object, None where it is missing."""
        try:
            with self._errors():
                return _to_info(self._api.head(self._store, name))
        except FileNotFoundError:
            return None

    def list(self, folder: str, after: str = "") -> Iterator[ObjectInfo]:
        """Yield objects. A bucket that does not exist has none: some stores make it with the first object."""
        try:
            with self._errors():
                listing = self._api.list(self._store, folder or None, offset=after or None, chunk_size=LIST_CHUNK)
                for chunk in listing:
                    yield from map(_to_info, chunk)
        except OSError as error:
            if "404 Not Found" not in str(error):
                raise

    def delete(self, name: str) -> None:
        """Delete an object, if it is there."""
        try:
            with self._errors():
                self._api.delete(self._store, name)
        except FileNotFoundError:
            pass


def _to_info(found: Mapping[str, Any]) -> ObjectInfo:
    return ObjectInfo(found["path"], found["size"], found["last_modified"].timestamp())


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
