"""Pools whose K and V lie in a file. Tokens that look read few slots of it; those stay in memory, too: resident slots.

The file has no name, so it goes with the process. The system keeps of it in memory what it has room for, but in pages
of 4 kB: csrc/slots/resident_slots.h says why single slots are worth memory of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

import retain.kernels.cpu._C as _C
from retain.kernels.api import KV
from retain.kernels.cpu import ffi
from retain.kernels.cpu.memory import map_file

# Of ResidentSlots in C++.
BYTES_PER_SLOT = 4  # of the pool: places_
BYTES_PER_RECORD = 5  # beside the numbers of a resident slot: owners_ and is_used_
MIN_RECORDS = 256


@dataclass(frozen=True)
class MappedFile:
    """The file of a pool, and how much memory its resident slots get: `memory_bytes` for each page format."""

    memory_bytes: int

    def resident_slots(self, kv: KV) -> _C.ResidentSlots:
        """Return memory for resident slots of a pool. Raises ValueError where it is too small."""
        num_slots = kv.num_pages * kv.page_size
        record_bytes = ffi.to_c_pool(kv).record_bytes
        return _C.ResidentSlots(num_slots, self.num_records(num_slots, record_bytes), record_bytes)

    def num_records(self, num_slots: int, record_bytes: int) -> int:
        """Return how many slots of a pool may be resident. Raises ValueError where they are too few."""
        size = record_bytes + BYTES_PER_RECORD
        remaining = self.memory_bytes - BYTES_PER_SLOT * num_slots
        num_records = min(remaining // size, num_slots)
        least = min(MIN_RECORDS, num_slots)
        if num_records < least:
            missing = least * size - remaining
            raise ValueError(
                f"kv_memory is {missing / 2**20:.2f} MiB too small: it holds sketches and positions of the {num_slots} "
                "slots of kv_offload, and those that looks read last; give more, or a smaller capacity"
            )
        return num_records


def map_pages(num_pages: int, page_bytes: tuple[int, int], folder: Path) -> tuple[Tensor, Tensor]:
    """Return zeros of a new file as pages of K and of V, uint8 [P, n] each. Those of a page lie side by side.

    The file has one page more, because a view of the last page of V reaches as far as the next one would. Raises
    OSError.
    """
    memory = map_file((num_pages + 1) * sum(page_bytes), folder).view(-1, sum(page_bytes))[:-1]
    return memory[:, : page_bytes[0]], memory[:, page_bytes[0] :]
