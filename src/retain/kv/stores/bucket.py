"""Where stores keep bytes: objects by name, in memory (here), in a folder or in an object store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import time
from typing import Any, Protocol

import numpy as np

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
        """Free what reading the object holds open."""


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


@dataclass(frozen=True)
class HeldObject:
    """An object of a bucket whose bytes are in memory."""

    data: Bytes
    modified_at: float

    def read(self, begin: int, end: int) -> Bytes:
        """Return a view of bytes `begin` to `end`."""
        return self.data[begin:end]

    def close(self) -> None:
        """Do nothing: the bytes stay in memory."""


class Memory:
    """Buffers by name. See `LocalBucket` for the methods. An object of one part is kept without a copy."""

    url = "memory"

    def __init__(self) -> None:
        self.objects: dict[str, HeldObject] = {}

    def open(self, name: str) -> HeldObject:
        """Return the object of that name. Raises FileNotFoundError."""
        try:
            return self.objects[name]
        except KeyError:
            raise FileNotFoundError(f"there is no object {name}") from None

    def get(self, name: str, begin: int, end: int) -> Bytes:
        """Return a view of bytes `begin` to `end` of an object."""
        return self.open(name).read(begin, end)

    def put(self, name: str, parts: Sequence[memoryview], overwrite: bool = False) -> bool:
        """Keep an object. False where it exists and must not be overwritten."""
        if name in self.objects and not overwrite:
            return False
        buffers = [np.frombuffer(part, np.uint8) for part in parts if len(part)]
        self.objects[name] = HeldObject(buffers[0] if len(buffers) == 1 else np.concatenate(buffers), time())
        return True

    def find(self, name: str) -> ObjectInfo | None:
        """Return the size and age of an object, None where it is missing."""
        found = self.objects.get(name)
        return ObjectInfo(name, len(found.data), found.modified_at) if found else None

    def list(self, folder: str, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects in a folder, or all for an empty name, by name; only those after `after`."""
        prefix = f"{folder}/" if folder else ""
        infos = map(self.find, sorted(n for n in self.objects if n.startswith(prefix) and n > after))
        yield from (info for info in infos if info)

    def delete(self, name: str) -> None:
        """Forget an object, if it is there."""
        self.objects.pop(name, None)
