"""The triton backend: the functions of `reference` as Triton kernels for NVIDIA GPUs.

Layout "plain": k and v are [P, S, D], so a slot is stored as it arrives. In a pool of bfloat16 or float16, queries and
attention weights are rounded to the pool's dtype; sums are float32. The scales of a page's slots follow its numbers.
Over quantized slots, prompts round queries and weights to bfloat16, as are numbers of 4 bits times their scales. Tiles
of few rows round queries to integers of 16 bits over int8 K, and to float16 over fp8 K; weights become float16 over V
of 8 bits.

Demoted tokens are attended to by further launches of the same kernels, over their own pages and tables.

Tokens that look at few slots choose them by kernels of their own, and attend to them by those for decode tiles.

Triton's interpreter (TRITON_INTERPRET=1) runs the same kernels on a CPU, slowly, for tests.

The host tensors of a step (`Tables.rows`, `Tables.query_start_loc`, the scoring) say which tiles to launch, so a step
never waits for the device.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from retain.kernels.api import CPU, KV, EvictionLists, Program, Tables
from retain.kernels.attention_params import AttentionParams
from retain.kernels.shape_checks import check_attend, check_places, check_write, shape_error
from retain.kernels.slots.pool_dtypes import QUANTIZED_DTYPES, dtype_name
from retain.kernels.slots.reinterpret import PageFormat
from retain.kernels.slots.scoring import AttentionScoring

try:
    import triton

    from retain.kernels.triton import attention, eviction, fresh_tokens, page_layout, plan, sketches, slots
except ImportError as error:
    _import_error: str | None = f"triton is not installed ({error})"
else:
    _import_error = None

MAX_K_DIM, MAX_V_DIM = 576, 512
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POOL_DTYPES = (*DTYPES, *QUANTIZED_DTYPES)
QUANTIZES_ACTIVATIONS = False
EXCHANGES_IN_MEMORY = False
DEVICES: tuple[str, ...] = ("cpu", "cuda") if not _import_error and triton.knobs.runtime.interpret else ("cuda",)


def unavailable_reason() -> str | None:
    """Return None if there is an NVIDIA GPU or the interpreter is on, else what is missing."""
    if _import_error or torch.cuda.is_available() or is_interpreted():
        return _import_error
    return "there is no NVIDIA GPU"


def is_interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels on a CPU."""
    return not _import_error and bool(triton.knobs.runtime.interpret)


def program(dtype: torch.dtype, device: torch.device, beside: Program | None = None) -> Program:
    """Return a program of the triton backend that has no operations yet."""
    from retain.kernels.triton.forward import TritonProgram

    assert beside is None or isinstance(beside, TritonProgram)
    return TritonProgram(dtype, device, beside)


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
    """Allocate a pool. K and V start as zeros, because a hole's weight of 0 times NaN would be NaN."""
    if dtype not in POOL_DTYPES:
        names = "float32, bfloat16, float16, int8, k8v4, int4 or fp8"
        raise ValueError(f"the triton backend stores K and V in {names}, not {dtype_name(dtype)}")
    if page_size % 16 or page_size < 16:
        raise ValueError(f"the triton backend needs a page_size of 16, 32, 48, ..., not {page_size}")
    v_dim = v_dim or k_dim
    for name, dim, most in (("k_dim", k_dim, MAX_K_DIM), ("v_dim", v_dim, MAX_V_DIM)):
        if not 1 <= dim <= most:
            raise ValueError(f"the triton backend needs a {name} (head_dim) of 1 to {most}, not {dim}")
        if dtype in QUANTIZED_DTYPES and dim % 2:
            raise ValueError(f"the triton backend needs an even {name} (head_dim) for {dtype_name(dtype)}, not {dim}")
    format = PageFormat(page_size, dtype, k_dim, v_dim, score_columns)
    k, v = (torch.zeros(num_pages, n, dtype=torch.uint8, device=device) for n in page_bytes or format.bytes)
    return page_layout.view_pool((k, v), format)


def allocate_in_file(
    num_pages: int, format: PageFormat, page_bytes: tuple[int, int], folder: Path, memory_bytes: int
) -> KV:
    """Raise ValueError: slots of this backend lie in memory."""
    raise ValueError("kv_offload is for the cpu backend: with triton, slots lie in memory")


