"""Checks of the pages that the prefix cache holds."""

from __future__ import annotations

import torch

from retain.kv.manager import KVCacheManager

Contents = dict[int, tuple[object, torch.Tensor, torch.Tensor]]  # by the identity of who holds pages


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


def copy_cached_pages(cache: KVCacheManager) -> Contents:
    """Return copies of all that the prefix cache holds: of pages of texts, and of those of checkpoints."""
    holders = [(node.pages, node.page_list) for node in cache.prefix_cache.tree.iter_nodes() if node.has_pages]
    for node in cache.prefix_cache.tree.iter_nodes():
        holders += [(c, c.page_list) for c in node.checkpoints.values()]
    kv = cache.prefix_cache.groups[0].kv  # the memory of all groups
    return {
        id(holder): (holder, *(x[kv.to_index(pages)].view(torch.uint8) for x in (kv.k, kv.v)))
        for holder, pages in holders
    }


def check_unchanged(before: Contents, cache: KVCacheManager) -> None:
    """Check that what was held before and still is has the same bytes. Raises AssertionError."""
    after = copy_cached_pages(cache)
    for key in before.keys() & after.keys():
        assert torch.equal(before[key][1], after[key][1]), "keys of a cached page were written"
        assert torch.equal(before[key][2], after[key][2]), "values of a cached page were written"
