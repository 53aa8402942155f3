"""Queries of a row's prompt: collected block by block, until the row's policy has scored the slots by them.

A block is of positions, so its queries are the same however the prompt is divided into steps: a step ends where a block
does. What they give is added to the masses of slots, which prefixes, forks and evictions know how to keep.
"""

from __future__ import annotations

import torch
from torch import Tensor

from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.view import BlockQueries, CacheView, KeyTransform
from retain.kv.memory.block_tables import UNBOUNDED, BlockTables
from retain.types import Ints


class QueryBlocks:
    """Collect the queries of the next block of a prompt, in the unwindowed layers [M] of a row."""

    def __init__(self, policy: BudgetPolicy, tables: BlockTables, layers: Ints, transform: KeyTransform):
        self.policy = policy
        self.tables = tables
        self.transform = transform
        self.caches = [int(cache) for cache in tables.layers[layers]]  # their numbers in the model
        self.last_start = policy.last_block_start  # asked for after every step
        self._blocks = list(policy.query_blocks)  # that were not scored yet
        self.collected: dict[int, Tensor] = {}  # of the first of them, by cache, [n, H, D]
        self._ends: dict[int, int] = {}  # the position behind the last of these queries, by cache

    @property
    def next_end(self) -> int:
        """Computed tokens at the end of the next block."""
        return self._blocks[0].stop if self._blocks else UNBOUNDED

    def begin(self, position: int) -> None:
        """Leave out the blocks that end at a position or before: the row begins there, and has their masses."""
        self._blocks = [block for block in self._blocks if block.stop > position]

    def wants(self, positions: range) -> bool:
        """Return whether tokens at these positions are of the next block. A step ends where a block ends."""
        return bool(self._blocks) and positions.start < self._blocks[0].stop and positions.stop > self._blocks[0].start

    def add(self, cache: int, first_position: int, q: Tensor) -> None:
        """Keep those of the queries [t, H, D] of a layer, rotated, that are of the next block.

        Where several layers share a cache, these are the queries of the first one, which writes into it.
        """
        end = first_position + len(q)
        if cache not in self.caches or end <= self._ends.get(cache, 0):
            return
        self._ends[cache] = end
        block = self._blocks[0]
        q = q[max(block.start - first_position, 0) : block.stop - first_position]
        begin = max(first_position - block.start, 0)
        if cache not in self.collected:
            self.collected[cache] = torch.zeros(len(block), *q.shape[1:], dtype=q.dtype, device=q.device)
        self.collected[cache][begin : begin + len(q)] = q

    def score(self, pages: Tensor, key_factors: Tensor | None) -> None:
        """Add what the queries of the block give to the masses of all slots in tables [M, G, pages]."""
        kv = self.tables.kv
        block = self._blocks.pop(0)
        pos = torch.arange(block.start, block.stop, device=kv.device)
        for m, cache in enumerate(self.caches):
            table = pages[m : m + 1]
            factors = None if key_factors is None else key_factors[m : m + 1]
            q = self.collected[cache].float()
            q = q.view(len(q), table.shape[1], -1, q.shape[-1]).permute(1, 2, 0, 3)  # [G, R, n, D]
            queries = BlockQueries(
                q if factors is None else q * factors[0, :, None], pos, *self.transform.attention[cache]
            )
            view = self._view(table, m, block.stop - 1, queries, factors)
            found = self.policy.score_queries(view)  # [G, R, S]
            by_column = found if kv.mass.shape[1] > 1 else found.sum(1, keepdim=True)  # [G, columns, S]
            num_columns = by_column.shape[1]  # a pool may have more: it is for layers with more query heads, too
            kv.mass[table[0], :num_columns] += by_column.view(len(found), num_columns, -1, kv.page_size).transpose(1, 2)
        self.collected.clear()

    def _view(self, table: Tensor, m: int, position: int, queries: BlockQueries, factors: Tensor | None) -> CacheView:
        kv = self.tables.kv
        store = self.tables.store
        places = table[..., None] * kv.page_size + torch.arange(kv.page_size, device=kv.device)
        return CacheView(
            kv.pos[table].flatten(2),
            kv.mass[table].transpose(2, 3).flatten(-2),
            position,
            lambda: store.read(places.flatten(2)),
            slice(m, m + 1),
            transform=self.transform,
            key_factors=factors,
            queries=queries,
        )
