"""Arrays of rows where kernels read them: on a CPU the same memory, on another device a copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from retain.kernels.transfers import to_device, upload
from retain.types import Ints


class DeviceRows:
    """Copies of arrays whose first dimension is the row. Whatever changes a row of an array marks the row dirty."""

    def __init__(self, arrays: Sequence[Ints], device: torch.device, counts: Ints | None = None):
        """`counts` [N, ...]: kernels read no more than so many entries of the last dimension of the first array."""
        self.host_tensors = [torch.from_numpy(x) for x in arrays]
        self.tensors = self.host_tensors if device.type == "cpu" else [x.to(device) for x in self.host_tensors]
        self.device = device
        self.counts = counts
        self.dirty_rows = set[int]()

    def mark_dirty(self, row: int) -> None:
        """Upload this row before kernels read."""
        self.dirty_rows.add(row)

    def upload(self) -> None:
        """Copy dirty rows to the device, all together."""
        rows = sorted(self.dirty_rows)
        self.dirty_rows.clear()
        if not rows or self.tensors is self.host_tensors:
            return
        sources = self.host_tensors.copy()
        targets = self.tensors.copy()
        if self.counts is not None:
            n = int(self.counts[rows].max())
            sources[0] = sources[0][..., :n]
            targets[0] = targets[0][..., :n]
        index = torch.tensor(rows)
        on_device, *changed = upload((index, *(x[index] for x in sources)), self.device)
        for target, x in zip(targets, changed, strict=True):
            target.index_copy_(0, on_device, x)

    def gather_pages(self, rows: Sequence[int], layers: Ints, num_pages: int) -> Tensor:
        """Return the first pages of rows [B] in layers [M], int64 [B, M, G, num_pages]; the first array has them.

        The second one has the number of each head's pages. Entries beyond these are the trash page.
        """
        self.upload()
        pages, counts = self.tensors[:2]
        r = to_device(torch.tensor(rows), self.device)[:, None]
        i = to_device(torch.from_numpy(layers).long(), self.device)
        is_owned = torch.arange(num_pages, device=self.device) < counts[r, i][..., None]
        return torch.where(is_owned, pages[r, i, :, :num_pages], 0).long()
