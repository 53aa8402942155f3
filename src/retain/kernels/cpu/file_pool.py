"""Pools whose K and V lie in a file. Tokens that look read few slots of it; those stay in memory, too: resident slots.

The file has no name, so it goes with the process. The system keeps of it in memory what it has room for, but in pages
of 4 kB: csrc/slots/resident_slots.h says why single slots are worth memory of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

import retain.kernels.cpu._C as _C
from retain.kernels.api import KV
from retain.kernels.cpu import ffi
from retain.kernels.cpu.memory import map_file

BYTES_PER_SLOT = 4  # of the pool: where in memory it is resident
BYTES_PER_RECORD = 5  # beside the numbers of a resident slot: which one it is, and whether it was used
MIN_RECORDS = 256


@dataclass(frozen=True)
class MappedFile:
    """The file of a pool. Slots of each kind may be resident in `memory_bytes`."""

    memory_bytes: int

    def resident_slots(self, kv: KV) -> _C.ResidentSlots:
        """Return memory for resident slots of a pool. Raises ValueError where it is too small."""
        record_bytes = ffi.to_c_pool(kv).record_bytes
        num_slots = kv.num_pages * kv.page_size
        size = record_bytes + BYTES_PER_RECORD
        remaining = self.memory_bytes - BYTES_PER_SLOT * num_slots
        num_records = min(remaining // size, num_slots)
        least = min(MIN_RECORDS, num_slots)
        if num_records < least:
            missing = least * size - remaining
            raise ValueError(
                f"kv_memory is {missing} bytes too small: it holds sketches and positions of the {num_slots} slots of "
                "kv_offload, and those that looks read last; give more, or a smaller capacity"
            )
        return _C.ResidentSlots(num_slots, num_records, record_bytes)


def move_to_file(kv: KV, folder: Path, memory_bytes: int) -> KV:
    """Return an empty pool with its K and V in a file of a folder. Raises OSError."""
    sizes = [x.stride(0) * x.itemsize for x in (kv.k, kv.v)]  # of a page
    memory = map_file((kv.num_pages + 1) * sum(sizes), folder).view(-1, sum(sizes))  # views reach to the next page
    pages = memory[:-1]
    k = _view_as(pages[:, : sizes[0]], kv.k)
    v = _view_as(pages[:, sizes[0] :], kv.v)
    return replace(kv, k=k, v=v, file=MappedFile(memory_bytes))


def _view_as(pages: Tensor, like: Tensor) -> Tensor:
    """Return pages of bytes [P, n] as numbers of the dtype and the shape of `like`, a pool's K or V."""
    numbers = pages.view(like.dtype)
    return numbers.as_strided(like.shape, (numbers.stride(0), *like.stride()[1:]))