def reinterpret(kv: KV, format: PageFormat) -> KV:
    """Return the pages of a pool as pages of other slots, with positions and masses of their own."""
    return page_layout.view_pool((kv.k, kv.v), format)


def write(kv: KV, slot_mapping: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> None:
    """Store fresh tokens in their slots."""
    T, G, _ = k.shape
    check_write(kv, slot_mapping, k, v, pos)
    if T * G:
        fresh_tokens.write(kv, slot_mapping, k, v, pos)


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
    tiles = plan.plan_attention(tables, q.shape[1] // tables.pages.shape[1], kv.k_dim, kv, scoring)
    return attention.attend(q, kv, tables, tiles, q_pos, params, layer)


def read_slots(kv: KV, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V of slots in float32."""
    return page_layout.read_slots(kv, slots)


def requantize(kv: KV, src: Tensor, to: KV, dst: Tensor, pos: Tensor) -> None:
    """Copy slots to slots of another pool, with masses."""
    k, v = read_slots(kv, src)
    write(to, dst[None].int(), k[:, None], v[:, None], pos)  # as one head
    mass = kv.mass.transpose(1, 2)[src // kv.page_size, src % kv.page_size]
    to.mass.transpose(1, 2)[dst // to.page_size, dst % to.page_size] = mass


def copy(kv: KV, src: Tensor, dst: Tensor) -> None:
    """Copy pages with positions and masses."""
    check_places("copy", src, dst, 1, torch.int64)
    src, dst = src.to(kv.device).contiguous(), dst.to(kv.device).contiguous()
    pages = page_layout.page_args(kv)
    sketch_pages = () if kv.sketches is None else (kv.sketches,)
    for x in (pages.k, pages.v, kv.pos, kv.mass, *sketch_pages) if len(src) else ():
        size = x[0].numel()
        block = min(triton.next_power_of_2(size), 4096)
        slots.copy[(len(src), triton.cdiv(size, block))](x, src, dst, x.stride(0), size, BLOCK=block)


def move(kv: KV, src: Tensor, dst: Tensor) -> None:
    """Copy slots with positions and masses.

    torch gathers all slots of some lists before it writes any. The number of lists at a time bounds the memory.
    """
    S, lists_at_once = kv.page_size, max(2**24 // max(src.shape[1] * max(kv.k_dim, kv.v_dim), 1), 1)
    mass = kv.mass.transpose(1, 2)  # [P, S, C]
    per_slot = [x for tensor in (kv.k, kv.v) for x in page_layout.slots_of(kv, tensor) if x is not None]  # [P, S, ...]
    batches = (torch.split(x.to(kv.device), lists_at_once) for x in (src, dst))
    for lists in zip(*batches, strict=True):
        src_slots, dst_slots = (x.flatten().long() for x in lists)
        for x in (*per_slot, kv.pos):
            x[dst_slots // S, dst_slots % S] = x[src_slots // S, src_slots % S]
        mass[dst_slots // S, dst_slots % S] = mass[src_slots // S, src_slots % S]
        if kv.sketches is not None:
            sketches.write(kv, dst_slots[None])


def select_victims(
    priority: Tensor, pos: Tensor, lengths: Tensor, first_evictable: int, last_evictable: int, n: int
) -> Tensor:
    """Return the places of the n slots to evict first from each list, in that order."""
    N, S = pos.shape
    if priority.shape != (N, S) or lengths.shape != (N,):
        raise shape_error(
            "select_victims", "priority and pos [N, S], lengths [N]", priority=priority, pos=pos, lengths=lengths
        )
    if N and int(lengths.min()) < n:
        raise ValueError(f"select_victims: a list of {int(lengths.min())} slots has too few to select {n}")
    return eviction.select_victims(priority, pos, lengths, first_evictable, last_evictable, n)


def punch(kv: KV, lists: EvictionLists, holes: Tensor, n: int) -> None:
    """Turn the n slots to evict first of each list into holes, and write their numbers to `holes`."""
    eviction.punch(kv, lists, holes, n)
