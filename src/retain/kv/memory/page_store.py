"""Pages together with the K and V they hold: allocate, copy and free."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.api import KV, Backend
from retain.kernels.slots.pool_dtypes import slots_in_page
from retain.kernels.slots.reinterpret import PageFormat
from retain.kv.memory.pool import PagePool, Pages

PUNCHED_AHEAD = 1024  # free pages whose slots become holes together with those of pages that are taken


@dataclass(frozen=True, eq=False)
class PageStore:
    """The pool of page numbers, the tensors that they index, and the kernels that read and write those tensors.

    `others` are stores over the same pool and memory, for other slots: those of other groups of layers, and of other
    dtypes. A page is of the kind of the store that allocated it last.
    """

    pool: PagePool
    kv: KV
    backend: Backend
    page_bytes: int  # K, V, positions, masses and sketches of one page
    kind: int = 0
    others: dict[PageFormat, PageStore] = field(default_factory=dict)  # one dictionary of all stores over a memory

    @property
    def page_size(self) -> int:
        """The number of slots in a page; each holds K and V of one token."""
        return self.kv.page_size

    def in_dtype(self, dtype: torch.dtype) -> PageStore:
        """Return the store of the same pages for such slots in fewer bits. Raises ValueError."""
        kv = self.kv
        num_slots = slots_in_page(self.page_size, kv.k_dim, kv.dtype, dtype, v_dim=kv.v_dim)
        return self.reinterpret(PageFormat(num_slots, dtype, kv.k_dim, kv.v_dim, kv.mass.shape[1]))

    def reinterpret(self, format: PageFormat) -> PageStore:
        """Return the store of the same pages for other slots; see `Backend.reinterpret`. Raises ValueError.

        Its positions and masses are allocated at the first call.
        """
        if format not in self.others:
            kv = self.backend.reinterpret(self.kv, format).with_sketches(format.sketch_bytes)
            kind = 1 + len(self.others)
            self.others[format] = PageStore(self.pool, kv, self.backend, self.page_bytes, kind, self.others)
        return self.others[format]

    def allocate(self, n: int) -> Pages:
        """Take n pages whose slots are all holes, [n]. Raises OutOfPages."""
        pages = self.pool.allocate(n)
        if not self.has_holes_only[pages].all():  # previous owners left positions behind
            candidates = np.concatenate((pages, self.pool.free_list[: self.pool.num_free][-PUNCHED_AHEAD:]))
            left = candidates[~self.has_holes_only[candidates]]
            self.kv.pos[self.kv.to_index(left)] = -1
            self.has_holes_only[left] = True
        self.has_holes_only[pages] = False
        if self.kv.resident:
            self.kv.resident.forget(pages, self.page_size)
        if self.kind or self.others:  # as numbers of this kind, bytes of another kind may be infinite
            others = pages[self.pool.kinds[pages] != self.kind]
            if len(others):
                i = self.kv.to_index(others)
                self.kv.k[i] = 0
                self.kv.v[i] = 0
            self.pool.kinds[pages] = self.kind
        return pages

    @cached_property
    def has_holes_only(self) -> NDArray[np.bool_]:
        """Whether all slots of a page are known to be holes, [P]; only those of free pages are."""
        return np.zeros(self.kv.num_pages, np.bool_)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Read K [..., D] and V [..., v_dim] of slots [...] of any shape, float32."""
        k, v = self.backend.read_slots(self.kv, slots.flatten())
        return k.view(*slots.shape, k.shape[-1]), v.view(*slots.shape, v.shape[-1])

    def copy_of(self, pages: Pages, end: int | None = None) -> Pages:
        """Return new pages with the content of these, of the same shape. Tokens from `end` on are holes in them.

        Raises OutOfPagesError.
        """
        with self.pool.owned() as owned:
            owned.append(copies := self.allocate(pages.size))
            self.copy(pages.ravel(), copies)
            if end is not None:
                self.punch_from(copies, end)
        return copies.reshape(pages.shape)

    def punch_from(self, pages: Pages, position: int) -> None:
        """Turn the slots of pages that hold tokens from a position on into holes."""
        index = self.kv.to_index(pages)
        pos = self.kv.pos[index]
        self.kv.pos[index] = pos.masked_fill_(pos >= position, -1)

    def copy(self, src: Pages, dst: Pages) -> None:
        """Copy K, V, positions and mass of pages, both [n]."""
        self.backend.copy(self.kv, self.kv.to_index(src), self.kv.to_index(dst))
