"""The head of a GGUF file: its metadata and where each tensor lies. Nothing here knows what either means.

The format (versions 2 and 3, little endian): magic, version, counts; `count` times key and value; `count` times
name, dims, type and offset; then, aligned, the data. The `gguf` library reads it too, but wraps every string of a
262144-word vocabulary in array views, which takes ten seconds, and trusts what it reads. Here every length is
checked against the file before anything is made of it, so a damaged file is a ValueError and never a crash, a long
loop or a large allocation.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
# Metadata value types that have one width. 7 is a bool, 8 a string, 9 an array.
NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
BOOL, STRING, ARRAY = 7, 8, 9


class Unsupported(ValueError):
    """A file is in order, but asks for something that is not here."""


@dataclass(frozen=True)
class Stored:
    """One tensor as it lies in the file: bytes `start` to `stop`, its ggml type, its shape in torch's order."""

    kind: int
    shape: tuple[int, ...]
    start: int
    stop: int


class Header:
    """`meta` by key; `tensors` by GGUF name; `bytes` are the mapped file.

    Metadata arrays of numbers are numpy arrays, arrays of strings are lists. Raises ValueError when the file is
    missing, damaged, or of a version that is not known.
    """

    def __init__(self, path: Path):
        self.path = path
        self.bytes = _map(path)
        with self.checked():
            self._at = 0
            if self._take(4) != b"GGUF":
                raise ValueError(f"{path}: not a GGUF file (it does not begin with 'GGUF')")
            version = self._u32()
            if version not in (2, 3):
                kind = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
                raise ValueError(
                    f"{path}: {kind} GGUF files are not supported: only little-endian versions 2 and 3 are"
                )
            tensors, pairs = self._u64(), self._u64()
            self.meta: dict[str, Any] = {}
            for _ in range(pairs):
                key = self._string()
                if key in self.meta:
                    self._damaged(f"{key!r} is there twice")
                self.meta[key] = self._value(self._u32())
            self._meta_end = self._at
            self.tensors = self._tensors(tensors)

    @cached_property
    def digest(self) -> str:
        """A checksum of the metadata, to know again what was made from it."""
        return hashlib.blake2b(memoryview(self.bytes)[: self._meta_end], digest_size=16).hexdigest()

    def raw(self, stored: Stored) -> NDArray[np.uint8]:
        """The bytes of a tensor, uint8 [n], mapped and not copied. Writing to them changes no file."""
        return np.frombuffer(self.bytes, np.uint8, stored.stop - stored.start, stored.start)

    def release(self, stored: Stored) -> None:
        """Give the memory of a tensor's bytes back; they come from the file again when somebody looks."""
        start = stored.start // mmap.PAGESIZE * mmap.PAGESIZE
        self.bytes.madvise(mmap.MADV_DONTNEED, start, stored.stop - start)

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Whatever goes wrong inside while bytes are made sense of is damage of this file, told in one line."""
        try:
            yield
        except Unsupported as e:
            raise Unsupported(f"{self.path}: {e}") from e
        except ValueError as e:
            if str(e).startswith(f"{self.path}: "):
                raise
            raise ValueError(f"{self.path}: damaged GGUF file: {e}") from e
        except (ArithmeticError, LookupError, TypeError, AttributeError, RuntimeError) as e:
            raise ValueError(f"{self.path}: damaged GGUF file: {type(e).__name__}: {e}") from e

    def _damaged(self, why: str) -> NoReturn:
        raise ValueError(f"{self.path}: damaged GGUF file: {why}")

    def _room(self, n: int) -> int:
        """Where the next n bytes begin; they are skipped."""
        at = self._at
        if n > len(self.bytes) - at:
            self._damaged(f"{n} bytes at {at} reach beyond its end at {len(self.bytes)}")
        self._at = at + n
        return at

    def _take(self, n: int) -> bytes:
        at = self._room(n)
        return self.bytes[at : at + n]

    def _u32(self) -> int:
        return U32.unpack_from(self.bytes, self._room(4))[0]

    def _u64(self) -> int:
        return U64.unpack_from(self.bytes, self._room(8))[0]

    def _string(self) -> str:
        return self._take(self._u64()).decode()

    def _strings(self, n: int) -> list[str]:
        """n strings. One tight loop, because vocabularies are long."""
        if 8 * n > len(self.bytes) - self._at:
            self._damaged(f"{n} strings at {self._at} reach beyond its end")
        out, data, at, end, length = [], self.bytes, self._at, len(self.bytes), U64.unpack_from
        for _ in range(n):
            if at + 8 > end:
                self._damaged(f"a string at {at} reaches beyond its end")
            stop = at + 8 + length(data, at)[0]
            if stop > end:
                self._damaged(f"a string at {at} reaches beyond its end")
            out.append(data[at + 8 : stop].decode())
            at = stop
        self._at = at
        return out

    def _numbers(self, kind: int, n: int) -> NDArray[Any]:
        dtype = np.dtype(NUMBERS[kind])
        numbers = np.frombuffer(self.bytes, dtype, n, self._room(n * dtype.itemsize))
        return numbers != 0 if kind == BOOL else numbers

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind in NUMBERS:
            return self._numbers(kind, 1)[0].item()
        if kind != ARRAY:
            self._damaged(f"{kind} is no type of metadata")
        kind, n = self._u32(), self._u64()
        if kind == STRING:
            return self._strings(n)
        if kind not in NUMBERS:
            self._damaged(f"arrays of type {kind} are not known")
        return self._numbers(kind, n)

    def _tensors(self, n: int) -> dict[str, Stored]:
        from retain.models.gguf.blocks import SIZES

        found: dict[str, tuple[int, tuple[int, ...], int, int]] = {}
        for _ in range(n):
            name = self._string()
            if name in found:
                self._damaged(f"tensor {name!r} is there twice")
            count = self._u32()
            if not 1 <= count <= 4:
                self._damaged(f"tensor {name!r} has {count} dimensions")
            shape = tuple(self._u64() for _ in range(count))[::-1]  # ggml counts the fastest dimension first
            kind, offset = self._u32(), self._u64()
            if kind not in SIZES:
                self._damaged(f"tensor {name!r} is of type {kind}, which is not known")
            block, width = SIZES[kind]
            if 0 in shape or shape[-1] % block:
                self._damaged(f"tensor {name!r} has the shape {shape}, in blocks of {block}")
            found[name] = (kind, shape, offset, math.prod(shape) // block * width)

        align = self.meta.get("general.alignment", 32)
        if not isinstance(align, int) or align < 8 or align & (align - 1):
            self._damaged(f"an alignment of {align!r}")
        data = -(-self._at // align) * align
        tensors, last = {}, data
        for name, (kind, shape, offset, size) in sorted(found.items(), key=lambda item: item[1][2]):
            start = data + offset
            if start % align or start < last or size > len(self.bytes) - start:
                self._damaged(
                    f"tensor {name!r} of {size} bytes lies at {start}: not aligned, over another, or beyond the end"
                )
            tensors[name], last = Stored(kind, shape, start, start + size), start + size
        return tensors


def _map(path: Path) -> mmap.mmap:
    """The file, mapped. Copy on write, because torch warns of tensors over memory that cannot be written."""
    try:
        with path.open("rb") as f:
            return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError:
        raise ValueError(f"{path}: damaged GGUF file: it is empty") from None
    except OSError as e:
        raise ValueError(f"{path}: cannot be read: {e.strerror}") from e
