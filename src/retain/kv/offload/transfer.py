"""Between a pool and the host: bytes of pages that go to sleep or wake.

On a CPU they are copied where they lie. From and to a GPU they go through pinned memory; what wakes comes on a stream
of its own, beside what is computed, and who computes waits for it there and not on the host. What is not known here:
which pages, and why.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.api import KV
from retain.kv.offload.span import alloc_aligned
from retain.types import Bytes, Ints


class PageTransfer(Protocol):
    """Of one pool. A page's bytes are those of its keys, then those of its values, [2, n]."""

    def allocate(self, size: int) -> Bytes:
        """Memory on the host for so many bytes. Raises OSError or MemoryError."""
        ...

    def download(self, pages: Ints, out: Bytes) -> None:
        """The bytes [..., 2, n] of these pages [...]; they are there when this returns."""
        ...

    def upload(self, pages: Ints, data: Bytes) -> None:
        """Bytes [..., 2, n] into these pages [...]. `rows` may not change before who computes was told to wait."""
        ...

    def set_positions(self, pages: Ints, positions: Ints) -> None:
        """Positions [..., S] into these pages [...]."""
        ...

    def fence(self) -> None:
        """What was done to the pool until now is done before what comes."""
        ...

    def record_event(self) -> Any:
        """What has been put until now."""
        ...

    def wait_event(self, event: Any) -> None:
        """Who computes waits for it."""
        ...

    def synchronize(self) -> None:
        """The host waits for everything."""
        ...


class HostTransfer:
    """See Lane: the pool is the host's. By numpy: torch would wake threads of its own in every thread that calls it."""

    def __init__(self, kv: KV):
        self.byte_views: list[Bytes] = [x.flatten(1).view(torch.uint8).numpy() for x in (kv.k, kv.v)]  # [P, n] both
        self.positions: Ints = kv.pos.numpy()

    def allocate(self, size: int) -> Bytes:  # noqa: D102
        return alloc_aligned(size)

    def download(self, pages: Ints, out: Bytes) -> None:  # noqa: D102
        for i, source in enumerate(self.byte_views):
            out[..., i, :] = source[pages]

    def upload(self, pages: Ints, data: Bytes) -> None:  # noqa: D102
        for i, target in enumerate(self.byte_views):
            target[pages] = data[..., i, :]

    def set_positions(self, pages: Ints, positions: Ints) -> None:  # noqa: D102
        self.positions[pages] = positions

    def fence(self) -> None:  # noqa: D102
        pass

    def record_event(self) -> None:  # noqa: D102
        pass

    def wait_event(self, event: None) -> None:  # noqa: D102
        pass

    def synchronize(self) -> None:  # noqa: D102
        pass


class DeviceTransfer:
    """See Lane: the pool lies elsewhere."""

    def __init__(self, kv: KV):
        self.kv = kv
        self.byte_views = [x.flatten(1).view(torch.uint8) for x in (kv.k, kv.v)]  # [P, n] both
        self.is_cuda = kv.device.type == "cuda"
        self.stream = torch.cuda.Stream(kv.device) if self.is_cuda else None  # type: ignore[no-untyped-call]

    def allocate(self, size: int) -> Bytes:  # noqa: D102
        if not self.is_cuda:
            return alloc_aligned(size)
        try:
            found: Bytes = torch.zeros(size, dtype=torch.uint8, pin_memory=True).numpy()
        except RuntimeError as error:
            raise MemoryError(str(error)) from error
        return found

    def download(self, pages: Ints, out: Bytes) -> None:  # noqa: D102
        at = self.kv.to_index(pages.ravel())
        found = torch.stack([x.index_select(0, at) for x in self.byte_views], 1)  # [N, 2, n]
        torch.from_numpy(out).view(found.shape).copy_(found)

    def upload(self, pages: Ints, data: Bytes) -> None:  # noqa: D102
        with self._on_stream():
            at = self.kv.to_index(pages.ravel())
            given = self._to_device(data).view(len(at), 2, -1)
            for i, target in enumerate(self.byte_views):
                target.index_copy_(0, at, given[:, i])

    def set_positions(self, pages: Ints, positions: Ints) -> None:  # noqa: D102
        with self._on_stream():
            at = np.broadcast_to(positions, (*pages.shape, positions.shape[-1])).reshape(pages.size, -1)
            self.kv.pos.index_copy_(0, self.kv.to_index(pages.ravel()), self._to_device(at.astype(np.int32)))

    def fence(self) -> None:  # noqa: D102
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(self.kv.device))

    def record_event(self) -> torch.cuda.Event | None:  # noqa: D102
        return self.stream.record_event() if self.stream else None

    def wait_event(self, event: torch.cuda.Event | None) -> None:  # noqa: D102
        if event:
            torch.cuda.current_stream(self.kv.device).wait_event(event)

    def synchronize(self) -> None:  # noqa: D102
        if self.stream:
            self.stream.synchronize()

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    def _to_device(self, x: NDArray[Any]) -> Tensor:
        here = torch.from_numpy(np.ascontiguousarray(x))
        here = here if not self.is_cuda or here.is_pinned() else here.pin_memory()
        return here.to(self.kv.device, non_blocking=True)


def create_transfer(kv: KV) -> PageTransfer:
    """That of a pool."""
    return HostTransfer(kv) if kv.device.type == "cpu" else DeviceTransfer(kv)
