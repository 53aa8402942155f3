"""Pages that the KV cache groups of a model share: how many slots of each group a page has, and its bytes.

All groups take pages from one pool, so pages have one size in bytes. The group whose slots take the most has
`page_size` slots in a page, the others a power of two times as many (vLLM unifies page sizes in the same way). So the
tokens of a block, the largest page in slots, fill whole pages of every group.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

import torch

from retain.kernels.slots.kv_cache_spec import KVCacheGroupSpec, KVCacheSpec
from retain.kernels.slots.pool_dtypes import key_bytes, slots_in_page, value_bytes
from retain.kernels.slots.reinterpret import PageFormat, shared_page_bytes

LARGEST_PAGE = 512  # slots; the cpu backend has no larger ones


@dataclass(frozen=True)
class GroupPages:
    """The pages of all groups. Formats are in the order of the groups."""

    formats: tuple[PageFormat, ...]
    # Of tokens in fewer bits, None of groups without attention; empty where no policy demotes.
    demoted_formats: tuple[PageFormat | None, ...]

    @property
    def key_and_value_bytes(self) -> tuple[int, int]:
        """The bytes of K, and of V, of a page."""
        return shared_page_bytes(list(self.formats))

    @property
    def page_bytes(self) -> int:
        """The bytes of a page with the positions and masses that it has in every format."""
        states = sum(f.slot_state_bytes for f in (*self.formats, *filter(None, self.demoted_formats)))
        return sum(self.key_and_value_bytes) + states

    @property
    def unused_bytes(self) -> tuple[int, ...]:
        """The bytes of K and V in a page that slots of each group leave unused."""
        return tuple(sum(self.key_and_value_bytes) - sum(f.bytes) for f in self.formats)


def divide_pages(
    spec: KVCacheSpec,
    page_size: int,
    dtype: torch.dtype,
    score_columns: int = 1,
    demoted_dtype: torch.dtype | None = None,
    has_sketches: bool = False,
) -> GroupPages:
    """Divide KV memory into pages for the groups of a model's caches.

    A slot has masses for each of up to `score_columns` query heads of a kv head; where it is 1, one for all of them.
    With `has_sketches` pages of groups with a layer that sees all tokens have sketches.
    """
    # Where each query head has a mass, these are the query heads of the model.
    num_heads = score_columns * min((g.num_kv_heads for g in spec.attention_groups), default=1)
    largest = max(_slot_bytes(g, dtype) for g in spec.groups)
    formats = []
    demoted: list[PageFormat | None] = []
    for g in spec.groups:
        most = int(log2(max(LARGEST_PAGE // page_size, 1)))
        slots = page_size * 2 ** min(round(log2(largest / _slot_bytes(g, dtype))), most)
        columns = num_heads // g.num_kv_heads if score_columns > 1 and g in spec.attention_groups else 1
        formats.append(
            PageFormat(slots, _slot_dtype(g, dtype), g.k_dim, g.v_dim, columns, has_sketches and None in g.windows)
        )
        if demoted_dtype and g.is_state:
            demoted.append(None)
        elif demoted_dtype:
            fewer = slots_in_page(slots, g.k_dim, dtype, demoted_dtype, v_dim=g.v_dim)
            demoted.append(PageFormat(fewer, demoted_dtype, g.k_dim, g.v_dim, columns))
    return GroupPages(tuple(formats), tuple(demoted))


def fold_states(spec: KVCacheSpec, page_size: int, dtype: torch.dtype) -> KVCacheSpec:
    """Return the layers of a model with states of linear attention that fold at the ends of their pages."""
    states = spec.state_group
    if not states:
        return spec
    formats = divide_pages(spec, page_size, dtype).formats
    return spec.fold_at(formats[spec.groups.index(states)].page_size)


def first_attention_group(spec: KVCacheSpec) -> int:
    """Return the number of the first group whose layers attend, or 0: its slots have the pool's dtype."""
    return next((i for i, g in enumerate(spec.groups) if not g.is_state), 0)


def mean_slot_bytes(spec: KVCacheSpec, dtype: torch.dtype) -> float:
    """Return the bytes of a slot with its position and one mass, the mean over all kv heads of layers that attend."""
    groups = [g for g in spec.groups if not g.is_state]
    heads = [len(g.caches) * g.num_kv_heads for g in groups]
    sizes = [_slot_bytes(g, dtype) + 8 for g in groups]
    return sum(n * size for n, size in zip(heads, sizes, strict=True)) / sum(heads)


def _slot_dtype(group: KVCacheGroupSpec, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if group.is_state else dtype


def _slot_bytes(group: KVCacheGroupSpec, dtype: torch.dtype) -> int:
    dtype = _slot_dtype(group, dtype)
    return key_bytes(group.k_dim, dtype) + value_bytes(group.v_dim, dtype)
