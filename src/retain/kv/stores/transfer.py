"""Copies of pages between the pool and host memory.

On a CPU the copies are direct. On a GPU they go through pinned memory, and uploads run on a stream of their own beside
the computation. The computing stream waits for an upload by an event; the host does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.api import KV
from retain.kv.stores.span import TEXT, alloc_aligned
from retain.types import Bytes, Ints


class PageTransfer:
    """Copies pages of one pool within host memory.

    The bytes of a page are its keys, its values, its sketches if it has some, the positions of its slots and their
    masses. Each copy is of n bytes: all of them, or without positions and masses.
    """

    def __init__(self, kv: KV):
        self.kv = kv
        sketches = [] if kv.sketches is None else [kv.sketches]
        views = [x.flatten(1).view(torch.uint8) for x in (kv.k, kv.v, *sketches, kv.pos, kv.mass)]
        self.ends = list(accumulate(x.shape[1] for x in views))
        self.text_bytes = self.ends[-3]  # of a page, without positions and masses
        slices = [slice(end - x.shape[1], end) for x, end in zip(views, self.ends, strict=True)]
        parts = list(zip(map(self._to_view, views), slices, strict=True))
        self.parts = {end: parts[:i] for i, end in enumerate(self.ends, start=1)}  # what the first bytes of a page are

    def page_bytes(self, kind: str) -> int:
        """Return the bytes of a page that spans of a kind hold: those of text have neither positions nor masses."""
        return self.text_bytes if kind == TEXT else self.ends[-1]

    def _to_view(self, x: Tensor) -> Any:
        """Return what copies go through: torch would start threads of its own in every thread that calls it."""
        return x.numpy()

    def allocate(self, size: int) -> Bytes:
        """Allocate zeroed memory. Raises OSError or MemoryError."""
        return alloc_aligned(size)

    def download(self, pages: Ints, out: Bytes) -> None:
        """Copy pages [...] into `out` [..., n]. The copy is complete on return."""
        for view, part in self.parts[out.shape[-1]]:
            out[..., part] = view[pages]

    def upload(self, pages: Ints, data: Bytes) -> None:
        """Copy `data` [..., n] into pages [...]. `data` must not change until an event after it was waited for."""
        for view, part in self.parts[data.shape[-1]]:
            view[pages] = data[..., part]

    def set_positions(self, pages: Ints, positions: Ints) -> None:
        """Set the positions [..., S] of the slots of pages [...]."""
        self.kv.pos.numpy()[pages] = positions

    def fence(self) -> None:
        """Order the uploads that follow after the computation submitted before: every copy here is complete at once."""

    def record_event(self) -> Any:
        """Return an event that marks the end of the uploads submitted before."""

    def wait_event(self, event: Any) -> None:
        """Order the computation that follows after the event."""

    def synchronize(self) -> None:
        """Block until all uploads are complete."""


class DeviceTransfer(PageTransfer):
    """Copies between host memory and a device, with streams and pinned memory on CUDA."""

    def __init__(self, kv: KV, stream: torch.cuda.Stream | None = None):
        super().__init__(kv)
        self.is_cuda = kv.device.type == "cuda"
        self.stream = stream
        if self.is_cuda and stream is None:
            self.stream = torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]

    def _to_view(self, x: Tensor) -> Tensor:
        return x

    def allocate(self, size: int) -> Bytes:
        """Allocate zeroed memory, pinned on CUDA."""
        if not self.is_cuda:
            return alloc_aligned(size)
        try:
            data: Bytes = torch.zeros(size, dtype=torch.uint8, pin_memory=True).numpy()
        except RuntimeError as error:
            raise MemoryError(str(error)) from error
        return data

    def download(self, pages: Ints, out: Bytes) -> None:
        """Copy pages out, on the computing stream."""
        index = self.kv.to_index(pages.ravel())
        data = torch.cat([view.index_select(0, index) for view, _ in self.parts[out.shape[-1]]], 1)  # [N, n]
        torch.from_numpy(out).copy_(data.view(out.shape))

    def upload(self, pages: Ints, data: Bytes) -> None:
        """Copy pages in, on the transfer stream."""
        with self._on_stream():
            index = self.kv.to_index(pages.ravel())
            staged = self._to_device(data).view(len(index), -1)
            for view, part in self.parts[data.shape[-1]]:
                view.index_copy_(0, index, staged[:, part])

    def set_positions(self, pages: Ints, positions: Ints) -> None:
        """Set positions, on the transfer stream."""
        with self._on_stream():
            flat = np.broadcast_to(positions, (*pages.shape, positions.shape[-1])).reshape(pages.size, -1)
            self.kv.pos.index_copy_(0, self.kv.to_index(pages.ravel()), self._to_device(flat.astype(np.int32)))

    def fence(self) -> None:
        """Make the transfer stream wait for the computing stream."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(self.kv.device))

    def record_event(self) -> torch.cuda.Event | None:
        """Record an event on the transfer stream."""
        return self.stream.record_event() if self.stream else None

    def wait_event(self, event: torch.cuda.Event | None) -> None:
        """Make the computing stream wait for the event."""
        if event:
            torch.cuda.current_stream(self.kv.device).wait_event(event)

    def synchronize(self) -> None:
        """Wait for the transfer stream."""
        if self.stream:
            self.stream.synchronize()

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    def _to_device(self, x: NDArray[Any]) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(x))
        host = host if not self.is_cuda or host.is_pinned() else host.pin_memory()
        return host.to(self.kv.device, non_blocking=True)


def create_transfers(pools: Sequence[KV]) -> list[PageTransfer]:
    """Return the transfers for pools of one device. They share a stream: an event of one orders the work of all."""
    if pools[0].device.type == "cpu":
        return [PageTransfer(kv) for kv in pools]
    first = DeviceTransfer(pools[0])
    return [first, *(DeviceTransfer(kv, first.stream) for kv in pools[1:])]
