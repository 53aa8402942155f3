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

from retain.kernels.api import Tables

Ints = NDArray[np.int32]


class DeviceTables:
    """Of pages [N, L, G, n], counts [N, L, G], windows [N, L]; and `holes` [N, L, G, i], which is only there."""

    def __init__(self, pages: Ints, counts: Ints, windows: Ints, device: torch.device):
        max_running_requests, L, G, _ = pages.shape
        self.dense: Ints = np.zeros(max_running_requests, np.int32)
        self.host_tensors = [torch.from_numpy(x) for x in (pages, counts, windows, self.dense)]
        self.device_tensors = [x.to(device) for x in self.host_tensors]
        self.counts, self.device, self.dirty_rows = counts, device, set[int]()
        self.sinks = torch.zeros(max_running_requests, dtype=torch.int32, device=device)  # no policy here has sinks
        self.holes = torch.zeros(max_running_requests, L, G, 0, dtype=torch.int32, device=device)

    def mark_dirty(self, row: int, dense: bool | None = None) -> None:
        """Its tables are others now. `dense`: place i of those without a window is position i, from now on (or not)."""
        self.dirty_rows.add(row)
        if dense is not None:
            self.dense[row] = dense

    def set_holes(self, row: int, layers: Ints, holes: Tensor) -> None:
        """Fresh tokens of the row come into these slots [M, G, n], one after another."""
        *shape, room = self.holes.shape
        n = holes.shape[-1]
        if n > room:
            more = self.holes.new_zeros(*shape, n)
            more[..., :room] = self.holes
            self.holes = more
        self.holes[row, self._to_device(layers), :, :n] = holes

    def map_holes(
        self,
        slots: Ints,
        token_indices: NDArray[Any],
        rows: Ints,
        hole_indices: NDArray[Any],
        is_evicting: NDArray[np.bool_],
    ) -> Tensor:
        """Slots [L, G, T], but those of the tokens `whose` [t] are the holes of their `rows` at `place` in the layers
        that forget, `inside` [L, t].
        """
        found = self._to_device(slots)
        if len(token_indices):
            mine, r, i, forgets = (self._to_device(x) for x in (token_indices, rows, hole_indices, is_evicting))
            holes = self.holes[r.long(), :, :, i.long()].permute(1, 2, 0)  # [L, G, t]
            found[:, :, mine] = torch.where(forgets[:, None], holes, found[:, :, mine])
        return found

    def build_tables(self, rows: Tensor, query_start_loc: Tensor) -> Tables:
        """What fresh tokens of these rows look at in all layers; rows [B] and starts [B + 1], int32, on the host."""
        self.upload()
        pages, counts, windows, dense = self.device_tensors
        most = int(self.counts[rows.numpy()].max()) if len(rows) else 0
        layers = pages.transpose(0, 1), counts.transpose(0, 1), windows.T
        return Tables(*layers, self.sinks, rows, query_start_loc, dense, most)

    def upload(self) -> None:
        """Bring over what was touched."""
        for row in self.dirty_rows if self.device.type != "cpu" else ():
            for here, there in zip(self.host_tensors, self.device_tensors, strict=True):
                there[row].copy_(here[row], non_blocking=True)
        self.dirty_rows.clear()

    def _to_device(self, x: NDArray[Any]) -> Tensor:
        return torch.from_numpy(x).to(self.device, non_blocking=True)
