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
NUMBER_DTYPES = {
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


class UnsupportedError(ValueError):
    """A file is in order, but asks for something that is not here."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as it lies in the file: bytes `start` to `stop`, its ggml type, its shape in torch's order."""

    ggml_type: int
    shape: tuple[int, ...]
    start: int
    stop: int


class GGUFReader:
    """`meta` by key; `tensors` by GGUF name; `bytes` are the mapped file.

    Metadata arrays of numbers are numpy arrays, arrays of strings are lists. Raises ValueError when the file is
    missing, damaged, or of a version that is not known.
    """

    def __init__(self, path: Path):
        self.path = path
        self.data = _map_file(path)
        with self.wrap_errors():
            self._position = 0
            if self._read_bytes(4) != b"GGUF":
                raise ValueError(f"{path}: not a GGUF file (it does not begin with 'GGUF')")
            version = self._read_u32()
            if version not in (2, 3):
                kind = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
                raise ValueError(
                    f"{path}: {kind} GGUF files are not supported: only little-endian versions 2 and 3 are"
                )
            tensors, pairs = self._read_u64(), self._read_u64()
            self.metadata: dict[str, Any] = {}
            for _ in range(pairs):
                key = self._read_string()
                if key in self.metadata:
                    self._raise_damaged(f"{key!r} is there twice")
                self.metadata[key] = self._read_value(self._read_u32())
            self._metadata_end = self._position
            self.tensors = self._read_tensor_infos(tensors)

    @cached_property
    def metadata_digest(self) -> str:
        """A checksum of the metadata, to know again what was made from it."""
        return hashlib.blake2b(memoryview(self.data)[: self._metadata_end], digest_size=16).hexdigest()

    def tensor_bytes(self, info: TensorInfo) -> NDArray[np.uint8]:
        """The bytes of a tensor, uint8 [n], mapped and not copied. Writing to them changes no file."""
        return np.frombuffer(self.data, np.uint8, info.stop - info.start, info.start)

    def release(self, info: TensorInfo) -> None:
        """Give the memory of a tensor's bytes back; they come from the file again when somebody looks."""
        start = info.start // mmap.PAGESIZE * mmap.PAGESIZE
        self.data.madvise(mmap.MADV_DONTNEED, start, info.stop - start)

    @contextmanager
    def wrap_errors(self) -> Iterator[None]:
        """Whatever goes wrong inside while bytes are made sense of is damage of this file, told in one line."""
        try:
            yield
        except UnsupportedError as e:
            raise UnsupportedError(f"{self.path}: {e}") from e
        except ValueError as e:
            if str(e).startswith(f"{self.path}: "):
                raise
            raise ValueError(f"{self.path}: damaged GGUF file: {e}") from e
        except (ArithmeticError, LookupError, TypeError, AttributeError, RuntimeError) as e:
            raise ValueError(f"{self.path}: damaged GGUF file: {type(e).__name__}: {e}") from e

    def _raise_damaged(self, reason: str) -> NoReturn:
        raise ValueError(f"{self.path}: damaged GGUF file: {reason}")

    def _advance(self, n: int) -> int:
        """Where the next n bytes begin; they are skipped."""
        at = self._position
        if n > len(self.data) - at:
            self._raise_damaged(f"{n} bytes at {at} reach beyond its end at {len(self.data)}")
        self._position = at + n
        return at

    def _read_bytes(self, n: int) -> bytes:
        at = self._advance(n)
        return self.data[at : at + n]

    def _read_u32(self) -> int:
        return U32.unpack_from(self.data, self._advance(4))[0]

    def _read_u64(self) -> int:
        return U64.unpack_from(self.data, self._advance(8))[0]

    def _read_string(self) -> str:
        return self._read_bytes(self._read_u64()).decode()

    def _read_strings(self, n: int) -> list[str]:
        """n strings. One tight loop, because vocabularies are long."""
        if 8 * n > len(self.data) - self._position:
            self._raise_damaged(f"{n} strings at {self._position} reach beyond its end")
        out, data, at, end, length = [], self.data, self._position, len(self.data), U64.unpack_from
        for _ in range(n):
            if at + 8 > end:
                self._raise_damaged(f"a string at {at} reaches beyond its end")
            stop = at + 8 + length(data, at)[0]
            if stop > end:
                self._raise_damaged(f"a string at {at} reaches beyond its end")
            out.append(data[at + 8 : stop].decode())
            at = stop
        self._position = at
        return out

    def _read_numbers(self, value_type: int, n: int) -> NDArray[Any]:
        dtype = np.dtype(NUMBER_DTYPES[value_type])
        numbers = np.frombuffer(self.data, dtype, n, self._advance(n * dtype.itemsize))
        return numbers != 0 if value_type == BOOL else numbers

    def _read_value(self, value_type: int) -> Any:
        if value_type == STRING:
            return self._read_string()
        if value_type in NUMBER_DTYPES:
            return self._read_numbers(value_type, 1)[0].item()
        if value_type != ARRAY:
            self._raise_damaged(f"{value_type} is no type of metadata")
        value_type, n = self._read_u32(), self._read_u64()
        if value_type == STRING:
            return self._read_strings(n)
        if value_type not in NUMBER_DTYPES:
            self._raise_damaged(f"arrays of type {value_type} are not known")
        return self._read_numbers(value_type, n)

    def _read_tensor_infos(self, n: int) -> dict[str, TensorInfo]:
        from retain.formats.gguf.dequantize import GGML_BLOCK_SIZES

        found: dict[str, tuple[int, tuple[int, ...], int, int]] = {}
        for _ in range(n):
            name = self._read_string()
            if name in found:
                self._raise_damaged(f"tensor {name!r} is there twice")
            count = self._read_u32()
            if not 1 <= count <= 4:
                self._raise_damaged(f"tensor {name!r} has {count} dimensions")
            shape = tuple(self._read_u64() for _ in range(count))[::-1]  # ggml counts the fastest dimension first
            kind, offset = self._read_u32(), self._read_u64()
            if kind not in GGML_BLOCK_SIZES:
                self._raise_damaged(f"tensor {name!r} is of type {kind}, which is not known")
            block, width = GGML_BLOCK_SIZES[kind]
            if 0 in shape or shape[-1] % block:
                self._raise_damaged(f"tensor {name!r} has the shape {shape}, in blocks of {block}")
            found[name] = (kind, shape, offset, math.prod(shape) // block * width)

        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 8 or align & (align - 1):
            self._raise_damaged(f"an alignment of {align!r}")
        data = -(-self._position // align) * align
        tensors, last = {}, data
        for name, (kind, shape, offset, size) in sorted(found.items(), key=lambda item: item[1][2]):
            start = data + offset
            if start % align or start < last or size > len(self.data) - start:
                self._raise_damaged(
                    f"tensor {name!r} of {size} bytes lies at {start}: not aligned, over another, or beyond the end"
                )
            tensors[name], last = TensorInfo(kind, shape, start, start + size), start + size
        return tensors


def _map_file(path: Path) -> mmap.mmap:
    """The file, mapped. Copy on write, because torch warns of tensors over memory that cannot be written."""
    try:
        with path.open("rb") as f:
            return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError:
        raise ValueError(f"{path}: damaged GGUF file: it is empty") from None
    except OSError as e:
        raise ValueError(f"{path}: cannot be read: {e.strerror}") from e
