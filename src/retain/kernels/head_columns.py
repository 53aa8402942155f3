"""Where the numbers of heads lie in a row, for operations that treat each head apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadColumns:
    """`width` numbers of each of H heads: those of the first begin at `first`, those of the next `stride` behind."""

    num_heads: int
    width: int
    stride: int
    first: int = 0

    @property
    def end(self) -> int:
        """The column behind the last one."""
        return self.first + (self.num_heads - 1) * self.stride + self.width

    def view(self, rows: Tensor) -> Tensor:
        """Return these columns of rows [T, n], whose numbers are contiguous, as a view [T, H, width]."""
        shape = len(rows), self.num_heads, self.width
        return rows.as_strided(shape, (rows.stride(0), self.stride, 1), rows.storage_offset() + self.first)

    def replace(self, rows: Tensor, heads: Tensor) -> Tensor:
        """Return rows [T, n] in which these columns are those of heads [T, H, width]."""
        starts = torch.arange(self.num_heads, device=rows.device) * self.stride + self.first
        columns = (starts[:, None] + torch.arange(self.width, device=rows.device)).flatten()
        return rows.index_copy(1, columns, heads.flatten(1))
