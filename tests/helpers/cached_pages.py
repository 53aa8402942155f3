"""Checks of the pages that the prefix cache holds."""

from __future__ import annotations

import torch

from retain.kv.manager import KVCacheManager


def check_cached_pages(cache: KVCacheManager) -> None:
    """Check that the pages of every cached text hold its positions: nobody wrote into them. Raises AssertionError."""
    prefix = cache.prefix_cache
    for node in prefix.tree.iter_nodes():
        if not node.has_pages:
            continue
        for tables, pages in zip(prefix.groups, prefix.layout.split(node.pages), strict=True):
            begin = node.start_block * prefix.layout.block_size
            pos = tables.kv.pos[tables.kv.to_index(pages)].flatten(2)[..., : len(node.tokens)]
            assert (pos == torch.arange(begin, begin + pos.shape[-1])).all(), "a cached page was written"
