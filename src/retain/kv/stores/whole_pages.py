"""Whole pages as bytes: K and V, and what is known of their slots, which is positions and masses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from retain.kernels.api import KV
from retain.kv.stores.transfer import PageTransfer, create_transfers
from retain.types import Bytes, Ints


class WholePageTransfer:
    """Copies pages of one pool.

    The n bytes of a page, `page_bytes`, are its keys, its values, its positions (int32 [S]) and its masses (float32
    [C, S]).
    """

    def __init__(self, kv: KV, transfer: PageTransfer):
        self.kv = kv
        self.transfer = transfer
        sizes = [transfer.page_bytes, kv.pos[0].nbytes, kv.mass[0].nbytes]
        self._ends = np.cumsum(sizes).tolist()

    @property
    def page_bytes(self) -> int:
        """The bytes of a page."""
        return int(self._ends[-1])

    def write(self, pages: Ints, data: Bytes) -> None:
        """Copy `data` [p, n] into pages [p]. It may change when this returns."""
        self.transfer.fence()
        self.upload(pages, data)
        self.transfer.wait_event(self.transfer.record_event())
        self.transfer.synchronize()

    def download(self, pages: Ints, out: Bytes) -> None:
        """Copy pages [p] into `out` [p, n]. The copy is complete on return."""
        first, second, end = self._ends
        self.transfer.download(pages, out[:, :first])
        index = self.kv.to_index(pages)
        out[:, first:second] = _to_bytes(self.kv.pos[index])
        out[:, second:end] = _to_bytes(self.kv.mass[index])

    def upload(self, pages: Ints, data: Bytes) -> None:
        """Copy `data` [p, n] into pages [p]. It must not change until an event after it was waited for."""
        first, second, end = self._ends
        self.transfer.upload(pages, data[:, :first])
        self.transfer.set_positions(pages, data[:, first:second].copy().view(np.int32))
        self.transfer.set_masses(pages, data[:, second:end].copy().view(np.float32))


def create_whole_page_transfers(pools: Sequence[KV]) -> list[WholePageTransfer]:
    """Return the transfers of pools of one device."""
    return [WholePageTransfer(kv, transfer) for kv, transfer in zip(pools, create_transfers(pools), strict=True)]


def _to_bytes(x: Tensor) -> Bytes:
    """Return the bytes of each of the first dimension, [p, n]."""
    data: Bytes = x.flatten(1).cpu().numpy().view(np.uint8)
    return data
