"""The triton backend: the same functions as `reference`, as Triton kernels for NVIDIA GPUs.

Layout "plain": k and v are [P, S, D], so a slot is read as it was written. In bfloat16 and float16, queries and weights
are rounded to the pool's type; sums are float32. Under Triton's interpreter (TRITON_INTERPRET=1) the same kernels run
on a CPU, slowly: so they are tested where there is no GPU.

What a step has to do is on the host (`Tables.rows` and `starts`, `Observe`): it becomes a list of jobs, and nothing
is ever asked back from the device. What is not known here: torch's streams and graphs (forward.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from retain.kernels.api import KV, AttentionScoring, Program, Tables

try:
    import triton

    from retain.kernels.triton import attention, slots
except ImportError as error:
    _import_error: str | None = f"triton is not installed ({error})"
else:
    _import_error = None

MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cpu", "cuda") if not _import_error and triton.knobs.runtime.interpret else ("cuda",)


def unavailable_reason() -> str | None:
    """Runs on an NVIDIA GPU, or under the interpreter."""
    if _import_error or torch.cuda.is_available() or is_interpreted():
        return _import_error
    return "there is no NVIDIA GPU"


def is_interpreted() -> bool:
    """Whether kernels run in Python, on a CPU."""
    return not _import_error and bool(triton.knobs.runtime.interpret)


def program(dtype: torch.dtype, device: torch.device) -> Program:
    """An empty one."""
    from retain.kernels.triton.forward import TritonProgram

    return TritonProgram(dtype, device)


def allocate(
    num_pages: int,
    page_size: int,
    head_dim: int,
    dtype: torch.dtype,
    score_columns: int = 1,
    device: torch.device | str = "cpu",
) -> KV:
    """A pool. K and V start as zeros, so that a hole's weight of 0 never meets a NaN."""
    if dtype not in DTYPES:
        raise ValueError(f"the triton backend keeps K and V in float32, bfloat16 or float16, not {dtype}")
    if page_size % 16 or page_size < 16:
        raise ValueError(f"the triton backend wants a page_size of 16, 32, 48, ..., not {page_size}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"the triton backend wants a head dim of at most {MAX_HEAD_DIM}, not {head_dim}")
    k, v = (torch.zeros(num_pages, page_size, head_dim, dtype=dtype, device=device) for _ in range(2))
    pos = torch.zeros(num_pages, page_size, dtype=torch.int32, device=device)
    pos[0] = -1
    mass = torch.zeros(num_pages, score_columns, page_size, device=device)
    return KV(k, v, pos, mass, page_size, head_dim, "plain")


def write(kv: KV, slot_mapping: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> None:
    """Put fresh tokens into their slots; see `reference`. k and v [T, G, D] may be strided, but for their last."""
    T, G, D = k.shape
    if D != kv.head_dim or v.shape != k.shape or slot_mapping.shape != (G, T) or pos.shape != (T,):
        raise ValueError(
            f"write: shapes disagree: slots {list(slot_mapping.shape)}, k {list(k.shape)}, pos {list(pos.shape)}"
        )
    if T * G:
        attention.write(kv, slot_mapping, k, v, pos)


def attend(
    q: Tensor,
    kv: KV,
    tables: Tables,
    q_pos: Tensor,
    scale: float,
    alibi_slopes: Tensor | None = None,
    scoring: AttentionScoring | None = None,
    layer: int = 0,
) -> Tensor:
    """Attention of fresh queries over the slots of their own requests; see `reference`. q [T, H, D] may be strided."""
    if q.dtype not in DTYPES:
        return attend(q.float(), kv, tables, q_pos, scale, alibi_slopes, scoring, layer).to(q.dtype)
    T, H, D = q.shape
    G = tables.pages.shape[1]
    if D != kv.head_dim or H % G or q_pos.shape != (T,):
        raise ValueError(f"attend: shapes disagree: q {list(q.shape)}, {G} kv heads of {kv.head_dim}")
    work = attention.plan_attention(tables, H // G, D, kv, scoring)
    return attention.attend(q, kv, tables, work, q_pos, scale, alibi_slopes, layer)


def read(kv: KV, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of pages int64 [n] in float32, [n, S, D] both; those of holes mean nothing."""
    return kv.k[pages].float(), kv.v[pages].float()


def copy(kv: KV, src: Tensor, dst: Tensor) -> None:
    """Copy whole pages, positions too: src, dst int64 [n]; no page is in both."""
    if src.shape != dst.shape or src.dim() != 1 or src.dtype != torch.int64 or dst.dtype != torch.int64:
        raise ValueError(f"copy: wants int64 [n] twice, not {src.dtype}, {dst.dtype}")
    src, dst = src.to(kv.device).contiguous(), dst.to(kv.device).contiguous()
    for x in (kv.k, kv.v, kv.pos, kv.mass) if len(src) else ():
        size = x[0].numel()
        block = min(triton.next_power_of_2(size), 4096)
        slots.copy[(len(src), triton.cdiv(size, block))](x, src, dst, size, BLOCK=block)


def move(kv: KV, src: Tensor, dst: Tensor) -> None:
    """Copy slots with their positions and masses, int32 [M, n] both; see `reference`.

    By torch, which reads all before it writes any; some lists at a time, for what is read needs room.
    """
    S, some = kv.page_size, max(2**24 // max(src.shape[1] * kv.head_dim, 1), 1)
    mass = kv.mass.transpose(1, 2)  # [P, S, C]
    each = (torch.split(x.to(kv.device), some) for x in (src, dst))
    for lists in zip(*each, strict=True):
        s, d = (x.flatten().long() for x in lists)
        for x in (kv.k.view(-1, kv.head_dim), kv.v.view(-1, kv.head_dim), kv.pos.view(-1)):
            x[d] = x[s]
        mass[d // S, d % S] = mass[s // S, s % S]


def select_victims(priority: Tensor, pos: Tensor, lengths: Tensor, sinks: int, last_evictable: int, n: int) -> Tensor:
    """The n slots that go first of each list, in order: places int64 [N, n]; see `reference`. `used` is on the host."""
    N, S = pos.shape
    if priority.shape != (N, S) or lengths.shape != (N,):
        raise ValueError(f"lowest: shapes disagree: priority {list(priority.shape)}, pos {list(pos.shape)}")
    if N and int(lengths.min()) < n:
        raise ValueError(f"lowest: too few slots in a list of {int(lengths.min())} to find {n}")
    places = torch.empty(N, n, dtype=torch.int64, device=pos.device)
    if N and n:
        lists = priority.float().contiguous(), pos.contiguous(), lengths.to(pos.device, non_blocking=True)
        block = min(triton.next_power_of_2(S), 2048)
        slots.select_victims[(N,)](*lists, places, S, sinks, last_evictable, n, BLOCK=block)
    return places
