"""Pages together with the K and V they hold: allocate, copy and free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from retain.kernels.api import KV, Backend
from retain.kv.memory.pool import PagePool, Pages


@dataclass(frozen=True, eq=False)
class PageStore:
    """The pool of page numbers, the tensors that they index, and the kernels that read and write those tensors.

    With `demoted` there are two stores over one pool and one memory. A page is of the kind of the store that allocated
    it last.
    """

    pool: PagePool
    kv: KV
    backend: Backend
    page_bytes: int  # K, V, positions and mass of one page
    demoted: PageStore | None = None  # the same pages, for slots of fewer bits
    is_demoted: NDArray[np.bool_] | None = None  # [P], of both stores: pages of fewer bits
    allocates_demoted: bool = False

    @classmethod
    def with_demoted(cls, pool: PagePool, kv: KV, demoted_kv: KV, backend: Backend, page_bytes: int) -> Self:
        """Return a store whose pages may also be allocated for slots of fewer bits; see `Backend.reinterpret`."""
        is_demoted = np.zeros(pool.num_pages, bool)
        demoted = cls(pool, demoted_kv, backend, page_bytes, None, is_demoted, allocates_demoted=True)
        return cls(pool, kv, backend, page_bytes, demoted, is_demoted)

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self.kv.page_size

    def allocate(self, n: int) -> Pages:
        """Take n pages whose slots are all holes, [n]. Raises OutOfPages."""
        pages = self.pool.allocate(n)
        self.kv.pos[self.kv.to_index(pages)] = -1  # the previous owner left its positions behind
        if self.is_demoted is not None:  # as numbers of this kind, bytes of the other kind may be infinite
            i = self.kv.to_index(pages[self.is_demoted[pages] != self.allocates_demoted])
            self.kv.k[i], self.kv.v[i] = 0, 0
            self.is_demoted[pages] = self.allocates_demoted
        return pages

    def copy(self, src: Pages, dst: Pages) -> None:
        """Copy K, V, positions and mass of pages, both [n]."""
        self.backend.copy(self.kv, self.kv.to_index(src), self.kv.to_index(dst))
