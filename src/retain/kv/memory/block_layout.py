"""Blocks of the prefix cache: the pages of all layers without a window for the same tokens of a text.

A block has as many tokens as the largest page has slots; a group with shorter pages has several pages of it in each
head. The prefix cache keeps blocks as one array [K, n] of K pages for each of n blocks, whatever the groups are. Of the
last block of a text it may keep the first tokens only: page 0, which nobody owns, stands for those behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retain.kv.memory.block_tables import BlockTables
from retain.types import Ints


@dataclass(frozen=True)
class GroupBlocks:
    """The part of a KV cache group: M layers without a window and G kv heads, each with so many pages of a block."""

    num_layers: int
    num_kv_heads: int
    pages_per_block: int


@dataclass(frozen=True)
class BlockLayout:
    """Which pages of each group make up a block. Pages of a group are [M, G, p], p = n * pages_per_block."""

    groups: tuple[GroupBlocks, ...]
    block_size: int

    @property
    def pages_per_block(self) -> int:
        """K: the pages of all groups in a block, where no policy lets the layers slide."""
        return sum(g.num_layers * g.num_kv_heads * g.pages_per_block for g in self.groups)

    def blocks_of(self, groups: Sequence[BlockTables], row: int, num_tokens: int) -> Ints:
        """Return the blocks [K, n] of the first tokens of a row; page 0 stands for pages that they do not reach."""
        n = -(-num_tokens // self.block_size)
        parts = [np.zeros((0, n), np.int32)]
        for t, group in zip(groups, self.groups, strict=True):
            layers = t.full_layers(row)
            r = group.pages_per_block
            num_pages = -(-num_tokens // t.page_size)
            if M := len(layers):  # tables of states are too short for all blocks
                pages = np.zeros((M, group.num_kv_heads, n * r), np.int32)
                pages[..., :num_pages] = t.pages[row, layers, :, :num_pages]
                parts.append(pages.reshape(M, group.num_kv_heads, n, r).swapaxes(2, 3).reshape(-1, n))
        return np.concatenate(parts)

    def split(self, blocks: Ints) -> list[Ints]:
        """Return the pages [M, G, p] of each group; M is 0 where a policy lets all layers slide, so that K is 0."""
        n = blocks.shape[-1]
        found = []
        begin = 0
        for g in self.groups:
            M = g.num_layers if len(blocks) else 0
            r = g.pages_per_block
            end = begin + M * g.num_kv_heads * r
            part = blocks[begin:end].reshape(M, g.num_kv_heads, r, n)
            found.append(part.swapaxes(2, 3).reshape(M, g.num_kv_heads, n * r))
            begin = end
        return found


def block_layout(tables: Sequence[BlockTables], windows: Sequence[Sequence[int | None]]) -> BlockLayout:
    """Return the layout of blocks over these groups' tables; `windows` are the model's, of the layers of each group."""
    groups = tuple(
        GroupBlocks(sum(w is None for w in own), t.counts.shape[2], t.block_size // t.page_size)
        for t, own in zip(tables, windows, strict=True)
    )
    return BlockLayout(groups, tables[0].block_size)
