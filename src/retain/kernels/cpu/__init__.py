"""The cpu backend: the same functions as `reference`, in C++, for every core and instruction set of the host.

Layout "cpu", chosen so that every load takes neighbours:

    page p     k[p]  D x S                          v[p]  S x D                        pos[p]  S
               slot 0    1   ...  S-1               dim 0    1   ...  D-1
        dim 0  [ k00  k10  ...        ]      slot 0 [ v00  v01  ...        ]           [ 0  1  2  -1 ... ]
            1  [ k01  k11  ...        ]           1 [ v10  v11  ...        ]                      a hole
          ...                                   ...
          D-1  [                      ]         S-1 [                      ]

One dimension of 16 slots is one load of scores, 16 dimensions of one slot one load of values, for all R query heads and
a whole tile of fresh tokens. In bfloat16 two dimensions of K lie together (D / 2 x S x 2), and two slots of V
(S / 2 x D x 2), as the processor's dot products of pairs want them; queries and weights are rounded to bfloat16 too,
sums are float32. A row's sum is taken slot by slot in spans of 512 slots, and span by span, however the work is shared
out: the bits of a request's output depend neither on its company, nor on the size of its chunk, nor on the number of
threads.

What is not known here: torch. Tensors reach C++ as addresses and strides, so nothing is built against it. But both use
the OpenMP library that torch brings, so torch is imported first, and `torch.set_num_threads` holds for both.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch  # before _C: its libgomp must be the one that both use
from torch import Tensor

from retain.kernels.api import CPU, KV, AttentionScoring, Program, Tables
from retain.kernels.cpu.memory import allocate_aligned

try:
    import retain.kernels.cpu._C as _C
    from retain.kernels.cpu import ffi
except ImportError as error:
    _import_error: str | None = f"its extension is not built ({error})"
else:
    _import_error = None

MAX_HEAD_DIM = 256
MAX_PAGE_SIZE = 512
DTYPES = (torch.float32, torch.bfloat16)
DEVICES = ("cpu",)


def unavailable_reason() -> str | None:
    """Runs wherever its extension was built."""
    return _import_error


def program(dtype: torch.dtype, device: torch.device) -> Program:
    """An empty one."""
    from retain.kernels.cpu.forward import CpuProgram

    return CpuProgram()


def allocate(
    num_pages: int,
    page_size: int,
    head_dim: int,
    dtype: torch.dtype,
    score_columns: int = 1,
    device: torch.device = CPU,
) -> KV:
    """A pool; it takes no memory until it is written."""
    if dtype not in DTYPES:
        raise ValueError(f"the cpu backend keeps K and V in float32 or bfloat16, not {dtype}")
    if page_size % 16 or not 16 <= page_size <= MAX_PAGE_SIZE:
        raise ValueError(f"the cpu backend wants a page_size of 16, 32, 48, ... up to {MAX_PAGE_SIZE}, not {page_size}")
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"the cpu backend wants a head dim of 8, 16, 24, ... up to {MAX_HEAD_DIM}, not {head_dim}")
    k = _aligned_zeros((num_pages, head_dim, page_size), dtype)  # [P, D, S]
    v = _aligned_zeros((num_pages, page_size, head_dim), dtype)  # [P, S, D]
    pos = _aligned_zeros((num_pages, page_size), torch.int32)  # [P, S]
    pos[0] = -1
    mass = _aligned_zeros((num_pages, score_columns, page_size), torch.float32)
    return KV(k, v, pos, mass, page_size, head_dim, "cpu")


def write(kv: KV, slot_mapping: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> None:
    """Put fresh tokens into their slots: slots int32 [G, T]; k, v [T, G, D], strided or not; pos int32 [T]."""
    T, G, D = k.shape
    if k.dtype not in DTYPES or v.dtype != k.dtype:
        k, v = k.float(), v.float()
    if D != kv.head_dim or v.shape != k.shape or slot_mapping.shape != (G, T) or pos.shape != (T,):
        raise ValueError(
            f"write: shapes disagree: {_format_shapes(slots=slot_mapping, k=k, v=v, pos=pos)}, head dim {kv.head_dim}"
        )
    if slot_mapping.dtype != torch.int32 or pos.dtype != torch.int32:
        raise TypeError(f"write: slots and pos must be int32, not {slot_mapping.dtype} and {pos.dtype}")
    k_token, k_head, k_dim = k.stride()
    v_token, v_head, v_dim = v.stride()
    if k_dim != 1 or v_dim != 1:
        raise ValueError("write: the last dimension of k and v must be contiguous")
    pos = pos.contiguous()
    _C.write(
        ffi.to_c_pool(kv),
        slot_mapping.data_ptr(), *slot_mapping.stride(), T, G,
        k.data_ptr(), k_token, k_head, v.data_ptr(), v_token, v_head, k.dtype == torch.bfloat16,
        pos.data_ptr(),
    )  # fmt: skip


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
    bf16 = q.dtype == torch.bfloat16
    if not bf16 and q.dtype != torch.float32:
        return attend(q.float(), kv, tables, q_pos, scale, alibi_slopes, scoring, layer).to(q.dtype)
    pages, counts, rows, starts = tables.pages, tables.counts, tables.rows, tables.query_start_loc
    windows, sinks = tables.windows, tables.sinks
    T, H, D = q.shape
    N, G, n = pages.shape
    B = rows.shape[0]
    if D != kv.head_dim or H % G or q_pos.shape[0] != T or counts.shape != (N, G) or starts.shape[0] != B + 1:
        shapes = _format_shapes(q=q, q_pos=q_pos, pages=pages, counts=counts, rows=rows, starts=starts)
        raise ValueError(f"attend: shapes disagree: {shapes}, head dim {kv.head_dim}")
    if windows.shape != (N,) or sinks.shape != (N,):
        raise ValueError(f"attend: windows and sinks must be [{N}], not {_format_shapes(windows=windows, sinks=sinks)}")
    for x in (pages, counts, windows, sinks, rows, starts, q_pos):
        if x.dtype != torch.int32:
            raise TypeError(f"attend: tables and q_pos must be int32, not {x.dtype}")
    q_token, q_head, q_dim = q.stride()
    if q_dim != 1 or (pages.stride(-1) != 1 and n > 1):
        raise ValueError("attend: the last dimension of q and of tables.pages must be contiguous")
    if alibi_slopes is not None and (alibi_slopes.dtype != torch.float32 or alibi_slopes.shape != (H,)):
        raise ValueError(f"attend: slopes must be float32 [{H}], not {alibi_slopes.dtype} {list(alibi_slopes.shape)}")
    ffi.check_scoring(scoring, T, B)
    tables = replace(tables, rows=rows.contiguous(), query_start_loc=starts.contiguous())
    q_pos = q_pos.contiguous()
    alibi_slopes = None if alibi_slopes is None else alibi_slopes.contiguous()
    o = torch.empty_like(q, memory_format=torch.contiguous_format)  # [T, H, D]
    _C.attend(
        ffi.to_c_pool(kv), ffi.to_c_tables(tables),
        q.data_ptr(), q_token, q_head, bf16, o.data_ptr(), q_pos.data_ptr(), T, H // G, scale,
        0 if alibi_slopes is None else alibi_slopes.data_ptr(), ffi.to_c_scoring(scoring, layer),
    )  # fmt: skip
    return o


def read(kv: KV, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of pages int64 [n] in float32, [n, S, D] both; those of holes mean nothing."""
    k, v, S, D = kv.k[pages], kv.v[pages], kv.page_size, kv.head_dim
    if kv.dtype == torch.float32:
        return k.transpose(1, 2), v
    k = k.view(-1, D // 2, S, 2).permute(0, 2, 1, 3).reshape(-1, S, D)
    v = v.view(-1, S // 2, D, 2).transpose(2, 3).reshape(-1, S, D)
    return k.float(), v.float()


def copy(kv: KV, src: Tensor, dst: Tensor) -> None:
    """Copy whole pages, positions too: src, dst int64 [n]; no page is in both."""
    if src.shape != dst.shape or src.dim() != 1 or src.dtype != torch.int64 or dst.dtype != torch.int64:
        raise ValueError(
            f"copy: wants int64 [n] twice, not {src.dtype}, {dst.dtype}, {_format_shapes(src=src, dst=dst)}"
        )
    src, dst = src.contiguous(), dst.contiguous()
    _C.copy(ffi.to_c_pool(kv), src.data_ptr(), dst.data_ptr(), src.shape[0])


def move(kv: KV, src: Tensor, dst: Tensor) -> None:
    """Copy slots with their positions and masses, int32 [M, n] both; see `reference`."""
    if src.shape != dst.shape or src.dim() != 2 or src.dtype != torch.int32 or dst.dtype != torch.int32:
        raise ValueError(
            f"move: wants int32 [M, n] twice, not {src.dtype}, {dst.dtype}, {_format_shapes(src=src, dst=dst)}"
        )
    src, dst = src.contiguous(), dst.contiguous()
    _C.move(ffi.to_c_pool(kv), src.data_ptr(), dst.data_ptr(), *src.shape)


def select_victims(priority: Tensor, pos: Tensor, lengths: Tensor, sinks: int, last_evictable: int, n: int) -> Tensor:
    """The n slots that go first of each list, in order: places int64 [N, n]; see `reference`."""
    N, S = pos.shape
    if priority.shape != (N, S) or lengths.shape != (N,) or not 0 <= n <= S:
        raise ValueError(f"lowest: shapes disagree: {_format_shapes(priority=priority, pos=pos, used=lengths)}, n {n}")
    if pos.dtype != torch.int32 or lengths.dtype != torch.int32:
        raise TypeError(f"lowest: pos and used must be int32, not {pos.dtype} and {lengths.dtype}")
    priority, pos, lengths = priority.float().contiguous(), pos.contiguous(), lengths.contiguous()
    places = torch.empty(N, n, dtype=torch.int64)
    _C.lowest(
        priority.data_ptr(), pos.data_ptr(), lengths.data_ptr(), N, S, sinks, last_evictable, n, places.data_ptr()
    )
    return places


def _aligned_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return allocate_aligned(math.prod(shape) * dtype.itemsize, zero=True).view(dtype).view(shape)


def _format_shapes(**tensors: Tensor) -> str:
    return ", ".join(f"{name} {list(t.shape)}" for name, t in tensors.items())
