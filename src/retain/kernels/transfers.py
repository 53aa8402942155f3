"""Copies between the host and a device that wait for nothing.

CUDA copies from and to memory that is not pinned wait for the work before them. So numbers go up through pinned memory,
which torch keeps until the copy is done. What the host reads is copied down at once, behind what computes it and before
later work: a copy that begins when the host asks would wait for that work, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: kernels are compiled anew for arguments that lie elsewhere


def pin(x: Tensor, device: torch.device) -> Tensor:
    """Return a copy of x in pinned memory where `device` is a GPU; else x itself."""
    return x.pin_memory() if device.type == "cuda" else x


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device, without waiting for the copy."""
    return pin(x, device).to(device, non_blocking=True) if x.device.type == "cpu" else x.to(device, non_blocking=True)


def to_device_like(x: Tensor, values: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy numbers of the host to the device of x, without waiting."""
    return to_device(torch.tensor(values, dtype=dtype), x.device)


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return small tensors of the host on a device, by one copy: to begin one takes longer than to run it."""
    if device.type == "cpu":
        return list(tensors)
    sizes = [-(-x.nbytes // ALIGNMENT) * ALIGNMENT for x in tensors]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, x in zip(torch.split(buffer, sizes), tensors, strict=True):
        part[: x.nbytes].view(x.dtype).copy_(x.flatten())
    parts = torch.split(buffer.to(device, non_blocking=True), sizes)
    return [part[: x.nbytes].view(x.dtype).view(x.shape) for part, x in zip(parts, tensors, strict=True)]


class HostCopy:
    """A copy of a tensor on the host, which begins now and is read later."""

    def __init__(self, x: Tensor):
        self.data = x
        self.done: torch.cuda.Event | None = None
        if x.device.type == "cuda":
            self.data = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self.data.copy_(x, non_blocking=True)
            self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.done.record()

    def wait(self) -> Tensor:
        """Return the copy; waits until x is computed, and for nothing after it."""
        if self.done:
            self.done.synchronize()
        return self.data
