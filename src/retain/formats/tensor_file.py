"""A mapped safetensors file. The library checks its header; the tensors are views of the mapping.

The library's own views keep what was read in memory until the file is closed. Rows of these are given back.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import torch
from torch import Tensor

from retain.files import quote, shorten

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class TensorFile:
    """Map a safetensors file. Raises ValueError where it is damaged or cannot be read."""

    def __init__(self, path: Path):
        from safetensors import safe_open

        self.path = path
        try:
            safe_open(path, framework="pt")
            with path.open("rb") as f:
                # Copy on write, because torch warns about tensors over read-only memory.
                self._data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as e:
            raise ValueError(f"{path}: cannot be read: {e.strerror or e}") from e
        except Exception as e:
            raise ValueError(f"{path}: damaged: {shorten(e)}") from e
        length = int.from_bytes(self._data[:8], "little")
        self._infos = json.loads(self._data[8 : 8 + length])
        self._infos.pop("__metadata__", None)
        self._start = 8 + length
        self.names = frozenset(self._infos)

    def read(self, name: str) -> Tensor:
        """Return a tensor, mapped and not copied. Raises ValueError for a type that torch does not have."""
        info = self._infos[name]
        dtype = DTYPES.get(info["dtype"])
        if dtype is None:
            raise ValueError(f"{self.path}: the tensor {quote(name)} is of type {quote(info['dtype'])}: not supported")
        begin, end = info["data_offsets"]
        n = (end - begin) // dtype.itemsize
        if n == 0:
            return torch.empty(info["shape"], dtype=dtype)
        return torch.frombuffer(self._data, dtype=dtype, count=n, offset=self._start + begin).view(info["shape"])

    def release(self, name: str, begin: int, end: int, of: int) -> None:
        """Free the memory of parts begin .. end - 1 of a tensor in `of` equal parts. The next access reads it again."""
        first, last = (self._start + offset for offset in self._infos[name]["data_offsets"])
        size = last - first
        start = (first + size * begin // of) // mmap.PAGESIZE * mmap.PAGESIZE
        stop = first + size * end // of
        if stop > start:
            self._data.madvise(mmap.MADV_DONTNEED, start, stop - start)
