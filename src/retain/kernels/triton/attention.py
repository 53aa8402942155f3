"""A step's attention as launches: which kernels (look.py, observe.py, slots.py) run over which jobs.

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

from retain.kernels import GAUSSIAN, GUMBEL, KV, Observe, Tables
from retain.kernels.triton import look, noise, observe, slots

FEW = 64  # query rows, at most, that look in stretches
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Turn:
    """How keys are turned before they are written; see models/rope.py. freqs float32 [n]."""

    freqs: Tensor
    gain: float
    pairs: bool


@dataclass(frozen=True)
class Jobs:
    """Those of one kind: int32 [J, 6] on the device, each of `rows` query rows at most; few look in `stretches`."""

    told: Tensor
    rows: int  # a power of 2
    stretches: int  # 0: tiles
    width: int = 0  # rows that there are at most


@dataclass(frozen=True)
class Seen:
    """What a step leaves, on the device. `drawn`: which noise its requests have, one of noise.py's."""

    asked: Observe
    drawn: int
    lse: Tensor  # float32 [T, H]
    left: Tensor  # [t, H, places], of the t tokens of few rows
    tops: Tensor  # float32 [t, H, places / N]


@dataclass(frozen=True)
class Work:
    """What a step has to do in every layer."""

    few: list[Jobs]
    many: Jobs | None
    whole: Tensor | None  # int32 [n, 6]: requests of `many`, one job each, where there are masses
    seen: Seen | None
    block: int  # slots that are looked at together
    most: int  # pages of a head


