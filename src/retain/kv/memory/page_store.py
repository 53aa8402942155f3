"""Pages together with the K and V they hold: allocate, copy and free."""

from __future__ import annotations

from dataclasses import dataclass

from retain.kernels.api import KV, Backend
from retain.kv.memory.pool import PagePool, Pages


@dataclass(frozen=True, eq=False)
class PageStore:
    """The pool of page numbers, the tensors that they index, and the kernels that read and write those tensors."""

    pool: PagePool
    kv: KV
    backend: Backend
    page_bytes: int  # K, V, positions and mass of one page

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self.kv.page_size

    def allocate(self, n: int) -> Pages:
        """Take n pages whose slots are all holes, [n]. Raises OutOfPages."""
        pages = self.pool.allocate(n)
        self.kv.pos[self.kv.to_index(pages)] = -1  # the previous owner left its positions behind
        return pages

    def copy(self, src: Pages, dst: Pages) -> None:
        """Copy K, V, positions and mass of pages, both [n]."""
        self.backend.copy(self.kv, self.kv.to_index(src), self.kv.to_index(dst))
