"""Where stores keep bytes: objects by name, in memory, in a folder or in an object store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from retain.types import Bytes


@dataclass(frozen=True)
class ObjectInfo:
    """An object as a store lists it."""

    name: str
    size: int
    modified_at: float  # seconds since 1970, by the store's clock


class OpenObject(Protocol):
    """An object whose bytes stay readable when it is deleted or written anew."""

    def read(self, begin: int, end: int) -> Bytes:
        """Read bytes `begin` to `end`, fewer where it ends earlier. They are valid until this thread reads again."""

    def close(self) -> None:
        """Release the object."""


class Bucket(Protocol):
    """The objects of a place.

    Errors are OSError. A missing object is FileNotFoundError, one that may not be read is PermissionError.
    """

    url: str

    def get(self, name: str, begin: int, end: int) -> Bytes:
        """Read bytes `begin` to `end` of an object; fewer where it ends earlier."""

    def put(self, name: str, parts: Sequence[Any], overwrite: bool = False) -> bool:
        """Write an object of these buffers in one piece. False where it exists and must not be overwritten."""

    def find(self, name: str) -> ObjectInfo | None:
        """Return what the store says of an object, None where it is missing."""

    def list(self, folder: str, after: str = "") -> Iterator[ObjectInfo]:
        """Yield every object whose name begins with `folder` and a slash, or all objects for an empty one.

        They come by name, and only those after `after`.
        """

    def delete(self, name: str) -> None:
        """Delete an object, if it is there."""


class LocalBucket(Bucket, Protocol):
    """The objects of this machine."""

    def open(self, name: str) -> OpenObject:
        """Open an object. Raises OSError."""
