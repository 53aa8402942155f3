"""Objects in the memory of this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import time

import numpy as np

from retain.kv.stores.bucket import ObjectInfo
from retain.types import Bytes


@dataclass(frozen=True)
class Buffer:
    """The bytes of an object."""

    data: Bytes
    modified_at: float

    def read(self, begin: int, end: int) -> Bytes:
        """Return a view of bytes `begin` to `end`."""
        return self.data[begin:end]

    def close(self) -> None:
        """Do nothing."""


class Memory:
    """Buffers by name. See `LocalBucket` for the methods. An object of one part is kept without a copy."""

    url = "memory"

    def __init__(self) -> None:
        self.objects: dict[str, Buffer] = {}

    def open(self, name: str) -> Buffer:
        """Return an object."""
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
        self.objects[name] = Buffer(buffers[0] if len(buffers) == 1 else np.concatenate(buffers), time())
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
