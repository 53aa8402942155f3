"""A cache's tables where kernels read them: on a CPU the very same memory, on another device a copy, row by row.

Whoever changes a row's tables says so (`touch`); before kernels read, what was touched is brought over. What is not
known here: what the tables mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels import Tables

Ints = NDArray[np.int32]


class Mirror:
    """Of pages [N, L, G, n], counts [N, L, G], windows [N, L]; and `holes` [N, L, G, i], which is only there."""

    def __init__(self, pages: Ints, counts: Ints, windows: Ints, device: torch.device):
        n_rows, L, G, _ = pages.shape
        self.dense: Ints = np.zeros(n_rows, np.int32)
        self.host = [torch.from_numpy(x) for x in (pages, counts, windows, self.dense)]
        self.there = [x.to(device) for x in self.host]
        self.counts, self.device, self.touched = counts, device, set[int]()
        self.sinks = torch.zeros(n_rows, dtype=torch.int32, device=device)  # no policy here has sinks
        self.holes = torch.zeros(n_rows, L, G, 0, dtype=torch.int32, device=device)

    def touch(self, row: int, dense: bool | None = None) -> None:
        """Its tables are others now. `dense`: place i of those without a window is position i, from now on (or not)."""
        self.touched.add(row)
        if dense is not None:
            self.dense[row] = dense

    def punched(self, row: int, layers: Ints, holes: Tensor) -> None:
        """Fresh tokens of the row come into these slots [M, G, n], one after another."""
        *shape, room = self.holes.shape
        n = holes.shape[-1]
        if n > room:
            more = self.holes.new_zeros(*shape, n)
            more[..., :room] = self.holes
            self.holes = more
        self.holes[row, self._there(layers), :, :n] = holes

    def through(
        self, slots: Ints, whose: NDArray[Any], rows: Ints, place: NDArray[Any], inside: NDArray[np.bool_]
    ) -> Tensor:
        """Slots [L, G, T], but those of the tokens `whose` [t] are the holes of their `rows` at `place` in the layers
        that forget, `inside` [L, t].
        """
        found = self._there(slots)
        if len(whose):
            mine, r, i, forgets = (self._there(x) for x in (whose, rows, place, inside))
            holes = self.holes[r.long(), :, :, i.long()].permute(1, 2, 0)  # [L, G, t]
            found[:, :, mine] = torch.where(forgets[:, None], holes, found[:, :, mine])
        return found

    def tables(self, rows: Tensor, starts: Tensor) -> Tables:
        """What fresh tokens of these rows look at in all layers; rows [B] and starts [B + 1], int32, on the host."""
        self.push()
        pages, counts, windows, dense = self.there
        most = int(self.counts[rows.numpy()].max()) if len(rows) else 0
        layers = pages.transpose(0, 1), counts.transpose(0, 1), windows.T
        return Tables(*layers, self.sinks, rows, starts, dense, most)

    def push(self) -> None:
        """Bring over what was touched."""
        for row in self.touched if self.device.type != "cpu" else ():
            for here, there in zip(self.host, self.there, strict=True):
                there[row].copy_(here[row], non_blocking=True)
        self.touched.clear()

    def _there(self, x: NDArray[Any]) -> Tensor:
        return torch.from_numpy(x).to(self.device, non_blocking=True)
