"""A step's attention as launches: which kernels (attention_kernels.py, mass_kernels.py, slots.py) run over which jobs.

A job is (request b, its row in the tables, its first fresh token, how many tokens, the first of its query rows, the
place of its first token among those that leave weights). Requests with few query rows are one job each, in stretches;
those with many are cut into tiles of rows, a job each. What is not known here: layers, graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from retain.kernels.api import GAUSSIAN, GUMBEL, KV, AttentionScoring, Tables
from retain.kernels.triton import attention_kernels, mass_kernels, noise, slots

MAX_DECODE_ROWS = 64  # query rows, at most, that look in stretches
TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class RopeParams:
    """How keys are turned before they are written; see models/rope.py. freqs float32 [n]."""

    freqs: Tensor
    attention_factor: float
    interleaved: bool


@dataclass(frozen=True)
class TileList:
    """Those of one kind: int32 [J, 6] on the device, each of `rows` query rows at most; few look in `stretches`."""

    data: Tensor
    rows_per_tile: int  # a power of 2
    num_splits: int  # 0: tiles
    max_rows: int = 0  # rows that there are at most


@dataclass(frozen=True)
class MassBuffers:
    """What a step leaves, on the device. `drawn`: which noise its requests have, one of noise.py's."""

    scoring: AttentionScoring
    noise_mode: int
    lse: Tensor  # float32 [T, H]
    split_weights: Tensor  # [t, H, places], of the t tokens of few rows
    tile_max: Tensor  # float32 [t, H, places / N]


@dataclass(frozen=True)
class AttentionPlan:
    """What a step has to do in every layer."""

    decode: list[TileList]
    prefill: TileList | None
    mass_tiles: Tensor | None  # int32 [n, 6]: requests of `many`, one job each, where there are masses
    mass_buffers: MassBuffers | None
    block_n: int  # slots that are looked at together
    max_pages: int  # pages of a head


