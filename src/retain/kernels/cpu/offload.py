"""Pools whose K, V and sketches lie in a file. Tokens that look read few slots of it; copies of those stay in memory.

The file has no name, so it goes with the process, and the system keeps in memory what of it is used most. But it reads
a file in pages of 4 kB: csrc/slots/resident_slots.h says why copies of single slots are worth their memory.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

import retain.kernels.cpu._C as _C
from retain.kernels.api import KV
from retain.kernels.cpu import ffi
from retain.kernels.cpu.memory import map_file

BYTES_PER_SLOT = 4  # of the pool: where its copy is
BYTES_PER_COPY = 5  # beside its numbers: whose they are, and whether they were used
MIN_COPIES = 4096


def offload(kv: KV, folder: Path, memory_bytes: int) -> KV:
    """Return an empty pool with its memory in a file of a folder.

    `memory_bytes` are for copies of slots. Raises ValueError where they are too few, and OSError.
    """
    assert kv.sketches is not None
    record_bytes = ffi.to_c_pool(kv).record_bytes
    num_slots = kv.num_pages * kv.page_size
    num_copies = min((memory_bytes - BYTES_PER_SLOT * num_slots) // (record_bytes + BYTES_PER_COPY), num_slots)
    if num_copies < min(MIN_COPIES, num_slots):
        missing = MIN_COPIES * (record_bytes + BYTES_PER_COPY) + BYTES_PER_SLOT * num_slots - memory_bytes
        raise ValueError(f"kv_memory is {missing} bytes too small for a pool of {num_slots} slots in a file")
    parts = (kv.k, kv.v, kv.sketches)
    memory = map_file(sum(map(_size, parts)), folder)
    moved = []
    for x in parts:
        moved.append(memory[: _size(x)].view(x.dtype).as_strided(x.shape, x.stride()))
        memory = memory[_size(x) :]
    k, v, sketches = moved
    return replace(kv, k=k, v=v, sketches=sketches, resident=_C.ResidentSlots(num_slots, num_copies, record_bytes))


def _size(pages: Tensor) -> int:
    """Return the bytes of all pages, up to a cache line."""
    return -(-len(pages) * pages.stride(0) * pages.itemsize // 64) * 64
