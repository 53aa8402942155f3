"""How a step's prefill tiles are computed and scored: the sizes of tiles, and what scoring changes for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from retain.kernels.api import KV
from retain.kernels.slots.pool_dtypes import QUANTIZED_DTYPES
from retain.kernels.slots.scoring import GAUSSIAN, GUMBEL, AttentionScoring
from retain.kernels.transfers import to_device
from retain.kernels.triton import noise, prefill_kernels


@dataclass(frozen=True)
class BlockSize:
    """What a program of a kernel works on together, all powers of 2, and how it is compiled."""

    rows: int  # query rows of a tile, or products of tokens and heads whose weights are added at once
    slots: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class PrefillScoring:
    """What is scored of the prefill tiles of requests that are scored alike, and the memory for it, on the device."""

    scored: dict[int, range]  # the tokens that are scored, by request
    tiles: Tensor  # int32 [n, 6], one for each request whose masses change: with its scored tokens
    log_weights: Tensor  # float32 [H, T]; see prefill_kernels.py
    constants: dict[str, int]  # CHANGE and NOISE of the kernels
    noise_period: int  # positions of queries that share a draw; 0: all do

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
        return BlockSize(64, min(max(2**12 // widest, 16), 32), 8, 3)
    if widest > 128:
        return BlockSize(64, 32, 8, 3) if kv.dtype in QUANTIZED_DTYPES else BlockSize(128, 64, 8, 2)
    return BlockSize(128, 64 if kv.dtype in QUANTIZED_DTYPES else 128, 8, 3)


def mass_block(D: int, R: int, kv: KV) -> BlockSize:
    """Return what a program of masses works on, where R query heads share a kv head.

    With one query head there are enough programs for larger blocks (measured on an H200, docs/log/gpu.md).
    """
    if D > 256:
        return BlockSize(16, 16, 4, 1)
    if kv.dtype == torch.float32:
        return BlockSize(32, 32, 4, 2)
    if D > 128:
        return BlockSize(32, 64, 4, 2)
    return BlockSize(64, 128, 8, 3) if R == 1 else BlockSize(32, 64, 4, 3)


def count_noise_columns(scoring: PrefillScoring, R: int, rows: int, device: torch.device) -> int:
    """Return the columns of noise of a tile of so many rows: one for each draw, or 0 where each row draws its own.

    Columns take shared memory: a tile of bfloat16 needs 102 to 108 KB with them, where sm_86, 89 and 120 have 99 KB.

    There are 16 at least: with 8, the least of tensor cores, Triton 3.6 spills. More than a quarter of the rows would
    cost more than they save.
    """
    if scoring.constants["CHANGE"] != prefill_kernels.WEIGHTS.value or not _has_large_shared_memory(device):
        return 0
    tokens = (rows + R - 2) // R + 1 if rows % R else rows // R  # at most, where a tile begins inside of a token
    period = scoring.noise_period
    draws = (tokens - 2) // period + 2 if period else 1
    columns = max(int(triton.next_power_of_2(draws)), 16)
    return columns if 4 * columns <= rows else 0


def _has_large_shared_memory(device: torch.device) -> bool:
    if device.type != "cuda":  # the interpreter, or a device that is compiled for
        return True
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack this one
    return bool(properties.shared_memory_per_block_optin >= 2**17)


def plan_prefill_scoring(
    scoring: AttentionScoring, starts: Sequence[int], requests: Sequence[tuple[int, int]], H: int, device: torch.device
) -> list[PrefillScoring]:
    """Plan the masses of `requests` (b and its row), which begin at `starts`: those that are scored alike together."""
    alike: dict[tuple[int, int, int], list[tuple[int, int, range]]] = {}
    for b, row in requests:
        scored = _scored_tokens(scoring, starts[b], starts[b + 1])
        if len(scored) or float(scoring.decay[b]) != 1.0:
            alike.setdefault(_change(scoring, b, scored), []).append((b, row, scored))
    log_weights = torch.empty(H if alike else 0, len(scoring.weights), device=device)
    plans = []
    for (change, noise_mode, period), members in alike.items():
        rows = [(b, row, scored.start, len(scored), 0, 0) for b, row, scored in members]
        tiles = to_device(torch.tensor(rows, dtype=torch.int32), device)
        constants = {"CHANGE": change, "NOISE": noise_mode}
        plans.append(PrefillScoring({b: scored for b, _, scored in members}, tiles, log_weights, constants, period))
    return plans


def _scored_tokens(scoring: AttentionScoring, begin: int, end: int) -> range:
    """Return the fresh tokens of a request from the first to the last with a weight."""
    places = scoring.weights[begin:end].nonzero().flatten()
    return range(begin + int(places[0]), begin + int(places[-1]) + 1) if len(places) else range(0)


def _change(scoring: AttentionScoring, b: int, scored: range) -> tuple[int, int, int]:
    """Return CHANGE and NOISE of the kernels, and the period of noise, for a request."""
    kind, own = int(scoring.noise[b]), slice(scored.start, scored.stop)
    draws = kind in (GUMBEL, GAUSSIAN)
    is_tempered = bool((scoring.temperature[own] != 1).any() or (scoring.weights[own] < 0).any())
    change = prefill_kernels.WEIGHTS if draws else prefill_kernels.UNCHANGED
    if is_tempered or kind == GAUSSIAN:
        change = prefill_kernels.SCORES
    mode = noise.ONLY_GAUSSIAN if kind == GAUSSIAN else noise.ONLY_GUMBEL
    return int(change.value), int(mode.value) if draws else 0, int(scoring.noise_period[b]) if draws else 0
