"""A step's attention as kernel launches: the plan of tiles, and the launches of one layer.

A tile is six ints: request b, its row in the tables, its first fresh token, its number of fresh tokens, the first query
row of the tile, and the index of its first token among those that store attention weights. A request with few query
rows is one decode tile, computed in splits of its table. A request with many is cut into prefill tiles of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from retain.kernels import quantized_slots
from retain.kernels.api import KV, Tables
from retain.kernels.pool_dtypes import QUANTIZED_DTYPES
from retain.kernels.scoring import GAUSSIAN, GUMBEL, AttentionScoring
from retain.kernels.triton import attention_kernels, mass_kernels, noise
from retain.kernels.triton.page_layout import page_args

MAX_DECODE_ROWS = 64  # query rows of a decode tile, at most
TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class TileList:
    """Tiles of one kind, int32 [J, 6] on the device."""

    data: Tensor
    rows_per_tile: int  # a power of 2
    num_splits: int  # 0 for prefill tiles
    max_rows: int = 0  # query rows that a decode tile has, at most


@dataclass(frozen=True)
class MassBuffers:
    """The scoring of a step and the memory for its masses, on the device."""

    scoring: AttentionScoring
    noise_mode: int  # which noise the requests draw: a constant of noise.py
    lse: Tensor  # float32 [T, H]
    split_weights: Tensor  # [t, H, slots], for the t tokens of decode tiles
    tile_max: Tensor  # float32 [t, H, slots / N]


@dataclass(frozen=True)
class AttentionPlan:
    """The tiles of a step, the same in every layer."""

    decode: list[TileList]
    prefill: TileList | None
    mass_tiles: Tensor | None  # int32 [n, 6], one for each prefill request, if masses change
    mass_buffers: MassBuffers | None
    block_n: int  # N: slots that a kernel loads together
    max_pages: int  # pages of a head, at most

    @property
    def tile_lists(self) -> list[TileList]:
        """Return the decode tiles and, if there are any, the prefill tiles."""
        return [*self.decode, *([self.prefill] if self.prefill else [])]


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one layer's attention."""

    q: Tensor
    kv: KV
    tables: Tables
    plan: AttentionPlan
    q_pos: Tensor
    scale: float
    alibi_slopes: Tensor | None
    layer: int


