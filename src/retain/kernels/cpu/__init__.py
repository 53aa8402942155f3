"""The cpu backend: the functions of `reference` in C++, for all cores and for every instruction set of the machine.

Layout "cpu", chosen so that every load reads neighbours:

    page p     k[p]  D x S                          v[p]  S x D                        pos[p]  S
               slot 0    1   ...  S-1               dim 0    1   ...  D-1
        dim 0  [ k00  k10  ...        ]      slot 0 [ v00  v01  ...        ]           [ 0  1  2  -1 ... ]
            1  [ k01  k11  ...        ]           1 [ v10  v11  ...        ]                      a hole
          ...                                   ...
          D-1  [                      ]         S-1 [                      ]

One load reads one dimension of 16 slots of K, or 16 dimensions of one slot of V. It serves all R query heads and a tile
of fresh tokens. In bfloat16 two dimensions of K are interleaved (D / 2 x S x 2), and two slots of V (S / 2 x D x 2),
as the processor's pairwise dot products need them. Queries and weights are then rounded to bfloat16 too; sums are
float32. In int8 four are interleaved (D / 4 x S x 4, S / 4 x D x 4), bytes are 128 too high, and the bfloat16 scales of
the page's slots follow. With 4 bits K is D / 8 x S x 4 and V S / 4 x D / 2 x 4, then scales D / 32 x S. Keys and
queries are rotated (quantized_slots.py). Queries are integers of 8 bits with one scale, weights with one for 32 slots,
and sums of products are exact.

A pool with sketches has K as S x D, because looks read single keys; attention to whole pages transposes them. In 4 bits
it stays D x S. So a pool gets its sketches before the first write. Layers without attention have K as S x D, like V:
only their operations read it, and only `copy` copies it.

A row is summed slot by slot within a block of 512 slots and then block by block, however the work is divided; in a
ring, in the order of positions. So the bits of a token depend neither on the other requests, nor on the chunk size, nor
on where a ring begins, nor on the number of threads.

Tensors reach C++ as addresses and strides, so the extension does not link torch. Both use the OpenMP library that torch
ships: torch must be imported first, and `torch.set_num_threads` holds for both.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch  # before _C, which must find the libgomp of torch
from torch import Tensor

from retain.kernels.api import CPU, KV, EvictionLists, Program, Tables
from retain.kernels.attention_params import AttentionParams
from retain.kernels.cpu.memory import map_zeros
from retain.kernels.shape_checks import check_attend, check_places, check_write, shape_error
from retain.kernels.slots.pool_dtypes import INT4, INTEGER_DTYPES, dtype_name
from retain.kernels.slots.reinterpret import PageFormat, view_pages
from retain.kernels.slots.scoring import AttentionScoring

try:
    import retain.kernels.cpu._C as _C
    from retain.kernels.cpu import ffi
except ImportError as error:
    _import_error: str | None = f"its extension is not built ({error})"
else:
    _import_error = None

MAX_K_DIM = 576
MAX_V_DIM = 512
MAX_PAGE_SIZE = 512
DTYPES = (torch.float32, torch.bfloat16)
POOL_DTYPES = (*DTYPES, *INTEGER_DTYPES)
QUANTIZES_ACTIVATIONS = True
EXCHANGES_IN_MEMORY = True
DEVICES: tuple[str, ...] = ("cpu",)


def unavailable_reason() -> str | None:
    """Return why the extension could not be imported, or None if it was."""
    return _import_error


def program(dtype: torch.dtype, device: torch.device, beside: Program | None = None) -> Program:
    """Return a program of the cpu backend that has no operations yet."""
    from retain.kernels.cpu.forward import CpuProgram

    assert beside is None or isinstance(beside, CpuProgram)
    return CpuProgram(beside)


def allocate(
    num_pages: int,
    page_size: int,
    k_dim: int,
    dtype: torch.dtype,
    score_columns: int = 1,
    device: torch.device = CPU,
    v_dim: int | None = None,
    page_bytes: tuple[int, int] | None = None,
) -> KV:
    """Allocate a pool. The system provides its memory page by page, at the first write."""
    if dtype not in POOL_DTYPES:
        names = "float32, bfloat16, int8, k8v4 or int4"
        raise ValueError(f"the cpu backend stores K and V in {names}, not {dtype_name(dtype)}")
    if page_size % 16 or not 16 <= page_size <= MAX_PAGE_SIZE:
        raise ValueError(f"the cpu backend needs a page_size of 16, 32, 48, ... up to {MAX_PAGE_SIZE}, not {page_size}")
    v_dim = v_dim or k_dim
    for name, dim, most in (("k_dim", k_dim, MAX_K_DIM), ("v_dim", v_dim, MAX_V_DIM)):
        if dim % 8 or not 8 <= dim <= most:
            raise ValueError(f"the cpu backend needs a {name} (head_dim) of 8, 16, 24, ... up to {most}, not {dim}")
    format = PageFormat(page_size, dtype, k_dim, v_dim, score_columns)
    k, v = (_zeros((num_pages, size), torch.uint8) for size in page_bytes or format.bytes)
    return _view_pool((k, v), format)


def reinterpret(kv: KV, format: PageFormat) -> KV:
    """Return the pages of a pool as pages of other slots, with positions and masses of their own."""
    return replace(_view_pool((kv.k, kv.v), format), file=kv.file)


def allocate_in_file(
    num_pages: int, format: PageFormat, page_bytes: tuple[int, int], folder: Path, memory_bytes: int
) -> KV:
    """Allocate a pool with K and V in a file."""
    from retain.kernels.cpu.file_pool import MappedFile, map_pages

    f = format
    if f.dtype == INT4:
        raise ValueError("kv_offload: looks read all keys of a pool in 4 bits; use another kv_dtype")
    page = allocate(1, f.page_size, f.k_dim, f.dtype, f.score_columns, v_dim=f.v_dim)  # refuses what it cannot have
    file = MappedFile(memory_bytes)
    if f.has_sketches:  # before the disk gives room
        file.num_records(num_pages * f.page_size, ffi.to_c_pool(page).record_bytes)
    return replace(_view_pool(map_pages(num_pages, page_bytes, folder), f), file=file)


def _view_pool(memory: tuple[Tensor, Tensor], format: PageFormat) -> KV:
    P = len(memory[0])
    S = format.page_size
    k, v = view_pages(memory, format)
    if format.dtype not in INTEGER_DTYPES:
        k = k.view(P, format.k_dim, S)
        v = v.view(P, S, format.v_dim)
    pos = _zeros((P, S), torch.int32)
    pos[0] = -1
    mass = _zeros((P, format.score_columns, S), torch.float32)
    return KV(k, v, pos, mass, S, format.k_dim, format.v_dim, "cpu")


def write(kv: KV, slot_mapping: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> None:
    """Store fresh tokens in their slots."""
    T, G, _ = k.shape
    if k.dtype not in DTYPES or v.dtype != k.dtype:
        k = k.float()
        v = v.float()
    check_write(kv, slot_mapping, k, v, pos)
    if slot_mapping.dtype != torch.int32 or pos.dtype != torch.int32:
        raise TypeError(f"write: slot_mapping and pos must be int32, not {slot_mapping.dtype} and {pos.dtype}")
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
    params: AttentionParams,
    *,
    scoring: AttentionScoring | None = None,
    layer: int = 0,
) -> Tensor:
    """Attend with every fresh query to the visible slots of its own request. q may be strided but for its last dim."""
    if q.dtype not in DTYPES:
        return attend(q.float(), kv, tables, q_pos, params, scoring=scoring, layer=layer).to(q.dtype)
    check_attend(q, kv, tables, q_pos, params)
    T, H, _ = q.shape
    if q_pos.dtype != torch.int32:
        raise TypeError(f"attend: q_pos must be int32, not {q_pos.dtype}")
    q_token, q_head, q_dim = q.stride()
    if q_dim != 1:
        raise ValueError("attend: the last dimension of q must be contiguous")
    ffi.check_tables(tables)
    ffi.check_scoring(scoring, T, len(tables.rows))
    tables = replace(tables, rows=tables.rows.contiguous(), query_start_loc=tables.query_start_loc.contiguous())
    q_pos = q_pos.contiguous()
    params = params.map_tensors(Tensor.contiguous)
    o = q.new_empty(T, H, kv.v_dim)
    _C.attend(
        ffi.to_c_pool(kv), ffi.to_c_tables(tables), *ffi.to_c_demoted(tables),
        q.data_ptr(), q_token, q_head, q.dtype == torch.bfloat16, o.data_ptr(), q_pos.data_ptr(),
        T, H // tables.pages.shape[1], ffi.to_c_params(params), ffi.to_c_scoring(scoring, layer),
    )  # fmt: skip
    return o


def read_slots(kv: KV, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V of slots in float32."""
    if slots.dtype != torch.int64:
        raise TypeError(f"read_slots: slots must be int64, not {slots.dtype}")
    slots = slots.contiguous()
    k, v = (torch.empty(*slots.shape, dim) for dim in (kv.k_dim, kv.v_dim))
    _C.read_slots(ffi.to_c_pool(kv), slots.data_ptr(), slots.numel(), k.data_ptr(), v.data_ptr())
    return k, v


