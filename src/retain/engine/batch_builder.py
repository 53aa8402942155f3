"""The batch of a step: the fresh tokens of all requests as flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from retain.engine.scheduler import ScheduledRequest
from retain.engine.step_tokens import StepTokens
from retain.kernels.api import Batch, Tables
from retain.kernels.slots.scoring import AttentionScoring
from retain.kv.eviction.policy import QueryWeights
from retain.kv.manager import KVCacheManager
from retain.types import Floats, Ints


def list_tokens(
    scheduled: Sequence[ScheduledRequest],
    cache: KVCacheManager,
    prompt_activations: str = "int8",
    carries_states: bool = False,
) -> StepTokens:
    """Return the tokens of a step. `prompt_activations`: see `Config`.

    Where requests carry hidden states the last token of each has logits.
    """
    tokens = StepTokens.pack(
        rows=[s.row.index for s in scheduled],
        first_positions=[s.request.next_position for s in scheduled],
        fresh=[s.request.next_tokens(s.num_tokens) for s in scheduled],
        num_logits=[count_rows(s, carries_states) for s in scheduled],
    )
    return replace(
        tokens,
        scoring=build_attention_scoring(scheduled),
        bfloat16_rows=prompt_rows(scheduled) if prompt_activations == "bfloat16" else (),
        adapters=build_adapters(scheduled),
        looks=build_looks(scheduled, cache),
    )


def count_rows(s: ScheduledRequest, carries_states: bool) -> int:
    """Return how many of a request's tokens have logits: at least the last one, where the next step needs its state."""
    return max(s.num_logits, int(carries_states))


def stack_states(scheduled: Sequence[ScheduledRequest], size: int, device: torch.device) -> Tensor:
    """Return the hidden state before the first fresh token of each request, [B, size]; zeros where it is not known.

    It is not at the beginning of a text and behind a prefix hit, which changes one slot of a draft head.
    """
    unknown = torch.zeros(size, device=device)
    return torch.stack([unknown if s.request.hidden_state is None else s.request.hidden_state for s in scheduled])


def build_adapters(scheduled: Sequence[ScheduledRequest]) -> Ints | None:
    """Return the number of the adapter of each fresh token, int32 [T], -1 for none; None where no token has one."""
    found = np.full(sum(s.num_tokens for s in scheduled), -1, np.int32)
    end = 0
    for s in scheduled:
        end += s.num_tokens
        if adapter := s.request.input.adapter:
            num_activated = s.request.next_position + s.num_tokens - s.request.text.extra_from
            found[end - min(max(num_activated, 0), s.num_tokens) : end] = adapter.number
    return found if (found >= 0).any() else None


def prompt_rows(scheduled: Sequence[ScheduledRequest]) -> list[tuple[int, int]]:
    """Return the ranges of fresh tokens that belong to a prompt or to a scoring pass of it.

    Whether a token does depends on its request and position alone: one that is computed again is of the same kind.
    """
    ranges: list[tuple[int, int]] = []
    begin = 0
    for s in scheduled:
        n = s.num_tokens if s.request.scoring else len(s.request.prompt) - s.request.next_position
        if n > 0:
            first = ranges.pop()[0] if ranges and ranges[-1][1] == begin else begin  # each range reads all weights
            ranges.append((first, begin + min(n, s.num_tokens)))
        begin += s.num_tokens
    return ranges


def build_looks(scheduled: Sequence[ScheduledRequest], cache: KVCacheManager) -> Ints | None:
    """Return how many slots of a head each fresh token attends to, int32 [T], 0 for all; None where none looks.

    As with `prompt_rows`, that depends on a token's request and position alone, but where a budget has shrunk: a step
    ends where one evicts.
    """
    if not any(s.request.policy.looks for s in scheduled):
        return None
    counts = []
    for s in scheduled:
        positions = np.arange(s.request.next_position, s.request.next_position + s.num_tokens, dtype=np.int32)
        looked = s.request.policy.looked_slots(cache.rows[s.row.index].count_held(positions + 1))
        is_looking = ~np.bool_(s.request.scoring) & (positions >= s.request.first_look)
        counts.append(np.where(is_looking, looked, 0).astype(np.int32))
    return np.concatenate(counts)


def pack_tokens(
    cache: KVCacheManager,
    rows: Sequence[int],
    first_positions: Sequence[int],
    fresh: Sequence[Sequence[int]],
    num_logits: Sequence[int],
    build_tables: Callable[[Tensor, Tensor], list[Tables]] | None = None,
) -> Batch:
    """Build a batch of tokens that are no step's of the engine; see `StepTokens`."""
    return StepTokens.pack(rows, first_positions, fresh, num_logits).build_batch(cache, build_tables)


def build_attention_scoring(scheduled: Sequence[ScheduledRequest]) -> AttentionScoring | None:
    """Collect what the queries of a step add to the mass of slots; None where no request needs masses."""
    num_certain = [s.num_tokens - len(s.request.drafts) for s in scheduled]  # drafts may be rejected: weight 0
    starts = [s.request.next_position for s in scheduled]
    positions = [np.arange(b, b + n, dtype=np.int32) for b, n in zip(starts, num_certain, strict=True)]
    needed = [s.request.query_weights(p) for s, p in zip(scheduled, positions, strict=True)]
    if not any(needed):
        return None
    each = [w or QueryWeights(np.zeros(n, np.float32)) for w, n in zip(needed, num_certain, strict=True)]
    draft_weights = [np.zeros(len(s.request.drafts), np.float32) for s in scheduled]
    temperatures = [np.ones(len(w.weights), np.float32) if w.tau is None else w.tau for w in each]
    return AttentionScoring(
        weights=torch.from_numpy(_interleave([w.weights for w in each], draft_weights)),
        temperature=torch.from_numpy(_interleave(temperatures, [1 + w for w in draft_weights])),
        decay=torch.tensor([w.decay for w in each]),
        noise=torch.tensor([w.noise for w in each], dtype=torch.int32),
        seed=torch.tensor([s.request.noise_seed for s in scheduled], dtype=torch.int32),
        noise_period=torch.tensor([w.noise_period for w in each], dtype=torch.int32),
    )


def _interleave(a: Sequence[Floats], b: Sequence[Floats]) -> Floats:
    """Concatenate a[0], b[0], a[1], b[1], ..."""
    return np.concatenate([x for pair in zip(a, b, strict=True) for x in pair])