def block_of(kv: KV) -> int:
    """Slots that are looked at together: a power of 2 that divides a page; of keys no more than 16 KiB."""
    S = kv.page_size
    return min(S & -S, 64, 2**14 // (triton.next_power_of_2(kv.head_dim) * kv.dtype.itemsize))


def plan(tables: Tables, R: int, D: int, kv: KV, asked: Observe | None) -> Work:
    """The jobs of a step. Those of all layers are the same."""
    starts, rows = tables.starts.tolist(), tables.rows.tolist()
    N, most = block_of(kv), tables.pages.shape[-1] if tables.most is None else tables.most
    few: dict[int, list[tuple[int, ...]]] = {}
    many, whole, left = [], [], 0
    tile = 128 if D <= 128 and kv.dtype != torch.float32 else 64
    for b, row in enumerate(rows):
        first, tokens = starts[b], starts[b + 1] - starts[b]
        if tokens * R <= FEW:
            few.setdefault(rows_of(tokens * R), []).append((b, row, first, tokens, 0, left))
            left += tokens
        else:
            many += [(b, row, first, tokens, m, 0) for m in range(0, tokens * R, tile)]
            whole.append((b, row, first, tokens, 0, 0))
    stretches = stretches_of(most * (kv.page_size // N))
    return Work(
        few=[
            Jobs(_told(jobs, kv.device), m, stretches, R * max(tokens for _, _, _, tokens, *_ in jobs))
            for m, jobs in sorted(few.items())
        ],
        many=Jobs(_told(many, kv.device), tile, 0) if many else None,
        whole=_told(whole, kv.device) if whole and asked else None,
        seen=seen(asked, kv, most, starts[-1], R * tables.pages.shape[-2], left) if asked else None,
        block=N,
        most=most,
    )


def rows_of(width: int) -> int:
    """Query rows of a program that has so many: tensor cores want 16 at least."""
    return max(16, int(triton.next_power_of_2(max(width, 1))))


def stretches_of(blocks: int) -> int:
    """Of a table of so many blocks, at most, and of all shorter ones. (257 blocks are 52 stretches, 256 are 64.)"""
    return max(min(-(-blocks // look.LEAST.value), look.STRETCHES.value), 1)


def drawn(asked: Observe) -> int:
    """Which noise its requests have, one of noise.py's."""
    kinds = set(asked.noise.tolist()) & {GUMBEL, GAUSSIAN}
    mixed = noise.MIXED if len(kinds) > 1 else noise.ONLY_GUMBEL if GUMBEL in kinds else noise.ONLY_GAUSSIAN
    return int((mixed if kinds else noise.NONE).value)


def seen(asked: Observe, kv: KV, most: int, T: int, H: int, few: int) -> Seen:
    """What is asked, brought to the device, and room for what it takes."""
    there = Observe(**{name: x.to(kv.device, non_blocking=True) for name, x in vars(asked).items()})
    return Seen(there, drawn(asked), *room(kv, most, T, H, few))


def room(kv: KV, most: int, T: int, H: int, few: int) -> tuple[Tensor, Tensor, Tensor]:
    """For what is left: sums [T, H]; of few tokens weights [few, H, places] and tops [few, H, places / N]."""
    places, N = most * kv.page_size, block_of(kv)
    half = torch.float32 if kv.dtype == torch.float32 else torch.float16
    left = torch.empty(few, H, places, dtype=half, device=kv.device)
    return torch.empty(T, H, device=kv.device), left, torch.empty(few, H, places // N, device=kv.device)


def tile(tokens: int, most: int) -> int:
    """Tokens that one program takes; the interpreter is quicker with few programs."""
    return min(triton.next_power_of_2(tokens), 512 if triton.knobs.runtime.interpret else most)


def write(kv: KV, into: Tensor, k: Tensor, v: Tensor, pos: Tensor, turn: Turn | None = None) -> None:
    """Fresh tokens k, v [T, G, D] at pos int32 [T] into slots int32 [G, T], keys turned on the way."""
    T, G, D = k.shape
    k, v = k if turn else k.to(kv.dtype), v.to(kv.dtype)
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    C = kv.mass.shape[1]
    freqs = turn.freqs if turn else kv.mass  # any float32: it is not read
    some = tile(T, 8)
    slots.write[(triton.cdiv(T, some), G)](
        into, *into.stride(), k, *k.stride()[:2], v, *v.stride()[:2], pos.contiguous(), T, kv.k, kv.v, kv.pos, kv.mass,
        freqs, len(turn.freqs) if turn else 0, turn.gain if turn else 1.0,
        S=kv.page_size, D=D, DP=triton.next_power_of_2(D), C=C, CP=triton.next_power_of_2(C), T=some,
        TURN=turn is not None, PAIRS=turn is not None and turn.pairs, num_warps=4 if some > 1 else 1,
    )  # fmt: skip


def attend(
    q: Tensor, kv: KV, tables: Tables, work: Work, q_pos: Tensor, scale: float, slopes: Tensor | None, layer: int
) -> Tensor:
    """The output [T, H, D] of queries of one layer, and its masses."""
    T, H, D = q.shape
    G = tables.pages.shape[1]
    q = q if q.stride(-1) == 1 else q.contiguous()
    rough = triton.knobs.runtime.interpret and q.dtype == torch.bfloat16  # the interpreter cuts where it should round
    o = torch.zeros(T, H, D, dtype=torch.float32 if rough else q.dtype, device=q.device)
    for jobs in (*work.few, *([work.many] if work.many else [])):
        _look(q, o, kv, tables, work, jobs, q_pos, scale, slopes, layer)
    s = work.seen
    shape = {"G": G, "R": H // G, "S": kv.page_size, "N": work.block, "C": kv.mass.shape[1]}
    blocks = max(work.most, 1) * (kv.page_size // work.block)
    for jobs in work.few if s else []:
        assert s
        observe.deposit[(len(jobs.told), G, blocks)](
            kv.mass, *_pages(tables), tables.windows, tables.windows.stride(0), jobs.told,
            s.asked.weights, s.asked.decay, s.lse, s.left, s.tops, s.left.shape[-1], M=jobs.rows, **shape,
        )  # fmt: skip
    if s and work.whole is not None:
        a = s.asked
        observe.recount[(len(work.whole), G, blocks)](
            q, *q.stride()[:2], kv.k, kv.pos, kv.mass, *_pages(tables), *_sight(tables), work.whole, q_pos,
            q if slopes is None else slopes, scale * LOG2E,
            a.weights, a.tau, a.decay, a.noise, a.seed, a.anew, layer, s.lse,
            D=D, DP=max(triton.next_power_of_2(D), 16), M=64, ALIBI=slopes is not None, DENSE=tables.dense is not None,
            NOISE=s.drawn, **_types(kv), **shape,
        )  # fmt: skip
    return o.to(q.dtype)


def _look(
    q: Tensor, o: Tensor, kv: KV, tables: Tables, work: Work, jobs: Jobs, q_pos: Tensor, scale: float,
    slopes: Tensor | None, layer: int,
) -> None:  # fmt: skip
    _, H, D = q.shape
    G, J, M, s, device = tables.pages.shape[1], len(jobs.told), jobs.rows, work.seen, q.device
    split, DP = jobs.stretches > 0, max(triton.next_power_of_2(D), 16)
    room = J * G * jobs.stretches * jobs.width if split else 1
    tops, sums = torch.empty(2, (2 if s else 1) * room, device=device)
    parts = torch.empty(room, D, device=device)
    asked = (a.weights, a.tau, a.noise, a.seed, a.anew) if s and (a := s.asked) else (q,) * 5  # which is not read
    shape = {"G": G, "R": H // G, "S": kv.page_size, "D": D, "DP": DP, "M": M, "N": work.block}
    look.look[(J, G, max(jobs.stretches, 1))](
        q, *q.stride()[:2], o, tops, sums, parts, jobs.width, kv.k, kv.v, kv.pos, *_pages(tables), *_sight(tables),
        jobs.told, q_pos, q if slopes is None else slopes, scale * LOG2E, jobs.stretches,
        *asked, layer, *((s.lse, s.left, s.tops, s.left.shape[-1]) if s else (q, q, q, 0)),
        SPLIT=split, ALIBI=slopes is not None, DENSE=tables.dense is not None, OBSERVE=s is not None,
        NOISE=s.drawn if s else 0, **_types(kv), **shape, num_warps=8 if M > 64 or D > 128 else 4, num_stages=3,
    )  # fmt: skip
    if split:
        rows = M if triton.knobs.runtime.interpret else 1
        shape.pop("M")
        look.merge[(J, G, triton.cdiv(jobs.width, rows))](
            o, tops, sums, parts, jobs.width, *_pages(tables)[3:], jobs.told, jobs.stretches, s.lse if s else q,
            ROWS=rows, OBSERVE=s is not None, **shape,
        )  # fmt: skip


def _pages(t: Tables) -> tuple[Tensor, int, int, Tensor, int, int]:
    return t.pages, t.pages.stride(0), t.pages.stride(1), t.counts, t.counts.stride(0), t.counts.stride(1)


def _sight(t: Tables) -> tuple[Tensor, int, Tensor, int, Tensor]:
    return t.windows, t.windows.stride(0), t.sinks, t.sinks.stride(0), t.sinks if t.dense is None else t.dense


def _types(kv: KV) -> dict[str, object]:
    """In what products are made: in the pool's type, and float32 means float32. The interpreter has no bfloat16."""
    exact = kv.dtype == torch.float32 or (kv.dtype == torch.bfloat16 and triton.knobs.runtime.interpret)
    return {"DOT": tl.float32 if exact else TYPES[kv.dtype], "PRECISION": "ieee" if exact else "tf32"}


def _told(jobs: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    return torch.tensor(jobs, dtype=torch.int32).view(-1, 6).to(device, non_blocking=True)
