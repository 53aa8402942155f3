"""The fresh tokens of a step, as the host knows them: what a cache makes a batch of, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.api import Batch, GroupInputs, Tables
from retain.kernels.slots.scoring import AttentionScoring
from retain.kv.manager import KVCacheManager
from retain.types import Ints


@dataclass(frozen=True)
class StepTokens:
    """T fresh tokens of B rows, in arrays, which go to other ranks faster than tensors. See `Batch`."""

    rows: Ints  # [B]
    query_start_loc: Ints  # [B + 1]
    input_ids: NDArray[np.int64]
    positions: Ints
    logits_indices: NDArray[np.int64]
    scoring: AttentionScoring | None = None
    bfloat16_rows: Sequence[tuple[int, int]] = ()
    adapters: Ints | None = None
    looks: Ints | None = None  # [T]: see `Tables.looks`

    @classmethod
    def pack(
        cls,
        rows: Sequence[int],
        first_positions: Sequence[int],
        fresh: Sequence[Sequence[int]],
        num_logits: Sequence[int],
    ) -> StepTokens:
        """Return fresh tokens of rows of these indices, which follow one another from their first positions on.

        The last `num_logits` tokens of each row need logits.
        """
        counts = np.array([len(f) for f in fresh], np.int32)
        starts = np.concatenate(([0], counts.cumsum(dtype=np.int32))).astype(np.int32)  # [B + 1]
        offsets = np.array(first_positions, np.int32) - starts[:-1]
        positions = np.arange(starts[-1], dtype=np.int32) + np.repeat(offsets, counts)  # [T]
        indices = [np.arange(end - n, end) for end, n in zip(starts[1:].tolist(), num_logits, strict=True)]
        ids = np.array([t for f in fresh for t in f], np.int64)
        return cls(np.array(rows, np.int32), starts, ids, positions, np.concatenate(indices))

    def build_batch(
        self, cache: KVCacheManager, build_tables: Callable[[Tensor, Tensor], list[Tables]] | None = None
    ) -> Batch:
        """Return the batch of a cache that has reserved the pages of these tokens.

        `build_tables(rows, query_start_loc)` returns the pages that the tokens attend to, if not all that rows own.
        """
        starts = self.query_start_loc
        token_rows = np.repeat(self.rows, np.diff(starts))  # [T]
        tables = (build_tables or cache.build_tables)(torch.from_numpy(self.rows), torch.from_numpy(starts))
        groups = cache.group_inputs(token_rows, self.positions, tables)
        return Batch(
            groups=groups if self.looks is None else [_with_looks(g, torch.from_numpy(self.looks)) for g in groups],
            caches=cache.spec.group_indices,
            input_ids=torch.from_numpy(self.input_ids),
            positions=torch.from_numpy(self.positions),
            logits_indices=torch.from_numpy(self.logits_indices),
            scoring=self.scoring,
            bfloat16_rows=self.bfloat16_rows,
            adapters=None if self.adapters is None else torch.from_numpy(self.adapters),
        )

    def build_step(self, cache: KVCacheManager) -> Batch:
        """Return the batch of a step of requests, whose rows may load, or want queries."""
        batch = self.build_batch(cache)
        first_positions = self.positions[self.query_start_loc[:-1]].tolist()
        hook = cache.attention_hook(self.rows.tolist(), first_positions, self.query_start_loc.tolist())
        return replace(batch, before_attention=hook)


def _with_looks(group: GroupInputs, looks: Tensor) -> GroupInputs:
    """Return the inputs of a group whose tokens look; where it has windows only, they see all slots of these."""
    return group if group.kv.sketches is None else replace(group, tables=replace(group.tables, looks=looks))
