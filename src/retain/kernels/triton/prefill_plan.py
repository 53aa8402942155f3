"""How a step's prefill tiles are computed and scored: the sizes of tiles, and what scoring changes for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
from torch import Tensor

from retain.kernels.api import KV
from retain.kernels.pool_dtypes import QUANTIZED_DTYPES
from retain.kernels.scoring import GAUSSIAN, GUMBEL, AttentionScoring
from retain.kernels.transfers import to_device
from retain.kernels.triton import noise, prefill_kernels


@dataclass(frozen=True)
class BlockSize:
    """What a program of a kernel works on together, all powers of 2, and how it is compiled."""

    rows: int  # query rows of a tile, or tokens whose weights are added at once
    slots: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class PrefillScoring:
    """What is scored of a step's prefill tiles, and the memory for it, on the device."""

    tiles: Tensor  # int32 [n, 6], one for each request whose masses change: with its scored tokens
    log_weights: Tensor  # float32 [H, T]; see prefill_kernels.py
    constants: dict[str, int]  # CHANGE, NOISE and REDRAW of the kernels

    @property
    def changes_softmax(self) -> bool:
        """Return whether masses come from other weights than those of the attention."""
        return self.constants["CHANGE"] != prefill_kernels.UNCHANGED.value


def attention_block(D: int, kv: KV) -> BlockSize:
    """Return what a program of attention works on, for queries of D numbers."""
    widest = max(int(triton.next_power_of_2(max(D, kv.v_dim))), 16)
    if widest > 256:
        return BlockSize(16, 16, 8, 1)
    if kv.dtype == torch.float32:
        return BlockSize(64, max(2**12 // widest, 16) if widest > 64 else 64, 8 if widest > 128 else 4, 3)
    if widest > 128:
        return BlockSize(64, 32, 8, 3)
    return BlockSize(128, 64 if kv.dtype in QUANTIZED_DTYPES else 128, 8, 3)


def mass_block(D: int, R: int, kv: KV) -> BlockSize:
    """Return what a program of masses works on, where R query heads share a kv head.

    With one query head there are enough programs for larger blocks (measured on an H200, docs/log/gpu.md).
    """
    if D > 256:
        return BlockSize(16, 16, 4, 1)
    if D > 128 or kv.dtype == torch.float32:
        return BlockSize(32, 32, 4, 2)
    return BlockSize(64, 128, 8, 3) if R == 1 else BlockSize(32, 64, 4, 3)


def scored_tokens(scoring: AttentionScoring | None, starts: Sequence[int]) -> list[range]:
    """Return the fresh tokens of each request from the first to the last with a weight."""
    if scoring is None:
        return [range(0)] * (len(starts) - 1)
    has_weight = scoring.weights != 0
    ranges = []
    for begin, end in pairwise(starts):
        places = has_weight[begin:end].nonzero().flatten()
        ranges.append(range(begin + int(places[0]), begin + int(places[-1]) + 1) if len(places) else range(0))
    return ranges


def plan_prefill_scoring(
    scoring: AttentionScoring,
    scored: Sequence[range],
    requests: Sequence[tuple[int, int]],
    H: int,
    device: torch.device,
) -> PrefillScoring | None:
    """Plan the masses of `requests` (b and its row), of which tokens `scored[b]` have weights; None if none changes."""
    changed = [(b, row) for b, row in requests if len(scored[b]) or float(scoring.decay[b]) != 1.0]
    if not changed:
        return None
    tiles = torch.tensor([(b, row, scored[b].start, len(scored[b]), 0, 0) for b, row in changed], dtype=torch.int32)
    log_weights = torch.empty(H, len(scoring.weights), device=device)
    return PrefillScoring(to_device(tiles, device), log_weights, _constants(scoring, scored, [b for b, _ in changed]))


def _constants(scoring: AttentionScoring, scored: Sequence[range], requests: Sequence[int]) -> dict[str, int]:
    draws, change = [], prefill_kernels.UNCHANGED
    for b in requests:
        kind, own = int(scoring.noise[b]), slice(scored[b].start, scored[b].stop)
        if kind in (GUMBEL, GAUSSIAN):
            draws.append(b)
        tempered = bool((scoring.temperature[own] != 1).any() or (scoring.weights[own] < 0).any())
        if tempered or kind == GAUSSIAN:
            change = prefill_kernels.SCORES
    if draws and change.value == prefill_kernels.UNCHANGED.value:
        change = prefill_kernels.WEIGHTS
    kinds = {int(scoring.noise[b]) for b in draws}
    mode = noise.MIXED if len(kinds) > 1 else noise.ONLY_GAUSSIAN if GAUSSIAN in kinds else noise.ONLY_GUMBEL
    redraw = any(int(scoring.redraw_noise[b]) for b in draws)
    return {"CHANGE": change.value, "NOISE": mode.value if draws else 0, "REDRAW": redraw}
