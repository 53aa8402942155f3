"""The definition of a look: which of the slots that a token sees it attends to."""

from __future__ import annotations

import torch
from torch import Tensor

from retain.kernels.api import KV
from retain.kernels.attention_params import AttentionParams
from retain.kernels.reference.softmax import adjust_scores, softmax
from retain.kernels.slots.pool_dtypes import INT4
from retain.kernels.slots.quantized_slots import from_bytes, rotate


def look(
    q: Tensor,
    copies: Tensor,
    pos: Tensor,
    q_pos: Tensor,
    visible: Tensor,
    counts: Tensor,
    params: AttentionParams,
    heads: slice,
) -> Tensor:
    """Return which slots the t tokens of a request attend to in one kv head, bool [t, S].

    q [t, R, D] are the queries of its query heads `heads`, copies [S, D] the keys in 4 bits, rotated, pos [1, S] and
    q_pos [t, 1] positions, visible [t, S] what tokens see, and counts int32 [t] how many slots they look at; 0: all.
    """
    x = params.scale * torch.einsum("trd,sd->rts", rotate(q), copies)
    x = adjust_scores(x, pos - q_pos, params, heads).masked_fill(~visible, -torch.inf)
    sinks = None if params.sink_logits is None else params.sink_logits[heads, None, None]
    weights = softmax(x, sinks).mean(0).masked_fill(~visible, -1.0)  # [t, S]
    by_age = pos[0].argsort(descending=True, stable=True)  # of equal weights the newest is first
    order = by_age[weights[:, by_age].argsort(dim=-1, descending=True, stable=True)]  # [t, S]
    ranks = order.argsort(-1)
    return visible & ((ranks < counts[:, None]) | (counts[:, None] == 0))


def split_copies(kv: KV) -> Tensor:
    """View the copies of keys of a pool as those of its slots: uint8 [P, S, n], written through."""
    assert kv.key_copies is not None
    return kv.key_copies.view(kv.num_pages, kv.page_size, -1)


def read_key_copies(kv: KV, pages: Tensor) -> Tensor:
    """Return the rotated keys of pages int64 [n] in 4 bits, float32 [n, S, D]. Raises ValueError without copies."""
    if kv.dtype == INT4:
        return from_bytes(kv.k[pages], kv.k_dim)
    if kv.key_copies is None:
        raise ValueError("tables.looks: the pool has no copies of keys")
    return from_bytes(split_copies(kv)[pages], kv.k_dim)
