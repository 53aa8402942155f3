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

from retain.kernels import KV
from retain.kv.span import Bytes, blocks

Ints = NDArray[np.int32]


class Lane(Protocol):
    """Of one pool. A page's bytes are those of its keys, then those of its values, [2, n]."""

    def blocks(self, size: int) -> Bytes:
        """Memory on the host for so many bytes. Raises OSError or MemoryError."""
        ...

    def take(self, pages: Ints, out: Bytes) -> None:
        """The bytes [..., 2, n] of these pages [...]; they are there when this returns."""
        ...

    def put(self, pages: Ints, rows: Bytes) -> None:
        """Bytes [..., 2, n] into these pages [...]. `rows` may not change before who computes was told to wait."""
        ...

    def place(self, pages: Ints, pos: Ints) -> None:
        """Positions [..., S] into these pages [...]."""
        ...

    def begin(self) -> None:
        """What was done to the pool until now is done before what comes."""
        ...

    def mark(self) -> Any:
        """What has been put until now."""
        ...

    def join(self, mark: Any) -> None:
        """Who computes waits for it."""
        ...

    def sync(self) -> None:
        """The host waits for everything."""
        ...


class Memory:
    """See Lane: the pool is the host's. By numpy: torch would wake threads of its own in every thread that calls it."""

    def __init__(self, kv: KV):
        self.bytes: list[Bytes] = [x.flatten(1).view(torch.uint8).numpy() for x in (kv.k, kv.v)]  # [P, n] both
        self.pos: Ints = kv.pos.numpy()

    def blocks(self, size: int) -> Bytes:  # noqa: D102
        return blocks(size)

    def take(self, pages: Ints, out: Bytes) -> None:  # noqa: D102
        for i, source in enumerate(self.bytes):
            out[..., i, :] = source[pages]

    def put(self, pages: Ints, rows: Bytes) -> None:  # noqa: D102
        for i, target in enumerate(self.bytes):
            target[pages] = rows[..., i, :]

    def place(self, pages: Ints, pos: Ints) -> None:  # noqa: D102
        self.pos[pages] = pos

    def begin(self) -> None:  # noqa: D102
        pass

    def mark(self) -> None:  # noqa: D102
        pass

    def join(self, mark: None) -> None:  # noqa: D102
        pass

    def sync(self) -> None:  # noqa: D102
        pass


class Device:
    """See Lane: the pool lies elsewhere."""

    def __init__(self, kv: KV):
        self.kv = kv
        self.bytes = [x.flatten(1).view(torch.uint8) for x in (kv.k, kv.v)]  # [P, n] both
        self.cuda = kv.device.type == "cuda"
        self.stream = torch.cuda.Stream(kv.device) if self.cuda else None  # type: ignore[no-untyped-call]

    def blocks(self, size: int) -> Bytes:  # noqa: D102
        if not self.cuda:
            return blocks(size)
        try:
            found: Bytes = torch.zeros(size, dtype=torch.uint8, pin_memory=True).numpy()
        except RuntimeError as error:
            raise MemoryError(str(error)) from error
        return found

    def take(self, pages: Ints, out: Bytes) -> None:  # noqa: D102
        at = self.kv.index(pages.ravel())
        found = torch.stack([x.index_select(0, at) for x in self.bytes], 1)  # [N, 2, n]
        torch.from_numpy(out).view(found.shape).copy_(found)

    def put(self, pages: Ints, rows: Bytes) -> None:  # noqa: D102
        with self._beside():
            at = self.kv.index(pages.ravel())
            given = self._there(rows).view(len(at), 2, -1)
            for i, target in enumerate(self.bytes):
                target.index_copy_(0, at, given[:, i])

    def place(self, pages: Ints, pos: Ints) -> None:  # noqa: D102
        with self._beside():
            at = np.broadcast_to(pos, (*pages.shape, pos.shape[-1])).reshape(pages.size, -1)
            self.kv.pos.index_copy_(0, self.kv.index(pages.ravel()), self._there(at.astype(np.int32)))

    def begin(self) -> None:  # noqa: D102
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(self.kv.device))

    def mark(self) -> torch.cuda.Event | None:  # noqa: D102
        return self.stream.record_event() if self.stream else None

    def join(self, mark: torch.cuda.Event | None) -> None:  # noqa: D102
        if mark:
            torch.cuda.current_stream(self.kv.device).wait_event(mark)

    def sync(self) -> None:  # noqa: D102
        if self.stream:
            self.stream.synchronize()

    def _beside(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    def _there(self, x: NDArray[Any]) -> Tensor:
        here = torch.from_numpy(np.ascontiguousarray(x))
        here = here if not self.cuda or here.is_pinned() else here.pin_memory()
        return here.to(self.kv.device, non_blocking=True)


def lane(kv: KV) -> Lane:
    """That of a pool."""
    return Memory(kv) if kv.device.type == "cpu" else Device(kv)
