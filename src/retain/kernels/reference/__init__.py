"""The reference backend: plain torch, one request and one kv head at a time. It defines what every backend computes.

Layout "plain": k and v are [P, S, D]; quantized slots are [P, S, bytes] (quantized_slots.py). See `Backend` in
kernels/api.py for the arguments of the functions.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from retain.kernels.api import CPU, KV, NO_WINDOW, EvictionLists, Program, Tables
from retain.kernels.attention_params import AttentionParams
from retain.kernels.reference.looks import look, read_sketches, sketch_slots
from retain.kernels.reference.noise import GUMBEL_MEAN, noise_draw, noise_key, sample_noise
from retain.kernels.reference.program import ReferenceProgram
from retain.kernels.reference.slots import read_slots
from retain.kernels.reference.softmax import adjust_scores, softmax
from retain.kernels.slots.eviction_order import eviction_key, sum_columns
from retain.kernels.slots.pool_dtypes import QUANTIZED_DTYPES, bound_values
from retain.kernels.slots.quantized_slots import rotate, to_bytes
from retain.kernels.slots.reinterpret import PageFormat, view_pages
from retain.kernels.slots.scoring import NO_NOISE, AttentionScoring

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POOL_DTYPES = (*DTYPES, *QUANTIZED_DTYPES)
QUANTIZES_ACTIVATIONS = False
EXCHANGES_IN_MEMORY = False
DEVICES: tuple[str, ...] = ("cpu",)


def unavailable_reason() -> str | None:
    """Return None: the backend runs wherever torch does."""
    return None


def program(dtype: torch.dtype, device: torch.device, beside: Program | None = None) -> ReferenceProgram:
    """Return a program of the reference backend that has no operations yet."""
    assert beside is None or isinstance(beside, ReferenceProgram)
    return ReferenceProgram(dtype, write, attend, beside)


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
    format = PageFormat(page_size, dtype, k_dim, v_dim or k_dim, score_columns)
    sizes = page_bytes or format.bytes
    k, v = (torch.zeros(num_pages, size, dtype=torch.uint8, device=device) for size in sizes)
    return _view_pool((k, v), format)


def allocate_in_file(
    num_pages: int, format: PageFormat, page_bytes: tuple[int, int], folder: Path, memory_bytes: int
) -> KV:
    """Raise ValueError: slots of this backend lie in memory."""
    raise ValueError("kv_offload is for the cpu backend: with reference, slots lie in memory")


def reinterpret(kv: KV, format: PageFormat) -> KV:
    """Return the pages of a pool as pages of other slots, with positions and masses of their own."""
    return _view_pool((kv.k, kv.v), format)


def _view_pool(memory: tuple[Tensor, Tensor], format: PageFormat) -> KV:
    k, v = (x.view(len(x), format.page_size, -1) for x in view_pages(memory, format))
    return KV.over(k, v, format)


def write(kv: KV, slot_mapping: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> None:
    """Store fresh tokens in their slots."""
    page = slot_mapping.long() // kv.page_size  # [G, T]
    place = slot_mapping.long() % kv.page_size  # [G, T]
    k = k.transpose(0, 1)
    v = bound_values(v.transpose(0, 1), kv.dtype)
    if kv.dtype in QUANTIZED_DTYPES:
        k = to_bytes(rotate(k), kv.k.dtype)
        v = to_bytes(v, kv.v.dtype)
    kv.k[page, place] = k.to(kv.k.dtype)
    kv.v[page, place] = v.to(kv.v.dtype)
    if kv.sketches is not None:
        sketch_slots(kv, slot_mapping.long().flatten())
    kv.pos[page, place] = pos.expand(page.shape)
    kv.mass.transpose(1, 2)[page, place] = 0.0


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
    """Attend with every fresh query to the visible slots of its own request, in float32."""
    T, H, _ = q.shape
    G = tables.pages.shape[1]
    R = H // G
    o = q.new_zeros(T, H, kv.v_dim)
    starts = tables.query_start_loc.tolist()
    for b, row in enumerate(tables.rows.tolist()):
        fresh = slice(starts[b], starts[b + 1])
        p = q_pos[fresh, None]  # [t, 1]
        window = int(tables.windows[row])
        scored = scoring if window == NO_WINDOW and len(p) else None
        for g in range(G):
            parts = [(kv, tables.pages[row, g, : int(tables.counts[row, g])].long())]  # pages [n]
            if d := tables.demoted:
                parts.append((d.kv, d.pages[row, g, : int(d.counts[row, g])].long()))
            k, v = (
                torch.cat([x.flatten(0, 1) for x in xs]) for xs in zip(*(_read_pages(*p) for p in parts), strict=True)
            )
            pos = torch.cat([part.pos[pages].flatten() for part, pages in parts])[None]  # [1, S]; k, v [S, D]
            visible = (pos >= 0) & (pos <= p) & (p - pos < window)  # [t, S]
            found = None
            if tables.looks is not None and window == NO_WINDOW and tables.looks[fresh].any():
                sketches = read_sketches(*parts[0])
                heads = slice(g * R, (g + 1) * R)
                found = look(q[fresh, heads], sketches, pos, p, visible, tables.looks[fresh], params, heads)
                visible = found.attended
            if scored:
                for part, pages in parts:
                    part.mass[pages] *= scored.decay[b]
                noise: Tensor | float = 0.0
                if (kind := int(scored.noise[b])) != NO_NOISE:
                    key = noise_key(scored.seed[b], layer, params.first_head + g, noise_draw(p, scored.noise_period[b]))
                    noise = sample_noise(kind, key, pos)
            for h in range(g * R, (g + 1) * R):
                x = params.scale * q[fresh, h].float() @ k.T  # [t, S]
                x = adjust_scores(x[None], pos - p, params, slice(h, h + 1))[0]
                x = x.masked_fill(~visible, -torch.inf)
                sink = None if params.sink_logits is None else params.sink_logits[h].view(1, 1)
                scores, values = found.add_means(x, v, h - g * R) if found else (x, v)
                o[fresh, h] = (softmax(scores, sink) @ values).to(q.dtype)
                if scored:
                    tau = scored.temperature[fresh, None]  # [t, 1]
                    mean_noise = 0.0 if kind == NO_NOISE else GUMBEL_MEAN
                    w = softmax((x + noise) / tau, None if sink is None else (sink + mean_noise) / tau)  # [t, S]
                    column = h - g * R if kv.mass.shape[1] > 1 else 0
                    added = scored.weights[fresh] @ w  # [S]
                    end = 0
                    for part, pages in parts:
                        begin = end
                        end = end + len(pages) * part.page_size
                        part.mass[pages, column] += added[begin:end].view(-1, part.page_size)
    return o


def requantize(kv: KV, src: Tensor, to: KV, dst: Tensor, pos: Tensor) -> None:
    """Copy slots to slots of another pool, with masses."""
    k, v = read_slots(kv, src)
    write(to, dst[None], k[:, None], v[:, None], pos)
    mass = kv.mass.transpose(1, 2)[src // kv.page_size, src % kv.page_size]
    to.mass.transpose(1, 2)[dst // to.page_size, dst % to.page_size] = mass


def copy(kv: KV, src: Tensor, dst: Tensor) -> None:
    """Copy pages with positions and masses."""
    for x in (kv.k, kv.v, kv.pos, kv.mass, *([] if kv.sketches is None else [kv.sketches])):
        x[dst] = x[src]


def move(kv: KV, src: Tensor, dst: Tensor) -> None:
    """Copy slots with positions and masses."""
    src_slots = src.long().flatten()
    dst_slots = dst.long().flatten()
    S = kv.page_size
    for x in (kv.k, kv.v, kv.pos, kv.mass.transpose(1, 2)):  # [P, S, ...]
        x[dst_slots // S, dst_slots % S] = x[src_slots // S, src_slots % S]
    if kv.sketches is not None:
        sketch_slots(kv, dst_slots)


def select_victims(
    priority: Tensor, pos: Tensor, lengths: Tensor, first_evictable: int, last_evictable: int, n: int
) -> Tensor:
    """Return the places of the n slots to evict first from each list, in that order."""
    if len(lengths) and int(lengths.min()) < n:
        raise ValueError(f"select_victims: a list of {int(lengths.min())} slots has too few to select {n}")
    key = eviction_key(priority, pos, first_evictable, last_evictable)
    key.masked_fill_(torch.arange(pos.shape[-1]) >= lengths[:, None], 2**63 - 1)
    return key.topk(n, largest=False).indices


def punch(kv: KV, lists: EvictionLists, holes: Tensor, n: int) -> None:
    """Turn the n slots to evict first of each list into holes, and write their numbers to `holes`."""
    S = kv.page_size
    layers = lists.layers.long()
    places = torch.arange(lists.max_slots)
    for b, row in enumerate(lists.rows.tolist()):
        pages = lists.pages[row, layers].long()[..., places // S]  # [M, G, S]
        is_used = places < lists.slots_used[b][..., None]
        slots = torch.where(is_used, pages * S + places % S, 0)
        pos = kv.pos.view(-1)[slots]
        mass = sum_columns(kv.mass.transpose(1, 2)[slots // S, slots % S].mT)
        priority = mass if lists.by_mass[b] else pos
        first_evictable, last_evictable = lists.evictable[b].tolist()
        key = eviction_key(priority, pos, first_evictable, last_evictable).masked_fill_(~is_used, 2**63 - 1)
        victims = slots.gather(-1, key.topk(n, largest=False).indices)
        holes[row, layers, :, :n] = victims.int()
        kv.pos.view(-1)[victims] = -1


def _read_pages(kv: KV, pages: Tensor) -> tuple[Tensor, Tensor]:
    return read_slots(kv, pages[:, None] * kv.page_size + torch.arange(kv.page_size))
