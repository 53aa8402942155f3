"""The plan of a step's attention: tiles of query rows.

A tile is six ints: request b, its row in the tables, its first fresh token, its number of fresh tokens, the first query
row of the tile, and the index of its first token among those that store attention weights. A request with few query
rows is one decode tile, computed in splits of its table. A request with many is cut into prefill tiles of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from retain.kernels.api import KV, Tables
from retain.kernels.slots.pool_dtypes import QUANTIZED_DTYPES, key_bytes, value_bytes
from retain.kernels.slots.scoring import GAUSSIAN, GUMBEL, AttentionScoring
from retain.kernels.transfers import to_device, upload
from retain.kernels.triton import decode_kernels, noise
from retain.kernels.triton.prefill_plan import PrefillScoring, attention_block, plan_prefill_scoring

MAX_DECODE_ROWS = 64  # query rows of a decode tile, at most
ALIGNED_TILES = 4  # of which 16 bytes divide the size: kernels have no variants for other addresses
LOOK_BYTES = 2**30  # of what tiles that look at few slots compute in between, at most


@dataclass(frozen=True)
class TileList:
    """Tiles of one kind, int32 [J, 6] on the device."""

    data: Tensor
    rows_per_tile: int  # a power of 2
    num_splits: int  # 0 for prefill tiles
    max_rows: int = 0  # query rows that a decode tile has, at most
    scoring: PrefillScoring | None = None  # of prefill tiles whose rows change masses


@dataclass(frozen=True)
class MassBuffers:
    """The scoring of a step and the memory for its masses, on the device."""

    scoring: AttentionScoring
    noise_mode: int  # how scores are changed: a constant of noise.py
    lse: Tensor  # float32 [T, H]
    split_weights: Tensor  # [t, H, blocks * N], for the t tokens of decode tiles
    block_max: Tensor  # float32 [t, H, blocks]: what the weights of a block of slots are relative to


@dataclass(frozen=True)
class DecodeBlocks:
    """How decode tiles go through a table: in blocks of n slots, of which a split has `min_blocks` at least."""

    n: int  # a power of 2; a block may have slots of several pages
    min_blocks: int

    def count(self, num_slots: int) -> int:
        """Return the blocks of a table of so many slots."""
        return -(-num_slots // self.n)

    def max_splits(self, num_slots: int) -> int:
        """Return the most splits of any table with up to so many slots. (256 blocks have 64 splits, 257 have 52.)"""
        splits = -(-self.count(num_slots) // self.min_blocks)
        return max(min(splits, decode_kernels.MAX_SPLITS.value), 1)

    @property
    def constants(self) -> dict[str, int]:
        """Return the constants of kernels."""
        return {"N": self.n, "MIN_BLOCKS": self.min_blocks}


@dataclass(frozen=True)
class LookPlan:
    """The tokens of a step that look at few slots: a tile of each, int32 [J, 6] on the device."""

    tiles: Tensor
    tiles_by_index: Tensor  # the same, whose rows are their places in their own part
    num_slots: Tensor  # int32 [J] on the device: how many slots each chooses in a kv head
    tiles_at_once: int

    def parts(self) -> Iterator[LookPlan]:
        """Divide the tiles into parts of `tiles_at_once`."""
        lists = self.tiles, self.tiles_by_index, self.num_slots
        for parts in zip(*(x.split(self.tiles_at_once) for x in lists), strict=True):
            tiles, tiles_by_index, num_slots = parts
            yield LookPlan(tiles, tiles_by_index, num_slots, self.tiles_at_once)


@dataclass(frozen=True)
class AttentionPlan:
    """The tiles of a step, the same in every layer."""

    decode: list[TileList]
    prefill: list[TileList]
    prefill_scoring: list[PrefillScoring]  # of the prefill tiles that change masses
    mass_buffers: MassBuffers | None
    blocks: DecodeBlocks
    max_pages: int  # pages of a head, at most
    demoted: AttentionPlan | None = None  # the same tiles over demoted tokens; None where the step has none
    looks: LookPlan | None = None  # of the tokens that are in no other tile

    def without_masses(self) -> AttentionPlan:
        """Return the plan of a layer that changes no mass."""
        if self.mass_buffers is None:
            return self
        demoted = self.demoted and self.demoted.without_masses()
        return replace(self, prefill_scoring=[], mass_buffers=None, demoted=demoted)

    @property
    def tile_lists(self) -> list[TileList]:
        """Return the decode tiles and the prefill tiles."""
        return [*self.decode, *self.prefill]


def decode_blocks(kv: KV) -> DecodeBlocks:
    """Return blocks of at most 16 KiB of keys, or of the 16 slots that tensor cores need.

    Splits of quantized slots have twice as many, which are as many bytes. Exact products of float32 keep their operands
    in registers: blocks have half as many bytes.
    """
    size = 2**13 if kv.dtype == torch.float32 else 2**14
    n = max(size // (triton.next_power_of_2(kv.k_dim) * kv.dtype.itemsize), 16)
    return DecodeBlocks(min(n, 64), 8 if kv.dtype in QUANTIZED_DTYPES else 4)


def max_decode_rows(D: int) -> int:
    """Return the query rows that a decode tile has at most. Long rows, of D numbers, fill the memory of a core."""
    return MAX_DECODE_ROWS if D <= 256 else 16


def request_tiles(tables: Tables) -> Tensor:
    """Return tiles int32 [B, 6] with all fresh tokens of a request, on the host."""
    starts = tables.query_start_loc
    tiles = torch.zeros(len(tables.rows), 6, dtype=torch.int32)
    tiles[:, :4] = torch.stack((torch.arange(len(tiles)), tables.rows, starts[:-1], starts.diff()), 1)
    return tiles


def max_demoted_pages(tables: Tables) -> int:
    """Return the pages of demoted tokens that a head has at most; 0 where the step has none."""
    d = tables.demoted
    if d is None:
        return 0
    return d.pages.shape[-1] if d.max_pages is None else d.max_pages


def plan_attention(tables: Tables, R: int, D: int, kv: KV, scoring: AttentionScoring | None) -> AttentionPlan:
    """Divide the fresh tokens of a step into tiles; R query heads share a kv head of D numbers."""
    starts, rows = tables.query_start_loc.tolist(), tables.rows.tolist()
    max_pages = tables.pages.shape[-1] if tables.max_pages is None else tables.max_pages
    decode: dict[int, list[tuple[int, ...]]] = {}  # by rows of a tile
    prefill, prefill_requests, num_decode_tokens = [], [], 0
    rows_per_prefill_tile = attention_block(D, kv).rows
    num_dense = count_dense_tokens(tables)
    look_tiles = []
    for b, row in enumerate(rows):
        first, tokens = starts[b], num_dense[b]
        look_tiles += [(b, row, t, 1, 0, 0) for t in range(first + tokens, starts[b + 1])]
        if tokens == 0 and starts[b + 1] > first:
            continue
        if tokens * R <= max_decode_rows(D):
            decode.setdefault(pad_rows(tokens * R), []).append((b, row, first, tokens, 0, num_decode_tokens))
            num_decode_tokens += tokens
        else:
            prefill += [(b, row, first, tokens, m, 0) for m in range(0, tokens * R, rows_per_prefill_tile)]
            prefill_requests.append((b, row))
    blocks = decode_blocks(kv)
    num_splits = blocks.max_splits(max_pages * kv.page_size)
    mass_buffers, prefill_scoring = None, []
    if scoring:
        H = R * tables.pages.shape[-2]
        prefill_scoring = plan_prefill_scoring(scoring, starts, prefill_requests, H, kv.device)
        mass_buffers = make_mass_buffers(scoring, kv, max_pages, starts[-1], H, num_decode_tokens)
    decode_parts = sorted(decode.items())
    prefill_parts = divide_by_scoring(prefill, R, rows_per_prefill_tile, prefill_scoring)
    tiles_of_parts = [torch.tensor(tiles, dtype=torch.int32) for _, tiles in (*decode_parts, *prefill_parts)]
    on_device = upload(tiles_of_parts, kv.device)
    plan = AttentionPlan(
        decode=[
            TileList(data, rows_per_tile, num_splits, R * max(tokens for _, _, _, tokens, *_ in tiles))
            for (rows_per_tile, tiles), data in zip(decode_parts, on_device, strict=False)
        ],
        prefill=[
            TileList(data, rows_per_prefill_tile, 0, scoring=own_scoring)
            for (own_scoring, _), data in zip(prefill_parts, on_device[len(decode_parts) :], strict=True)
        ],
        prefill_scoring=prefill_scoring,
        mass_buffers=mass_buffers,
        blocks=blocks,
        max_pages=max_pages,
    )
    plan = add_demoted(plan, tables, max_demoted_pages(tables))
    if not look_tiles:
        return plan
    assert tables.looks is not None
    num_slots = to_device(tables.looks[[tile[2] for tile in look_tiles]], kv.device)
    return add_looks(plan, _tiles_to_device(look_tiles, kv.device), num_slots, kv, (R, tables.pages.shape[-2]))


def count_dense_tokens(tables: Tables) -> list[int]:
    """Return how many of its fresh tokens each request attends to all slots with: those before the ones that look."""
    starts = tables.query_start_loc
    if tables.looks is None:
        return starts.diff().tolist()
    looking = torch.cat((torch.zeros(1, dtype=torch.int64), (tables.looks > 0).cumsum(0)))
    return (starts.diff() - looking[starts.long()].diff()).tolist()


def add_looks(plan: AttentionPlan, tiles: Tensor, num_slots: Tensor, kv: KV, heads: tuple[int, int]) -> AttentionPlan:
    """Return the plan with tiles of tokens that look, on the device; rows without tokens are padding.

    `heads` are the query heads of a kv head, and the kv heads.
    """
    R, G = heads
    copies = key_bytes(kv.k_dim, kv.dtype) + value_bytes(kv.v_dim, kv.dtype) + 8 if kv.dtype in QUANTIZED_DTYPES else 0
    bytes_per_slot = G * (R * 4 + 8 + 4 + copies)  # scores, ranks, numbers of chosen slots
    tiles_at_once = LOOK_BYTES // (max(plan.max_pages, 1) * kv.page_size * bytes_per_slot)
    tiles_at_once = max(tiles_at_once // ALIGNED_TILES, 1) * ALIGNED_TILES
    by_index = tiles.clone()
    by_index[:, 1] = torch.arange(len(tiles), device=tiles.device) % tiles_at_once
    return replace(plan, looks=LookPlan(tiles, by_index, num_slots, tiles_at_once))


def divide_by_scoring(
    tiles: Sequence[tuple[int, ...]], R: int, rows: int, scorings: Sequence[PrefillScoring]
) -> list[tuple[PrefillScoring | None, list[tuple[int, ...]]]]:
    """Divide prefill tiles of so many rows by what scoring changes for them, those that see the most slots first.

    So the masses of a request do not depend on the noise of others. Tiles stay together where scoring takes no time,
    because it uses what the attention computes anyway.
    """
    parts: dict[int | None, tuple[PrefillScoring | None, list[tuple[int, ...]]]] = {}
    for tile in sorted(tiles, key=lambda tile: -tile[4]):
        b, _, first, _, m, _ = tile
        i = next((i for i, scoring in enumerate(scorings) if b in scoring.scored), None)
        if i is not None and scorings[i].changes_softmax:
            own = scorings[i].scored[b]
            i = i if own.start < first + -(-(m + rows) // R) and first + m // R < own.stop else None
        parts.setdefault(i, (None if i is None else scorings[i], []))[1].append(tile)
    return list(parts.values())


def add_demoted(plan: AttentionPlan, tables: Tables, max_pages: int) -> AttentionPlan:
    """Return the plan with its part for demoted tokens, of which a head has at most `max_pages` pages."""
    if tables.demoted is None or not max_pages:
        return plan
    kv, buffers = tables.demoted.kv, plan.mass_buffers
    blocks = decode_blocks(kv)
    num_splits = blocks.max_splits(max_pages * kv.page_size)
    if buffers:
        t, H, _ = buffers.split_weights.shape
        split_weights, block_max = allocate_split_weights(kv, max_pages, H, t)
        buffers = replace(buffers, split_weights=split_weights, block_max=block_max)  # lse is that of all tokens
    part = replace(
        plan,
        decode=[replace(tiles, num_splits=num_splits) for tiles in plan.decode],
        mass_buffers=buffers,
        blocks=blocks,
        max_pages=max_pages,
    )
    return replace(plan, demoted=part)


def pad_rows(num_rows: int) -> int:
    """Return the rows of a decode tile for this many query rows: a power of 2, at least the 8 of tensor cores."""
    return max(8, int(triton.next_power_of_2(max(num_rows, 1))))


def noise_mode_of(scoring: AttentionScoring) -> int:
    """Return how the scoring of a step changes scores: a constant of noise.py."""
    kinds = set(scoring.noise.tolist()) & {GUMBEL, GAUSSIAN}
    if not kinds:
        is_plain = bool((scoring.temperature == 1.0).all())
        return int((noise.PLAIN if is_plain else noise.TEMPERED).value)
    if len(kinds) > 1:
        return int(noise.MIXED.value)
    return int((noise.ONLY_GUMBEL if GUMBEL in kinds else noise.ONLY_GAUSSIAN).value)


def make_mass_buffers(
    scoring: AttentionScoring, kv: KV, max_pages: int, T: int, H: int, num_decode_tokens: int
) -> MassBuffers:
    """Copy the scoring to the device and allocate its buffers."""
    uploaded = AttentionScoring(*upload([*vars(scoring).values()], kv.device))
    buffers = allocate_mass_buffers(kv, max_pages, T, H, num_decode_tokens)
    return MassBuffers(uploaded, noise_mode_of(scoring), *buffers)


def allocate_mass_buffers(
    kv: KV, max_pages: int, T: int, H: int, num_decode_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate lse [T, H], split_weights and block_max of MassBuffers."""
    return torch.empty(T, H, device=kv.device), *allocate_split_weights(kv, max_pages, H, num_decode_tokens)


def allocate_split_weights(kv: KV, max_pages: int, H: int, t: int) -> tuple[Tensor, Tensor]:
    """Allocate split_weights [t, H, blocks * N] and block_max [t, H, blocks] of MassBuffers.

    bfloat16 has the range of float32: weights relative to a maximum may be small.
    """
    blocks = decode_blocks(kv)
    num_blocks = blocks.count(max_pages * kv.page_size)
    exact = kv.dtype == torch.float32 or triton.knobs.runtime.interpret
    dtype = torch.float32 if exact else torch.bfloat16
    split_weights = torch.empty(t, H, num_blocks * blocks.n, dtype=dtype, device=kv.device)
    return split_weights, torch.empty(t, H, num_blocks, device=kv.device)


def _tiles_to_device(tiles: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    return to_device(torch.tensor(tiles, dtype=torch.int32).view(-1, 6), device)
