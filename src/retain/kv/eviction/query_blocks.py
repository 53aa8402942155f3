"""Queries of a row's prompt: collected block by block, until the row's policy has scored the slots by them.

A block is of positions, so its queries are the same however the prompt is divided into steps: a step ends where a block
does. What they give is added to the masses of slots, which prefixes, forks and evictions know how to keep. The newest
queries may be wanted once more, to fit the values of what is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.value_refit import fit_values
from retain.kv.eviction.view import BlockQueries, CacheView, KeyTransform
from retain.kv.memory.block_tables import UNBOUNDED, BlockTables
from retain.types import Ints


class Collected:
    """The queries of a range of positions, by cache, [n, H, D]: as far as they were computed."""

    def __init__(self, positions: range):
        self.positions = positions
        self.by_cache: dict[int, Tensor] = {}

    def add(self, cache: int, first_position: int, q: Tensor) -> None:
        """Keep those of the queries [t, H, D] that are of these positions."""
        begin = self.positions.start
        q = q[max(begin - first_position, 0) : max(self.positions.stop - first_position, 0)]
        if not len(q):
            return
        place = max(first_position - begin, 0)
        if cache not in self.by_cache:
            self.by_cache[cache] = torch.zeros(len(self.positions), *q.shape[1:], dtype=q.dtype, device=q.device)
        self.by_cache[cache][place : place + len(q)] = q


class QueryBlocks:
    """Collect the queries of the next block of a prompt, in the unwindowed layers [M] of a row."""

    def __init__(self, policy: BudgetPolicy, tables: BlockTables, layers: Ints, transform: KeyTransform):
        self.policy = policy
        self.tables = tables
        self.transform = transform
        self.caches = [int(cache) for cache in tables.layers[layers]]  # their numbers in the model
        self.last_start = policy.last_block_start  # asked for after every step
        self._blocks = [Collected(block) for block in policy.query_blocks]  # that were not scored yet
        self.newest = Collected(policy.plan.refit_positions)  # until the budget begins; rows that fork share them
        self._ends: dict[int, int] = {}  # the position behind the last of these queries, by cache

    @property
    def next_end(self) -> int:
        """Computed tokens at the end of the next block."""
        return self._blocks[0].positions.stop if self._blocks else UNBOUNDED

    def begin(self, position: int) -> None:
        """Leave out the blocks that end at a position or before: the row has their masses, or gets them there."""
        self._blocks = [block for block in self._blocks if block.positions.stop > position]

    def share_newest(self, other: QueryBlocks | None, position: int) -> bool:
        """Take over the newest queries that a row of the same text holds. False if some of them are missing."""
        if self.newest.positions.start >= position:
            return True
        if not other or self.newest.positions != other.newest.positions or not other.newest.by_cache:
            return False
        self.newest = other.newest
        return True

    def wants(self, positions: range) -> bool:
        """Return whether queries at these positions are to be collected. A step ends where a block ends."""
        wanted = [x.positions for x in (*self._blocks[:1], self.newest)]
        return any(positions.start < x.stop and positions.stop > x.start for x in wanted)

    def add(self, cache: int, first_position: int, q: Tensor) -> None:
        """Keep those of the queries [t, H, D] of a layer, rotated, that are of the next block or the newest ones.

        Where several layers share a cache, these are the queries of the first one, which writes into it.
        """
        end = first_position + len(q)
        if cache not in self.caches or end <= self._ends.get(cache, 0):
            return
        self._ends[cache] = end
        for collected in (*self._blocks[:1], self.newest):
            collected.add(cache, first_position, q)

    def score(self, pages: Tensor, key_factors: Tensor | None) -> None:
        """Add what the queries of the block give to the masses of all slots in tables [M, G, pages]."""
        kv = self.tables.kv
        block = self._blocks.pop(0)
        for m in range(len(self.caches)):
            table = pages[m : m + 1]
            found = self.policy.score_queries(self._view(table, m, block, block.positions.stop - 1, key_factors))
            by_column = found if kv.mass.shape[1] > 1 else found.sum(1, keepdim=True)  # [G, columns, S]
            num_columns = by_column.shape[1]  # a pool may have more: it is for layers with more query heads, too
            kv.mass[table[0], :num_columns] += by_column.view(len(found), num_columns, -1, kv.page_size).transpose(1, 2)

    def fit_values(
        self, pages: Tensor, kept: Tensor, is_used: Tensor, position: int, key_factors: Tensor | None
    ) -> list[Tensor]:
        """Return the values [G, n, V] of the slots `kept` [M, G, n] in tables [M, G, pages], layer by layer.

        The newest queries fit them, as if they were behind `position`, the last token. None are held from then on.
        """
        found = [
            fit_values(self._view(pages[m : m + 1], m, self.newest, position, key_factors), kept[m], is_used[m])
            for m in range(len(self.caches))
        ]
        self.newest = Collected(self.newest.positions)
        return found

    def _view(
        self, table: Tensor, m: int, collected: Collected, position: int, key_factors: Tensor | None
    ) -> CacheView:
        kv = self.tables.kv
        store = self.tables.store
        places = table[..., None] * kv.page_size + torch.arange(kv.page_size, device=kv.device)
        factors = None if key_factors is None else key_factors[m : m + 1]
        cache = self.caches[m]
        q = collected.by_cache[cache].float()
        q = q.view(len(q), table.shape[1], -1, q.shape[-1]).permute(1, 2, 0, 3)  # [G, R, n, D]
        q = q if factors is None else q * factors[0, :, None]
        pos = torch.arange(collected.positions.start, collected.positions.stop, device=kv.device)
        return CacheView(
            kv.pos[table].flatten(2),
            kv.mass[table].transpose(2, 3).flatten(-2),
            position,
            lambda: store.read(places.flatten(2)),
            transform=self.transform,
            key_factors=factors,
            queries=BlockQueries(
                q, pos, *self.transform.attention[cache], cache, self.policy.kv_heads.num_of_all(len(q))
            ),
        )
