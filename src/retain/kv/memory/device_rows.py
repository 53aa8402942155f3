"""Arrays of rows where kernels read them: on a CPU the same memory, on another device a copy, row by row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from retain.kernels.transfers import pin
from retain.types import Ints


class DeviceRows:
    """Copies of arrays whose first dimension is the row. Whatever changes a row of an array marks the row dirty."""

    def __init__(self, arrays: Sequence[Ints], device: torch.device):
        self.host_tensors = [torch.from_numpy(x) for x in arrays]
        self.tensors = [x.to(device) for x in self.host_tensors]
        self.device = device
        self.dirty_rows = set[int]()

    def mark_dirty(self, row: int) -> None:
        """Upload this row before kernels read."""
        self.dirty_rows.add(row)

    def upload(self) -> None:
        """Copy dirty rows to the device."""
        for row in self.dirty_rows if self.device.type != "cpu" else ():
            for host, device in zip(self.host_tensors, self.tensors, strict=True):
                device[row].copy_(pin(host[row], self.device), non_blocking=True)
        self.dirty_rows.clear()
