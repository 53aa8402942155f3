"""Arrays of rows where kernels read them: on a CPU the same memory, on another device a copy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from retain.kernels.transfers import upload
from retain.types import Ints


class DeviceRows:
    """Copies of arrays whose first dimension is the row. Whatever changes a row of an array marks the row dirty."""

    def __init__(self, arrays: Sequence[Ints], device: torch.device, counts: Ints):
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
        upload_rows([self])

    def take_dirty(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the numbers and the contents of dirty rows, and the arrays that they go to; nothing where none is."""
        rows = sorted(self.dirty_rows)
        self.dirty_rows.clear()
        if not rows or self.tensors is self.host_tensors:
            return [], []
        n = int(self.counts[rows].max())
        index = torch.tensor(rows)
        sources = [self.host_tensors[0][..., :n], *self.host_tensors[1:]]
        return [index, *(x[index] for x in sources)], [self.tensors[0][..., :n], *self.tensors[1:]]

    def gather_pages(self, rows: Sequence[int], layers: Ints, num_pages: int) -> Tensor:
        """Return the first pages of rows [B] in layers [M], int64 [B, M, G, num_pages]; the first array has them.

        The second one has the number of each head's pages. Entries beyond these are the trash page.
        """
        self.upload()
        pages, counts = self.tensors[:2]
        r, i = upload((torch.tensor(rows)[:, None], torch.from_numpy(layers).long()), self.device)
        is_owned = torch.arange(num_pages, device=self.device) < counts[r, i][..., None]
        return torch.where(is_owned, pages[r, i, :, :num_pages], 0).long()


def upload_rows(parts: Sequence[DeviceRows]) -> None:
    """Copy the dirty rows of arrays on one device to it, all by one copy."""
    dirty = [part.take_dirty() for part in parts]
    if not any(targets for _, targets in dirty):
        return
    on_device = iter(upload([x for sources, _ in dirty for x in sources], parts[0].device))
    for sources, targets in dirty:
        own = list(islice(on_device, len(sources)))
        for target, x in zip(targets, own[1:], strict=True):
            target.index_copy_(0, own[0], x)