def choose_block_n(kv: KV) -> int:
    """Slots that are looked at together: a power of 2 that divides a page; of keys no more than 16 KiB."""
    S = kv.page_size
    return min(S & -S, 64, 2**14 // (triton.next_power_of_2(kv.head_dim) * kv.dtype.itemsize))


def plan_attention(tables: Tables, R: int, D: int, kv: KV, scoring: AttentionScoring | None) -> AttentionPlan:
    """The jobs of a step. Those of all layers are the same."""
    starts, rows = tables.query_start_loc.tolist(), tables.rows.tolist()
    N, most = choose_block_n(kv), tables.pages.shape[-1] if tables.max_pages is None else tables.max_pages
    few: dict[int, list[tuple[int, ...]]] = {}
    many, whole, left = [], [], 0
    tile = 128 if D <= 128 and kv.dtype != torch.float32 else 64
    for b, row in enumerate(rows):
        first, tokens = starts[b], starts[b + 1] - starts[b]
        if tokens * R <= MAX_DECODE_ROWS:
            few.setdefault(pad_rows(tokens * R), []).append((b, row, first, tokens, 0, left))
            left += tokens
        else:
            many += [(b, row, first, tokens, m, 0) for m in range(0, tokens * R, tile)]
            whole.append((b, row, first, tokens, 0, 0))
    stretches = max_splits(most * (kv.page_size // N))
    return AttentionPlan(
        decode=[
            TileList(_tiles_to_device(jobs, kv.device), m, stretches, R * max(tokens for _, _, _, tokens, *_ in jobs))
            for m, jobs in sorted(few.items())
        ],
        prefill=TileList(_tiles_to_device(many, kv.device), tile, 0) if many else None,
        mass_tiles=_tiles_to_device(whole, kv.device) if whole and scoring else None,
        mass_buffers=make_mass_buffers(scoring, kv, most, starts[-1], R * tables.pages.shape[-2], left)
        if scoring
        else None,
        block_n=N,
        max_pages=most,
    )


def pad_rows(width: int) -> int:
    """Query rows of a program that has so many: tensor cores want 16 at least."""
    return max(16, int(triton.next_power_of_2(max(width, 1))))


def max_splits(blocks: int) -> int:
    """Of a table of so many blocks, at most, and of all shorter ones. (257 blocks are 52 stretches, 256 are 64.)"""
    return max(min(-(-blocks // attention_kernels.MIN_SPLIT_BLOCKS.value), attention_kernels.MAX_SPLITS.value), 1)


def noise_mode_of(scoring: AttentionScoring) -> int:
    """Which noise its requests have, one of noise.py's."""
    kinds = set(scoring.noise.tolist()) & {GUMBEL, GAUSSIAN}
    mixed = noise.MIXED if len(kinds) > 1 else noise.ONLY_GUMBEL if GUMBEL in kinds else noise.ONLY_GAUSSIAN
    return int((mixed if kinds else noise.NONE).value)


def make_mass_buffers(
    scoring: AttentionScoring, kv: KV, max_pages: int, T: int, H: int, num_decode_tokens: int
) -> MassBuffers:
    """What is asked, brought to the device, and room for what it takes."""
    there = AttentionScoring(**{name: x.to(kv.device, non_blocking=True) for name, x in vars(scoring).items()})
    return MassBuffers(there, noise_mode_of(scoring), *allocate_mass_buffers(kv, max_pages, T, H, num_decode_tokens))


def allocate_mass_buffers(
    kv: KV, max_pages: int, T: int, H: int, num_decode_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """For what is left: sums [T, H]; of few tokens weights [few, H, places] and tops [few, H, places / N]."""
    places, N = max_pages * kv.page_size, choose_block_n(kv)
    half = torch.float32 if kv.dtype == torch.float32 else torch.float16
    left = torch.empty(num_decode_tokens, H, places, dtype=half, device=kv.device)
    return torch.empty(T, H, device=kv.device), left, torch.empty(num_decode_tokens, H, places // N, device=kv.device)


def tokens_per_program(tokens: int, limit: int) -> int:
    """Tokens that one program takes; the interpreter is quicker with few programs."""
    return min(triton.next_power_of_2(tokens), 512 if triton.knobs.runtime.interpret else limit)


def write(kv: KV, slot_mapping: Tensor, k: Tensor, v: Tensor, pos: Tensor, rope: RopeParams | None = None) -> None:
    """Fresh tokens k, v [T, G, D] at pos int32 [T] into slots int32 [G, T], keys turned on the way."""
    T, G, D = k.shape
    k, v = k if rope else k.to(kv.dtype), v.to(kv.dtype)
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    C = kv.mass.shape[1]
    freqs = rope.freqs if rope else kv.mass  # any float32: it is not read
    some = tokens_per_program(T, 8)
    slots.write[(triton.cdiv(T, some), G)](
        slot_mapping, *slot_mapping.stride(), k, *k.stride()[:2], v, *v.stride()[:2], pos.contiguous(), T, kv.k, kv.v, kv.pos, kv.mass,
        freqs, len(rope.freqs) if rope else 0, rope.attention_factor if rope else 1.0,
        S=kv.page_size, D=D, DP=triton.next_power_of_2(D), C=C, CP=triton.next_power_of_2(C), T=some,
        ROPE=rope is not None, INTERLEAVED=rope is not None and rope.interleaved, num_warps=4 if some > 1 else 1,
    )  # fmt: skip


def attend(
    q: Tensor,
    kv: KV,
    tables: Tables,
    plan: AttentionPlan,
    q_pos: Tensor,
    scale: float,
    alibi_slopes: Tensor | None,
    layer: int,
) -> Tensor:
    """The output [T, H, D] of queries of one layer, and its masses."""
    T, H, D = q.shape
    G = tables.pages.shape[1]
    q = q if q.stride(-1) == 1 else q.contiguous()
    rough = triton.knobs.runtime.interpret and q.dtype == torch.bfloat16  # the interpreter cuts where it should round
    o = torch.zeros(T, H, D, dtype=torch.float32 if rough else q.dtype, device=q.device)
    for jobs in (*plan.decode, *([plan.prefill] if plan.prefill else [])):
        _launch_attention(q, o, kv, tables, plan, jobs, q_pos, scale, alibi_slopes, layer)
    s = plan.mass_buffers
    shape = {"G": G, "R": H // G, "S": kv.page_size, "N": plan.block_n, "C": kv.mass.shape[1]}
    blocks = max(plan.max_pages, 1) * (kv.page_size // plan.block_n)
    for jobs in plan.decode if s else []:
        assert s
        mass_kernels.accumulate_mass[(len(jobs.data), G, blocks)](
            kv.mass, *_page_args(tables), tables.windows, tables.windows.stride(0), jobs.data,
            s.scoring.weights, s.scoring.decay, s.lse, s.split_weights, s.tile_max, s.split_weights.shape[-1], M=jobs.rows_per_tile, **shape,
        )  # fmt: skip
    if s and plan.mass_tiles is not None:
        a = s.scoring
        mass_kernels.recompute_mass[(len(plan.mass_tiles), G, blocks)](
            q, *q.stride()[:2], kv.k, kv.pos, kv.mass, *_page_args(tables), *_visibility_args(tables), plan.mass_tiles, q_pos,
            q if alibi_slopes is None else alibi_slopes, scale * LOG2E,
            a.weights, a.temperature, a.decay, a.noise, a.seed, a.redraw_noise, layer, s.lse,
            D=D, DP=max(triton.next_power_of_2(D), 16), M=64, ALIBI=alibi_slopes is not None, DENSE=tables.dense is not None,
            NOISE=s.noise_mode, **_dot_args(kv), **shape,
        )  # fmt: skip
    return o.to(q.dtype)


def _launch_attention(
    q: Tensor, o: Tensor, kv: KV, tables: Tables, plan: AttentionPlan, tiles: TileList, q_pos: Tensor, scale: float,
    alibi_slopes: Tensor | None, layer: int,
) -> None:  # fmt: skip
    _, H, D = q.shape
    G, J, M, s, device = tables.pages.shape[1], len(tiles.data), tiles.rows_per_tile, plan.mass_buffers, q.device
    split, DP = tiles.num_splits > 0, max(triton.next_power_of_2(D), 16)
    room = J * G * tiles.num_splits * tiles.max_rows if split else 1
    tops, sums = torch.empty(2, (2 if s else 1) * room, device=device)
    parts = torch.empty(room, D, device=device)
    asked = (
        (a.weights, a.temperature, a.noise, a.seed, a.redraw_noise) if s and (a := s.scoring) else (q,) * 5
    )  # which is not read
    shape = {"G": G, "R": H // G, "S": kv.page_size, "D": D, "DP": DP, "M": M, "N": plan.block_n}
    attention_kernels.attention_fwd[(J, G, max(tiles.num_splits, 1))](
        q, *q.stride()[:2], o, tops, sums, parts, tiles.max_rows, kv.k, kv.v, kv.pos, *_page_args(tables), *_visibility_args(tables),
        tiles.data, q_pos, q if alibi_slopes is None else alibi_slopes, scale * LOG2E, tiles.num_splits,
        *asked, layer, *((s.lse, s.split_weights, s.tile_max, s.split_weights.shape[-1]) if s else (q, q, q, 0)),
        SPLIT=split, ALIBI=alibi_slopes is not None, DENSE=tables.dense is not None, UPDATE_MASS=s is not None,
        NOISE=s.noise_mode if s else 0, **_dot_args(kv), **shape, num_warps=8 if M > 64 or D > 128 else 4, num_stages=3,
    )  # fmt: skip
    if split:
        rows = M if triton.knobs.runtime.interpret else 1
        shape.pop("M")
        attention_kernels.merge_splits[(J, G, triton.cdiv(tiles.max_rows, rows))](
            o, tops, sums, parts, tiles.max_rows, *_page_args(tables)[3:], tiles.data, tiles.num_splits, s.lse if s else q,
            ROWS=rows, UPDATE_MASS=s is not None, **shape,
        )  # fmt: skip


def _page_args(t: Tables) -> tuple[Tensor, int, int, Tensor, int, int]:
    return t.pages, t.pages.stride(0), t.pages.stride(1), t.counts, t.counts.stride(0), t.counts.stride(1)


def _visibility_args(t: Tables) -> tuple[Tensor, int, Tensor, int, Tensor]:
    return t.windows, t.windows.stride(0), t.sinks, t.sinks.stride(0), t.sinks if t.dense is None else t.dense


def _dot_args(kv: KV) -> dict[str, object]:
    """In what products are made: in the pool's type, and float32 means float32. The interpreter has no bfloat16."""
    exact = kv.dtype == torch.float32 or (kv.dtype == torch.bfloat16 and triton.knobs.runtime.interpret)
    return {"DOT": tl.float32 if exact else TRITON_DTYPES[kv.dtype], "PRECISION": "ieee" if exact else "tf32"}


def _tiles_to_device(tiles: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    return torch.tensor(tiles, dtype=torch.int32).view(-1, 6).to(device, non_blocking=True)
