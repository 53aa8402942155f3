"""Pools whose K and V lie in a file. Tokens that look read few slots of it; copies of those stay in memory.

The file has no name, so it goes with the process, and the system keeps in memory what it has room for. But it reads a
file in pages of 4 kB: csrc/slots/resident_slots.h says why copies of single slots are worth their memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

import retain.kernels.cpu._C as _C
from retain.kernels.api import KV
from retain.kernels.cpu import ffi
from retain.kernels.cpu.memory import map_file

BYTES_PER_SLOT = 4  # of the pool: where its copy is
BYTES_PER_COPY = 5  # beside its numbers: whose they are, and whether they were used
MIN_COPIES = 256


@dataclass(frozen=True)
class PoolFile:
    """The file of a pool. The pages of each kind of slots may have copies in `memory_bytes`."""

    memory_bytes: int

    def keep_copies(self, kv: KV) -> _C.ResidentSlots:
        """Return memory for copies of a pool's slots. Raises ValueError where it is too small."""
        record_bytes = ffi.to_c_pool(kv).record_bytes
        num_slots = kv.num_pages * kv.page_size
        num_copies = min((self.memory_bytes - BYTES_PER_SLOT * num_slots) // (record_bytes + BYTES_PER_COPY), num_slots)
        if num_copies < min(MIN_COPIES, num_slots):
            missing = MIN_COPIES * (record_bytes + BYTES_PER_COPY) + BYTES_PER_SLOT * num_slots - self.memory_bytes
            raise ValueError(
                f"kv_memory is {missing} bytes too small: it has the sketches and positions of {num_slots} slots in the "
                "file of the pool, and copies of those that are looked at"
            )
        return _C.ResidentSlots(num_slots, num_copies, record_bytes)


def move_to_file(kv: KV, folder: Path, memory_bytes: int) -> KV:
    """Return an empty pool with its K and V in a file of a folder. Raises OSError."""
    sizes = [x.stride(0) * x.itemsize for x in (kv.k, kv.v)]  # of a page
    memory = map_file((kv.num_pages + 1) * sum(sizes), folder).view(-1, sum(sizes))  # a page's stride is behind all
    k, v = (_view_as(x[:-1], like) for x, like in zip(memory.split(sizes, 1), (kv.k, kv.v), strict=True))
    return replace(kv, k=k, v=v, file=PoolFile(memory_bytes))


def _view_as(pages: Tensor, like: Tensor) -> Tensor:
    """Return pages of bytes [P, n] as numbers of the dtype and the shape of `like`, a pool's K or V."""
    numbers = pages.view(like.dtype)
    return numbers.as_strided(like.shape, (numbers.stride(0), *like.stride()[1:]))