def requantize(kv: KV, src: Tensor, to: KV, dst: Tensor, pos: Tensor) -> None:
    """Copy slots to slots of another pool, with masses."""
    if src.dim() != 1 or not src.shape == dst.shape == pos.shape or (kv.k_dim, kv.v_dim) != (to.k_dim, to.v_dim):
        raise shape_error("requantize", "src, dst and pos [n], and one k_dim and v_dim", src=src, dst=dst, pos=pos)
    if (src.dtype, dst.dtype, pos.dtype) != (torch.int64, torch.int64, torch.int32):
        raise TypeError("requantize: src and dst must be int64, and pos int32")
    src = src.contiguous()
    dst = dst.contiguous()
    pos = pos.contiguous()
    _C.requantize(
        ffi.to_c_pool(kv), src.data_ptr(), ffi.to_c_pool(to), dst.data_ptr(), pos.data_ptr(), len(src)
    )  # fmt: skip


def copy(kv: KV, src: Tensor, dst: Tensor) -> None:
    """Copy pages with positions and masses."""
    check_places("copy", src, dst, 1, torch.int64)
    src = src.contiguous()
    dst = dst.contiguous()
    _C.copy(ffi.to_c_pool(kv), src.data_ptr(), dst.data_ptr(), src.shape[0])


