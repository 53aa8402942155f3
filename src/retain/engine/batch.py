"""One step as flat tensors: the fresh tokens of all requests, one behind the other.

What is not known here: why these requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from retain.engine.scheduler import ScheduledRequest
from retain.kernels.api import AttentionScoring, Tables
from retain.kv.eviction.budget import Floats, QueryWeights
from retain.kv.memory.cache import Cache


@dataclass(frozen=True)
class Batch:
    """T fresh tokens of B requests."""

    input_ids: Tensor  # int64 [T]; this and all but `slots` on the host, for it is little
    positions: Tensor  # int32 [T]
    rows: Tensor  # int32 [B]
    query_start_loc: Tensor  # int32 [B + 1]
    slot_mapping: Tensor  # int32 [L, G, T], where the pool is
    logits_indices: Tensor  # int64 [N]: fresh tokens whose logits are
    num_logits: list[int]  # [B]: how many of them each request has
    attention_scoring: AttentionScoring | None = None
    tables: Tables | None = None  # what they look at, if not at everything that their rows own
    before_attention: Callable[[int, Tensor], None] | None = (
        None  # told of every layer, with its queries, before it looks
    )
    after_attention: Callable[[int], None] | None = None  # and when it has looked


def build_batch(scheduled: Sequence[ScheduledRequest], cache: Cache) -> Batch:
    """The batch of these shares; their pages must be owned already (the scheduler sees to it)."""
    batch = pack_tokens(
        cache,
        [s.request.row for s in scheduled],
        [s.request.next_position for s in scheduled],
        [s.request.next_tokens(s.num_tokens) for s in scheduled],
        [s.request.num_logits(s.num_tokens) for s in scheduled],
    )
    rows = batch.rows.tolist()
    before = cache.prefix_cache.load_hook(rows, batch.query_start_loc.tolist()) if cache.prefix_cache else None
    return replace(
        batch,
        attention_scoring=build_attention_scoring(scheduled),
        before_attention=before,
        after_attention=cache.start_layerwise(rows, [s.request.attention_trace for s in scheduled]),
    )


def pack_tokens(
    cache: Cache,
    rows: Sequence[int | None],
    first_positions: Sequence[int],
    fresh: Sequence[Sequence[int]],
    num_logits: list[int],
) -> Batch:
    """Fresh tokens of these rows, from their first places in the text on; logits of the last `split` of each."""
    counts = np.array([len(f) for f in fresh], np.int32)
    starts = np.concatenate(([0], counts.cumsum(dtype=np.int32))).astype(np.int32)  # [B + 1]
    mine = np.array(rows, np.int32)  # [B]
    begins = np.array(first_positions, np.int32) - starts[:-1]
    places = np.arange(starts[-1], dtype=np.int32) + np.repeat(begins, counts)  # [T], in their texts
    wanted = [np.arange(end - n, end) for end, n in zip(starts[1:].tolist(), num_logits, strict=True)]
    return Batch(
        input_ids=torch.tensor([t for f in fresh for t in f]),
        positions=torch.from_numpy(places - np.repeat(cache.position_offset[mine], counts)),
        rows=torch.from_numpy(mine),
        query_start_loc=torch.from_numpy(starts),
        slot_mapping=cache.compute_slot_mapping(np.repeat(mine, counts), places),
        logits_indices=torch.from_numpy(np.concatenate(wanted)),
        num_logits=num_logits,
    )


def build_attention_scoring(scheduled: Sequence[ScheduledRequest]) -> AttentionScoring | None:
    """What the policies of these requests want fresh queries to leave; None where none wants anything."""
    certain = [s.num_tokens - len(s.request.drafts) for s in scheduled]  # drafts may be rejected: they leave nothing
    begins = [s.request.next_position for s in scheduled]
    places = [np.arange(b, b + n, dtype=np.int32) for b, n in zip(begins, certain, strict=True)]
    asked = [s.request.compute_query_weights(p) for s, p in zip(scheduled, places, strict=True)]
    if not any(asked):
        return None
    each = [w or QueryWeights(np.zeros(n, np.float32)) for w, n in zip(asked, certain, strict=True)]
    guessed = [np.zeros(len(s.request.drafts), np.float32) for s in scheduled]
    taus = [np.ones(len(w.weights), np.float32) if w.tau is None else w.tau for w in each]
    return AttentionScoring(
        weights=torch.from_numpy(_interleave([w.weights for w in each], guessed)),
        temperature=torch.from_numpy(_interleave(taus, [1 + x for x in guessed])),
        decay=torch.tensor([w.decay for w in each]),
        noise=torch.tensor([w.noise for w in each], dtype=torch.int32),
        seed=torch.tensor([s.request.noise_seed for s in scheduled], dtype=torch.int32),
        redraw_noise=torch.tensor([int(w.redraw_noise) for w in each], dtype=torch.int32),
    )


def _interleave(a: Sequence[Floats], b: Sequence[Floats]) -> Floats:
    """a[0], b[0], a[1], b[1], ... as one."""
    return np.concatenate([x for pair in zip(a, b, strict=True) for x in pair])
