"""Memory that starts on a cache line."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

CACHE_LINE = 64
BLOCK_BYTES = 2**26  # allocated at a time; the system never provides the untouched tail of the last block


def map_zeros(size: int) -> Tensor:
    """Return uint8 [size] of zeros, from the system itself: bytes take no memory before the first write.

    An allocator may take what others freed, and then writes all of it. Huge pages need fewer address translations.
    Raises MemoryError.
    """
    try:
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes: {error.strerror}") from None
    with suppress(AttributeError, OSError):  # not on every system
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size]


def map_file(size: int, folder: Path) -> Tensor:
    """Return uint8 [size] of zeros in a new file without a name. Raises OSError.

    Where the system can, the disk gives room for all of it at once: else a write to a full disk ends the process.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a folder was wanted for the file of the pool", str(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(size)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}, where a file of {size} bytes was wanted", str(folder)) from None


class Arena:
    """Allocates many small arrays, one behind the other, that are freed together."""

    def __init__(self) -> None:
        self._remaining = torch.empty(0, dtype=torch.uint8)

    def allocate(self, size: int) -> Tensor:
        """Return uint8 [size] on a cache line, not initialized."""
        if size > len(self._remaining):
            # numpy asks for huge pages for a large array, so that streaming its weights needs fewer translations.
            raw = torch.from_numpy(np.empty(max(size, BLOCK_BYTES) + CACHE_LINE, np.uint8))
            self._remaining = raw[-raw.data_ptr() % CACHE_LINE :]
        allocated = self._remaining[:size]
        self._remaining = self._remaining[-(-size // CACHE_LINE) * CACHE_LINE :]
        return allocated
