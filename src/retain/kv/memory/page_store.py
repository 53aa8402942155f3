"""Pages together with the K and V they hold: allocate, copy and free."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from retain.kernels.api import KV, Backend
from retain.kv.memory.pool import PagePool, Pages


@dataclass(frozen=True, eq=False)
class PageStore:
    """The pool of page numbers, the tensors that they index, and the kernels that read and write those tensors.

    With `demoted_kv` a page is of one of two kinds, as its owner allocates it: `demoted` is the store of the other.
    """

    pool: PagePool
    kv: KV
    backend: Backend
    page_bytes: int  # K, V, positions and mass of one page
    demoted_kv: KV | None = None  # the same pages, for slots of fewer bits
    is_demoted: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))  # [P]: of that kind when last used
    kind: bool = False
    demoted: PageStore | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.demoted_kv:
            is_demoted = np.zeros(self.pool.num_pages, bool)
            object.__setattr__(self, "is_demoted", is_demoted)
            demoted = PageStore(self.pool, self.demoted_kv, self.backend, self.page_bytes, None, is_demoted, True)
            object.__setattr__(self, "demoted", demoted)

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self.kv.page_size

    def allocate(self, n: int) -> Pages:
        """Take n pages whose slots are all holes, [n]. Raises OutOfPages."""
        pages = self.pool.allocate(n)
        self.kv.pos[self.kv.to_index(pages)] = -1  # the previous owner left its positions behind
        if len(self.is_demoted):
            self._change_kind(pages[self.is_demoted[pages] != self.kind])
        return pages

    def copy(self, src: Pages, dst: Pages) -> None:
        """Copy K, V, positions and mass of pages, both [n]."""
        self.backend.copy(self.kv, self.kv.to_index(src), self.kv.to_index(dst))

    def _change_kind(self, pages: Pages) -> None:
        """Clear pages of the other kind: as numbers of this one their bytes may be infinite."""
        i = self.kv.to_index(pages)
        self.kv.k[i], self.kv.v[i] = 0, 0
        self.is_demoted[pages] = self.kind
