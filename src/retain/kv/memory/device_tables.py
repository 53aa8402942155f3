"""Block tables where kernels read them. Whatever changes a row's tables marks the row dirty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.api import EvictionLists, Tables
from retain.kernels.slots.slot_rule import SlotRule
from retain.kernels.transfers import to_device, upload
from retain.kv.memory.demoted_tables import DemotedBlockTables
from retain.kv.memory.device_rows import DeviceRows
from retain.types import Ints


class DeviceTables:
    """Pages [N, L, G, n], counts [N, L, G] and windows [N, L] on a device; `holes` [N, L, G, i] exist only here.

    Behind these arrays come base and capacity of rings [N, L], where slots follow from them. `demoted` tables have rows
    of their own.
    """

    def __init__(self, arrays: Sequence[Ints], device: torch.device, demoted: DemotedBlockTables | None = None):
        N, L, G, _ = arrays[0].shape
        self.dense: Ints = np.zeros(N, np.int32)
        self.counts = arrays[1]
        self.rows = DeviceRows([*arrays, self.dense], device, self.counts)
        self.device = device
        self.demoted = demoted
        self.holes = torch.zeros(N, L, G, 0, dtype=torch.int32, device=device)

    def mark_dirty(self, row: int, dense: bool | None = None) -> None:
        """Upload this row before the next step. `dense`: place i of tables without a window holds position i."""
        self.rows.mark_dirty(row)
        if dense is not None:
            self.dense[row] = dense

    def eviction_lists(
        self,
        rows: Sequence[int],
        layers: Ints,
        slots_used: Ints,
        evictable: Sequence[tuple[int, int]],
        by_mass: Sequence[bool],
    ) -> EvictionLists:
        """Return the lists of rows [B] and layers [M] that have `slots_used` [B, M, G]; one upload for all numbers."""
        self.rows.upload()
        numbers = [np.array(x, np.int32) for x in (rows, layers, slots_used, evictable, by_mass)]
        r, i, used, ranges, kinds = upload([torch.from_numpy(x) for x in numbers], self.device)
        return EvictionLists(self.rows.tensors[0], r, i, used, ranges, kinds, int(slots_used.max()))

    def set_holes(self, rows: Sequence[int], layers: Ints, holes: Tensor) -> None:
        """Store the holes [B, M, G, n] of these layers, which each row's next tokens fill one after another."""
        n = holes.shape[-1]
        self.reserve_holes(n)
        self.holes[self._to_device(np.array(rows))[:, None], self._to_device(layers).long(), :, :n] = holes

    def reserve_holes(self, n: int) -> None:
        """Have room for n holes of each list, at least."""
        if n > self.holes.shape[-1]:
            self.holes = F.pad(self.holes, (0, n - self.holes.shape[-1]))

    def get_holes(self, row: int, layers: Ints, begin: int, end: int) -> Tensor:
        """Return the holes from number `begin` to `end` of a row in these layers, int32 [M, G, n]."""
        return self.holes[row, self._to_device(layers).long(), :, begin:end]

    def map_holes(
        self,
        slots: Ints,
        token_indices: NDArray[Any],
        rows: Ints,
        hole_indices: NDArray[Any],
        is_evicting: NDArray[np.bool_],
    ) -> Tensor:
        """Replace slots [L, G, T] of the tokens `token_indices` [t] by holes of their `rows` [t], on the device.

        Token t takes the hole number `hole_indices[t]` in the layers where `is_evicting` [L, t].
        """
        found = self._to_device(slots)
        if len(token_indices):
            tokens, r, i, evicts = (self._to_device(x) for x in (token_indices, rows, hole_indices, is_evicting))
            holes = self.holes[r.long(), :, :, i.long()].permute(1, 2, 0)  # [L, G, t]
            found[:, :, tokens] = torch.where(evicts[:, None], holes, found[:, :, tokens])
        return found

    def slot_rule(self, hole_indices: Ints | None, keeps_last: bool) -> SlotRule:
        """Return what the slots of fresh tokens follow from; `hole_indices` are those of tokens [T]."""
        self.rows.upload()
        pages, _, windows, ring_base, capacity, _ = self.rows.tensors
        indices = None if hole_indices is None else torch.from_numpy(hole_indices)
        return SlotRule(pages, windows, ring_base, capacity, self.holes, indices, keeps_last)

    def build_tables(self, rows: Tensor, query_start_loc: Tensor) -> Tables:
        """Return the tables of all layers for a step; rows [B] and query_start_loc [B + 1] are int32 on the host."""
        self.rows.upload()
        pages, counts, windows, *_, dense = self.rows.tensors
        return Tables(
            pages=pages.transpose(0, 1),
            counts=counts.transpose(0, 1),
            windows=windows.T,
            rows=rows,
            query_start_loc=query_start_loc,
            dense=dense,
            max_pages=int(self.counts[rows.numpy()].max(initial=0)),
            demoted=self.demoted.build_tables(rows) if self.demoted else None,
        )

    def _to_device(self, x: NDArray[Any]) -> Tensor:
        return to_device(torch.from_numpy(x), self.device)