def choose_block_n(kv: KV) -> int:
    """Return the slots that a kernel loads together: a power of 2 that divides a page, at most 16 KiB of keys."""
    S = kv.page_size
    return min(S & -S, 64, 2**14 // (triton.next_power_of_2(kv.head_dim) * kv.dtype.itemsize))


def plan_attention(tables: Tables, R: int, D: int, kv: KV, scoring: AttentionScoring | None) -> AttentionPlan:
    """Divide the fresh tokens of a step into tiles; R query heads share a kv head of D numbers."""
    starts, rows = tables.query_start_loc.tolist(), tables.rows.tolist()
    max_pages = tables.pages.shape[-1] if tables.max_pages is None else tables.max_pages
    decode: dict[int, list[tuple[int, ...]]] = {}  # by rows of a tile
    prefill, mass_tiles, num_decode_tokens = [], [], 0
    rows_per_prefill_tile = 128 if D <= 128 and kv.dtype != torch.float32 else 64
    for b, row in enumerate(rows):
        first, tokens = starts[b], starts[b + 1] - starts[b]
        if tokens * R <= MAX_DECODE_ROWS:
            decode.setdefault(pad_rows(tokens * R), []).append((b, row, first, tokens, 0, num_decode_tokens))
            num_decode_tokens += tokens
        else:
            prefill += [(b, row, first, tokens, m, 0) for m in range(0, tokens * R, rows_per_prefill_tile)]
            mass_tiles.append((b, row, first, tokens, 0, 0))
    block_n = choose_block_n(kv)
    num_splits = max_splits(max_pages * (kv.page_size // block_n))
    decode_lists = []
    for rows_per_tile, tiles in sorted(decode.items()):
        max_rows = R * max(tokens for _, _, _, tokens, *_ in tiles)
        decode_lists.append(TileList(_tiles_to_device(tiles, kv.device), rows_per_tile, num_splits, max_rows))
    mass_buffers = None
    if scoring:
        H = R * tables.pages.shape[-2]
        mass_buffers = make_mass_buffers(scoring, kv, max_pages, starts[-1], H, num_decode_tokens)
    return AttentionPlan(
        decode=decode_lists,
        prefill=TileList(_tiles_to_device(prefill, kv.device), rows_per_prefill_tile, 0) if prefill else None,
        mass_tiles=_tiles_to_device(mass_tiles, kv.device) if mass_tiles and scoring else None,
        mass_buffers=mass_buffers,
        block_n=block_n,
        max_pages=max_pages,
    )


def pad_rows(num_rows: int) -> int:
    """Return the rows of a tile for this many query rows: a power of 2, at least the 16 that tensor cores need."""
    return max(16, int(triton.next_power_of_2(max(num_rows, 1))))


def max_splits(num_blocks: int) -> int:
    """Return the most splits of any table with up to this many blocks. (256 blocks have 64 splits, 257 have 52.)"""
    splits = -(-num_blocks // attention_kernels.MIN_SPLIT_BLOCKS.value)
    return max(min(splits, attention_kernels.MAX_SPLITS.value), 1)


def noise_mode_of(scoring: AttentionScoring) -> int:
    """Return which noise the requests of a step draw: a constant of noise.py."""
    kinds = set(scoring.noise.tolist()) & {GUMBEL, GAUSSIAN}
    if not kinds:
        return int(noise.NONE.value)
    if len(kinds) > 1:
        return int(noise.MIXED.value)
    return int((noise.ONLY_GUMBEL if GUMBEL in kinds else noise.ONLY_GAUSSIAN).value)


def make_mass_buffers(
    scoring: AttentionScoring, kv: KV, max_pages: int, T: int, H: int, num_decode_tokens: int
) -> MassBuffers:
    """Copy the scoring to the device and allocate its buffers."""
    on_device = {f.name: getattr(scoring, f.name).to(kv.device, non_blocking=True) for f in fields(scoring)}
    buffers = allocate_mass_buffers(kv, max_pages, T, H, num_decode_tokens)
    return MassBuffers(AttentionScoring(**on_device), noise_mode_of(scoring), *buffers)


def allocate_mass_buffers(
    kv: KV, max_pages: int, T: int, H: int, num_decode_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate lse [T, H], split_weights [t, H, slots] and tile_max [t, H, slots / N] of MassBuffers."""
    t, max_slots = num_decode_tokens, max_pages * kv.page_size
    dtype = torch.float32 if kv.dtype == torch.float32 else torch.float16
    lse = torch.empty(T, H, device=kv.device)
    split_weights = torch.empty(t, H, max_slots, dtype=dtype, device=kv.device)
    tile_max = torch.empty(t, H, max_slots // choose_block_n(kv), device=kv.device)
    return lse, split_weights, tile_max


def attend(
    q: Tensor,
    kv: KV,
    tables: Tables,
    plan: AttentionPlan,
    q_pos: Tensor,
    *,
    scale: float,
    alibi_slopes: Tensor | None,
    layer: int,
) -> Tensor:
    """Return the output [T, H, D] of one layer, and update the masses that the plan scores."""
    dtype = q.dtype
    if kv.dtype in QUANTIZED_DTYPES:
        q = quantized_slots.rotate(q)  # as the keys are
    q = q if q.stride(-1) == 1 else q.contiguous()
    call = AttentionCall(q, kv, tables, plan, q_pos, scale, alibi_slopes, layer)
    # The interpreter truncates to bfloat16 where a GPU rounds, so torch rounds for it.
    in_float32 = triton.knobs.runtime.interpret and dtype == torch.bfloat16
    o = torch.zeros(q.shape, dtype=torch.float32 if in_float32 else dtype, device=q.device)
    for tiles in plan.tile_lists:
        _launch_attention(call, tiles, o)
    if plan.mass_buffers:
        _launch_mass(call, plan.mass_buffers)
    return o.to(dtype)


def _launch_attention(call: AttentionCall, tiles: TileList, o: Tensor) -> None:
    q, kv, tables, plan, slopes = call.q, call.kv, call.tables, call.plan, call.alibi_slopes
    _, H, D = q.shape
    G, J, M, buffers = tables.pages.shape[1], len(tiles.data), tiles.rows_per_tile, plan.mass_buffers
    is_split, DP = tiles.num_splits > 0, max(triton.next_power_of_2(D), 16)
    split_rows = J * G * tiles.num_splits * tiles.max_rows if is_split else 1
    split_max, split_sum = torch.empty(2, (2 if buffers else 1) * split_rows, device=q.device)
    split_out = torch.empty(split_rows, D, device=q.device)
    # Where the kernels read no masses, q stands in for the pointers.
    s = buffers.scoring if buffers else None
    scoring_args = (s.weights, s.temperature, s.noise, s.seed, s.redraw_noise) if s else (q,) * 5
    mass_args = (buffers.lse, buffers.split_weights, buffers.tile_max) if buffers else (q,) * 3
    shape = {"G": G, "R": H // G, "S": kv.page_size, "D": D, "DP": DP, "N": plan.block_n}
    pages = page_args(kv)
    attention_kernels.attention_fwd[(J, G, max(tiles.num_splits, 1))](
        q, *q.stride()[:2], o, split_max, split_sum, split_out, tiles.max_rows,
        pages.k, pages.v, pages.k_scales, pages.v_scales, kv.pos, *_table_args(tables), *_visibility_args(tables),
        tiles.data, call.q_pos, q if slopes is None else slopes, call.scale * LOG2E, tiles.num_splits,
        *scoring_args, call.layer, *mass_args, buffers.split_weights.shape[-1] if buffers else 0,
        M=M, SPLIT=is_split, ALIBI=slopes is not None, DENSE=tables.dense is not None,
        UPDATE_MASS=buffers is not None, NOISE=buffers.noise_mode if buffers else 0, **_dot_args(kv), **shape,
        **pages.constants,
        num_warps=8 if M > 64 or D > 128 else 4, num_stages=3,
    )  # fmt: skip
    if is_split:
        rows = M if triton.knobs.runtime.interpret else 1
        attention_kernels.merge_splits[(J, G, triton.cdiv(tiles.max_rows, rows))](
            o, split_max, split_sum, split_out, tiles.max_rows, *_table_args(tables)[3:], tiles.data, tiles.num_splits,
            buffers.lse if buffers else q, ROWS=rows, UPDATE_MASS=buffers is not None, **shape,
        )  # fmt: skip


def _launch_mass(call: AttentionCall, buffers: MassBuffers) -> None:
    q, kv, tables, plan, slopes, s = call.q, call.kv, call.tables, call.plan, call.alibi_slopes, buffers.scoring
    _, H, D = q.shape
    G = tables.pages.shape[1]
    shape = {"G": G, "R": H // G, "S": kv.page_size, "N": plan.block_n, "C": kv.mass.shape[1]}
    num_blocks = max(plan.max_pages, 1) * (kv.page_size // plan.block_n)
    for tiles in plan.decode:
        mass_kernels.accumulate_mass[(len(tiles.data), G, num_blocks)](
            kv.mass, *_table_args(tables), tables.windows, tables.windows.stride(0), tiles.data, s.weights, s.decay,
            buffers.lse, buffers.split_weights, buffers.tile_max, buffers.split_weights.shape[-1],
            M=tiles.rows_per_tile, **shape,
        )  # fmt: skip
    if plan.mass_tiles is not None:
        pages = page_args(kv)
        mass_kernels.recompute_mass[(len(plan.mass_tiles), G, num_blocks)](
            q, *q.stride()[:2], pages.k, pages.k_scales, kv.pos, kv.mass, *_table_args(tables),
            *_visibility_args(tables), plan.mass_tiles,
            call.q_pos, q if slopes is None else slopes, call.scale * LOG2E,
            s.weights, s.temperature, s.decay, s.noise, s.seed, s.redraw_noise, call.layer, buffers.lse,
            D=D, DP=max(triton.next_power_of_2(D), 16), M=64, ALIBI=slopes is not None,
            DENSE=tables.dense is not None, NOISE=buffers.noise_mode, **_dot_args(kv), **shape,
            **pages.constants,
        )  # fmt: skip


def _table_args(t: Tables) -> tuple[Tensor, int, int, Tensor, int, int]:
    return t.pages, t.pages.stride(0), t.pages.stride(1), t.counts, t.counts.stride(0), t.counts.stride(1)


def _visibility_args(t: Tables) -> tuple[Tensor, int, Tensor]:
    """Return windows, their stride, and `dense`; where a kernel does not read `dense`, windows stand in."""
    return t.windows, t.windows.stride(0), t.windows if t.dense is None else t.dense


def _dot_args(kv: KV) -> dict[str, object]:
    """Return the dtype and precision of products: the pool's, exact for float32. The interpreter has no bfloat16.

    bfloat16 holds every integer of 8 bits. Numbers of 4 bits times their scales are rounded to it.
    """
    dtype = torch.bfloat16 if kv.dtype in QUANTIZED_DTYPES else kv.dtype
    exact = dtype == torch.float32 or (dtype == torch.bfloat16 and triton.knobs.runtime.interpret)
    return {"DOT": tl.float32 if exact else TRITON_DTYPES[dtype], "PRECISION": "ieee" if exact else "tf32"}


def _tiles_to_device(tiles: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    return torch.tensor(tiles, dtype=torch.int32).view(-1, 6).to(device, non_blocking=True)