def move(kv: KV, src: Tensor, dst: Tensor) -> None:
    """Copy slots with positions and masses."""
    check_places("move", src, dst, 2, torch.int32)
    src = src.contiguous()
    dst = dst.contiguous()
    _C.move(ffi.to_c_pool(kv), src.data_ptr(), dst.data_ptr(), *src.shape)


def select_victims(
    priority: Tensor, pos: Tensor, lengths: Tensor, first_evictable: int, last_evictable: int, n: int
) -> Tensor:
    """Return the places of the n slots to evict first from each list, in that order."""
    N, S = pos.shape
    if priority.shape != (N, S) or lengths.shape != (N,) or not 0 <= n <= S:
        expected = f"priority and pos [N, S] with S >= {n}, lengths [N]"
        raise shape_error("select_victims", expected, priority=priority, pos=pos, lengths=lengths)
    if pos.dtype != torch.int32 or lengths.dtype != torch.int32:
        raise TypeError(f"select_victims: pos and lengths must be int32, not {pos.dtype} and {lengths.dtype}")
    priority = priority.float().contiguous()
    pos = pos.contiguous()
    lengths = lengths.contiguous()
    places = torch.empty(N, n, dtype=torch.int64)
    _C.select_victims(
        priority.data_ptr(), pos.data_ptr(), lengths.data_ptr(), N, S, first_evictable, last_evictable, n,
        places.data_ptr(),
    )  # fmt: skip
    return places


def punch(kv: KV, lists: EvictionLists, holes: Tensor, n: int) -> None:
    """Turn the n slots to evict first of each list into holes, and write their numbers to `holes`."""
    ffi.check_eviction_lists(lists, holes, n)
    num_rows, num_layers, _, max_pages = lists.pages.shape
    parts = [x.contiguous() for x in (lists.rows, lists.layers, lists.slots_used, lists.evictable, lists.by_mass)]
    _C.punch(
        ffi.to_c_pool(kv),
        lists.pages.data_ptr(), *lists.pages.stride()[:3], num_rows, num_layers, max_pages,
        *(x.data_ptr() for x in parts), *lists.slots_used.shape,
        holes.data_ptr(), *holes.stride()[:3], n,
    )  # fmt: skip


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return map_zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
