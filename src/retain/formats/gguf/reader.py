"""Read the metadata and the tensor index of a GGUF file.

The format (versions 2 and 3, little endian): magic, version, counts; `count` times key and value; `count` times
name, dims, type and offset; then the data, aligned.

The `gguf` library reads it too. But it wraps each string of a vocabulary in array views, which takes ten seconds for
262144 tokens, and it trusts the file. This reader checks every length against the file before it uses it. So a damaged
file raises ValueError, and causes no crash, no long loop and no large allocation.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from retain.files import quote, shorten
from retain.formats.errors import UnsupportedError
from retain.formats.gguf.types import ARRAY, BOOL, GGML_BLOCK_SIZES, NUMBER_DTYPES, STRING, TensorInfo
from retain.kernels.weights.stored_weight import StoredWeight

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")


class GGUFReader:
    """Map a GGUF file: `metadata` by key, `tensors` by GGUF name, `data` is the mapped file.

    Metadata arrays of numbers become numpy arrays, arrays of strings become lists. Raises ValueError when the file is
    missing, damaged, or of an unknown version.
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
            tensors = self._read_u64()
            pairs = self._read_u64()
            self.metadata: dict[str, Any] = {}
            for _ in range(pairs):
                key = self._read_string()
                if key in self.metadata:
                    self._raise_damaged(f"the key {quote(key)} occurs twice")
                self.metadata[key] = self._read_value(self._read_u32())
            self._metadata_end = self._position
            self.tensors = self._read_tensor_infos(tensors)

    @cached_property
    def metadata_digest(self) -> str:
        """Return a checksum of the metadata, the key of files that are derived from it."""
        return hashlib.blake2b(memoryview(self.data)[: self._metadata_end], digest_size=16).hexdigest()

    def tensor_bytes(self, info: TensorInfo) -> NDArray[np.uint8]:
        """Return the bytes of a tensor, uint8 [n], mapped and not copied. Writes to them do not reach the file."""
        return np.frombuffer(self.data, np.uint8, info.stop - info.start, info.start)

    def read_stored(self, name: str, info: TensorInfo) -> StoredWeight:
        """Return a matrix as it lies in the file, mapped and not copied. Stacked ones lie one below the other."""
        *stacked_rows, columns = info.shape
        rows = math.prod(stacked_rows)
        row_bytes = (info.stop - info.start) // rows

        def release(begin: int, end: int) -> None:
            """Free the memory of rows begin .. end - 1. The next access reads them from the file again."""
            start = (info.start + begin * row_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            self.data.madvise(mmap.MADV_DONTNEED, start, info.start + end * row_bytes - start)

        raw = self.tensor_bytes(info).reshape(rows, row_bytes)
        label = f"{self.path}: the tensor {quote(name)}"
        shape = (rows, columns)
        return StoredWeight.from_blocks(label, shape, info.ggml_type, lambda a, b: raw[a:b], row_bytes, release)

    @contextmanager
    def wrap_errors(self) -> Iterator[None]:
        """Turn errors of parsing inside the block into a one-line ValueError that names the file."""
        try:
            yield
        except UnsupportedError as e:
            raise UnsupportedError(f"{self.path}: {e}") from e
        except ValueError as e:
            if str(e).startswith(f"{self.path}: "):
                raise
            raise ValueError(f"{self.path}: damaged GGUF file: {shorten(e)}") from e
        except (ArithmeticError, LookupError, TypeError, AttributeError, RuntimeError) as e:
            raise ValueError(f"{self.path}: damaged GGUF file: {type(e).__name__}: {shorten(e)}") from e

    def _raise_damaged(self, reason: str) -> NoReturn:
        raise ValueError(f"{self.path}: damaged GGUF file: {reason}")

    def _advance(self, n: int) -> int:
        """Skip the next n bytes, and return the position of the first."""
        start = self._position
        if n > len(self.data) - start:
            self._raise_damaged(f"{n} bytes at {start} reach beyond its end at {len(self.data)}")
        self._position = start + n
        return start

    def _read_bytes(self, n: int) -> bytes:
        start = self._advance(n)
        return self.data[start : start + n]

    def _read_u32(self) -> int:
        return U32.unpack_from(self.data, self._advance(4))[0]

    def _read_u64(self) -> int:
        return U64.unpack_from(self.data, self._advance(8))[0]

    def _read_string(self) -> str:
        return self._read_bytes(self._read_u64()).decode()

    def _read_strings(self, n: int) -> list[str]:
        """Read n strings. One tight loop, because vocabularies are long."""
        if 8 * n > len(self.data) - self._position:
            self._raise_damaged(f"{n} strings at {self._position} reach beyond its end")
        strings = []
        data = self.data
        start = self._position
        end = len(self.data)
        read_length = U64.unpack_from
        for _ in range(n):
            if start + 8 > end:
                self._raise_damaged(f"a string at {start} reaches beyond its end")
            stop = start + 8 + read_length(data, start)[0]
            if stop > end:
                self._raise_damaged(f"a string at {start} reaches beyond its end")
            strings.append(data[start + 8 : stop].decode())
            start = stop
        self._position = start
        return strings

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
            self._raise_damaged(f"the metadata type {value_type} is not known")
        value_type = self._read_u32()
        n = self._read_u64()
        if value_type == STRING:
            return self._read_strings(n)
        if value_type not in NUMBER_DTYPES:
            self._raise_damaged(f"metadata arrays of type {value_type} are not known")
        return self._read_numbers(value_type, n)

    def _read_tensor_infos(self, n: int) -> dict[str, TensorInfo]:
        found: dict[str, tuple[int, tuple[int, ...], int, int]] = {}
        for _ in range(n):
            name = self._read_string()
            if name in found:
                self._raise_damaged(f"the tensor {quote(name)} occurs twice")
            count = self._read_u32()
            if not 1 <= count <= 4:
                self._raise_damaged(f"the tensor {quote(name)} has {count} dimensions")
            shape = tuple(self._read_u64() for _ in range(count))[::-1]  # ggml lists the fastest dimension first
            ggml_type = self._read_u32()
            offset = self._read_u64()
            if ggml_type not in GGML_BLOCK_SIZES:
                self._raise_damaged(f"the tensor {quote(name)} is of type {ggml_type}, which is not known")
            block_size, block_bytes = GGML_BLOCK_SIZES[ggml_type]
            if 0 in shape or shape[-1] % block_size:
                self._raise_damaged(f"the tensor {quote(name)} has the shape {shape}, in blocks of {block_size}")
            found[name] = (ggml_type, shape, offset, math.prod(shape) // block_size * block_bytes)

        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 8 or align & (align - 1):
            self._raise_damaged(f"the alignment is {quote(align)}, not a power of 2 from 8 on")
        data_start = -(-self._position // align) * align
        tensors = {}
        previous_stop = data_start
        for name, (ggml_type, shape, offset, size) in sorted(found.items(), key=lambda item: item[1][2]):
            start = data_start + offset
            if start % align or start < previous_stop or size > len(self.data) - start:
                place = f"({size} bytes at {start})"
                self._raise_damaged(
                    f"the tensor {quote(name)} {place} is unaligned, overlaps another or exceeds the file"
                )
            tensors[name] = TensorInfo(ggml_type, shape, start, start + size)
            previous_stop = start + size
        return tensors


def _map_file(path: Path) -> mmap.mmap:
    """Map a file. Copy on write, because torch warns about tensors over read-only memory."""
    try:
        with path.open("rb") as f:
            return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError:
        raise ValueError(f"{path}: damaged GGUF file: it is empty") from None
    except OSError as e:
        raise ValueError(f"{path}: cannot be read: {e.strerror}") from e
