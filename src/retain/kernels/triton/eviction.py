"""Launches of the kernels that evict."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from retain.kernels.api import KV, EvictionLists
from retain.kernels.transfers import to_device
from retain.kernels.triton import eviction_kernels
from retain.kernels.triton.kernel_args import array_args

LONG_LIST = 2**14  # slots of a list that takes more bins, and more warps to read them
MIN_DEEP = 16  # lists up to 4096 slots share a variant


def bin_sizes(num_slots: int) -> dict[str, int]:
    """Return the bins for lists of up to so many slots, and the warps of a program."""
    bins = 1024 if num_slots > LONG_LIST else 256
    deep = triton.next_power_of_2(triton.cdiv(num_slots, bins))
    return {"BINS": bins, "DEEP": max(deep, MIN_DEEP), "num_warps": bins // 256}


def select_victims(
    priority: Tensor, pos: Tensor, lengths: Tensor, first_evictable: int, last_evictable: int, n: int
) -> Tensor:
    """Return the places of the n slots to evict first from each list, in that order: int64 [N, n]."""
    N, S = pos.shape
    places = torch.empty(N, n, dtype=torch.int64, device=pos.device)
    if N and n:
        eviction_kernels.select_victims[(N,)](
            priority=priority.float().contiguous(), pos=pos.contiguous(), lengths=to_device(lengths, pos.device),
            places=places, width=S, first_evictable=first_evictable, last_evictable=last_evictable, n=n, **bin_sizes(S),
        )  # fmt: skip
    return places


def punch(kv: KV, lists: EvictionLists, holes: Tensor, n: int) -> None:
    """Turn the n slots to evict first of each list into holes, by one launch for all lists."""
    B, M, G = lists.slots_used.shape
    if B * M * G and n:
        eviction_kernels.punch[(M * G, B)](
            pos=kv.pos, mass=kv.mass, **array_args(lists.pages, "pages", "page_row", "page_layer", "page_head"),
            rows=lists.rows, layers=lists.layers, slots_used=lists.slots_used, evictable=lists.evictable,
            by_mass=lists.by_mass, **array_args(holes, "holes", "hole_row", "hole_layer", "hole_head"), n=n,
            G=G, S=kv.page_size, C=kv.mass.shape[1], **bin_sizes(lists.max_slots),
        )  # fmt: skip
