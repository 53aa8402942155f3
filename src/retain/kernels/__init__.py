"""Kernels: the only rooms that touch the bytes of keys and values.

A backend is a folder here and is found by its name: `load("cpu")`. It is a module with five functions, which
`reference` (plain torch) defines and every other backend must equal:

    allocate(n_pages, page_size, head_dim, dtype)  -> KV          room for a pool of pages, every slot a hole
    write(kv, slots, k, v, pos)                                   put fresh tokens into their slots
    attend(q, kv, tables, q_pos, scale, slopes) -> o              look by position
    copy(kv, src, dst)                                            copy whole pages
    available()                                    -> str | None  why this backend cannot run here, or None

How K and V lie inside a page is the backend's own affair (`KV.layout` names it); elsewhere a page is opaque bytes.
Positions are not opaque: `KV.pos` is a plain tensor that the cache reads and punches holes into.

    page p, head dim D, page_size S         k[p], v[p]   S x D numbers, in the backend's layout
                                            pos[p]       S x int32; -1 is a hole

Slot number s is page s // S, place s % S. Page 0 is the trash page: nobody owns it and it holds only holes, so a
table may be padded with it.

What is not known here: requests, policies, budgets, layers' meanings.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

NO_WINDOW = 2**31 - 1  # a window that nothing falls out of


@dataclass(frozen=True)
class KV:
    """The memory of a pool of P pages of S slots. Shapes of `k` and `v` depend on `layout`; `pos` is int32 [P, S]."""

    k: Tensor
    v: Tensor
    pos: Tensor
    page_size: int
    head_dim: int
    layout: str

    @property
    def dtype(self) -> torch.dtype:
        """Of K and V."""
        return self.k.dtype

    @property
    def n_pages(self) -> int:
        """P, the trash page among them."""
        return self.pos.shape[0]


@dataclass(frozen=True)
class Tables:
    """Whose pages the fresh tokens of a step look at, in one layer. All int32.

    pages   [N, G, n]  page numbers of kv head g of the request in row N; entries from `counts` on mean nothing
    counts  [N, G]     how many of them are owned
    windows [N]        how far back the request in row N sees; NO_WINDOW where nothing falls out
    sinks   [N]        how many first positions it sees anyway
    rows    [B]        the row of each request of this step
    starts  [B + 1]    fresh tokens starts[b] : starts[b + 1] belong to request b
    """

    pages: Tensor
    counts: Tensor
    windows: Tensor
    sinks: Tensor
    rows: Tensor
    starts: Tensor


def page_bytes(page_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one page: K, V and positions."""
    return page_size * (2 * head_dim * dtype.itemsize + 4)


def names() -> list[str]:
    """The backends in this folder, by name."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.ispkg)


def load(name: str) -> ModuleType:
    """The backend of that name; `auto` is the fastest that runs here. Raises ValueError where it cannot run."""
    if name == "auto":
        able = [n for n in ("cpu", "reference") if load_module(n).available() is None]
        return load_module(able[0])
    if name not in names():
        raise ValueError(f"unknown backend {name!r}: choose one of auto, {', '.join(names())}")
    backend = load_module(name)
    if why := backend.available():
        raise ValueError(f"backend {name!r} cannot run here: {why}")
    return backend


def load_module(name: str) -> ModuleType:
    """The backend of that name, whether it can run here or not."""
    return importlib.import_module(f"{__name__}.{name}")
