"""The reference backend: plain torch, one request and one kv head at a time. It is the definition; it need not be fast.

Layout "plain": k and v are [P, S, D].
"""

from __future__ import annotations

import torch
from torch import Tensor

from retain.kernels.api import CPU, KV, NO_WINDOW, AttentionScoring, Tables
from retain.kernels.eviction_order import eviction_key
from retain.kernels.reference.noise import noise_key, sample_noise

DEVICES = ("cpu",)


def unavailable_reason() -> str | None:
    """Runs wherever torch does."""
    return None


def program(dtype: torch.dtype, device: torch.device) -> None:
    """There is none: the parts of a model define it in torch."""
    return None


def allocate(
    num_pages: int,
    page_size: int,
    head_dim: int,
    dtype: torch.dtype,
    score_columns: int = 1,
    device: torch.device = CPU,
) -> KV:
    """A pool. K and V start as zeros, so that a hole's weight of 0 never meets a NaN."""
    k, v = (torch.zeros(num_pages, page_size, head_dim, dtype=dtype, device=device) for _ in range(2))
    pos = torch.zeros(num_pages, page_size, dtype=torch.int32, device=device)
    pos[0] = -1
    mass = torch.zeros(num_pages, score_columns, page_size, device=device)
    return KV(k, v, pos, mass, page_size, head_dim, "plain")


def write(kv: KV, slot_mapping: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> None:
    """Put fresh tokens into their slots, which have no mass yet.

    slots int32 [G, T]; k, v [T, G, D] of any float dtype (rounded to the pool's); pos int32 [T].
    """
    s = slot_mapping.long()  # [G, T]
    kv.k.view(-1, kv.head_dim)[s] = k.transpose(0, 1).to(kv.dtype)
    kv.v.view(-1, kv.head_dim)[s] = v.transpose(0, 1).to(kv.dtype)
    kv.pos.view(-1)[s] = pos.expand(s.shape)
    kv.mass.transpose(1, 2)[s // kv.page_size, s % kv.page_size] = 0.0


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
    """Attention of fresh queries over the slots of their own requests: softmax(scale q.k + bias) v, in float32.

    q [T, H, D], H = G * R; q_pos int32 [T]; slopes float32 [H], which adds slope * (pos[s] - q_pos) (ALiBi). A query
    at p sees slot s iff 0 <= pos[s] <= p and (p - pos[s] < window or pos[s] < sinks), with its request's window and
    sinks. A query that sees nothing gives 0. Returns o [T, H, D] in q's dtype. `observe` leaves mass on the slots;
    `layer` is what its noise is drawn for.
    """
    _, H, D = q.shape
    G = tables.pages.shape[1]
    R = H // G
    o = torch.zeros_like(q)
    starts = tables.query_start_loc.tolist()
    for b, row in enumerate(tables.rows.tolist()):
        fresh = slice(starts[b], starts[b + 1])
        p = q_pos[fresh, None]  # [t, 1]
        window, sinks = int(tables.windows[row]), int(tables.sinks[row])
        for g in range(G):
            pages = tables.pages[row, g, : int(tables.counts[row, g])].long()  # [n]
            k = kv.k[pages].reshape(-1, D).float()  # [S, D]
            v = kv.v[pages].reshape(-1, D).float()  # [S, D]
            pos = kv.pos[pages].reshape(1, -1)  # [1, S]
            seen = (pos >= 0) & (pos <= p) & ((p - pos < window) | (pos < sinks))  # [t, S]
            asked = scoring if window == NO_WINDOW and len(p) else None
            if asked:
                kv.mass[pages] *= asked.decay[b]
            for h in range(g * R, (g + 1) * R):
                x = scale * q[fresh, h].float() @ k.T  # [t, S]
                if alibi_slopes is not None:
                    x = x + alibi_slopes[h] * (pos - p)
                x = x.masked_fill(~seen, -torch.inf)
                w = torch.softmax(x, dim=-1).nan_to_num(0.0)  # a row that sees nothing is all NaN
                o[fresh, h] = (w @ v).to(q.dtype)
                if asked:
                    step = torch.where(asked.redraw_noise[b] == 1, p, -1)  # [t, 1]
                    x = x + sample_noise(int(asked.noise[b]), noise_key(asked.seed[b], layer, g, step), pos)
                    w = torch.softmax(x / asked.temperature[fresh, None], dim=-1).nan_to_num(0.0)  # [t, S]
                    column = h - g * R if kv.mass.shape[1] > 1 else 0
                    kv.mass[pages, column] += (asked.weights[fresh] @ w).view(-1, kv.page_size)
    return o


def read(kv: KV, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of pages int64 [n] in float32, [n, S, D] both; those of holes mean nothing."""
    return kv.k[pages].float(), kv.v[pages].float()


def copy(kv: KV, src: Tensor, dst: Tensor) -> None:
    """Copy whole pages, positions too: src, dst int64 [n]; no page is in both."""
    for x in (kv.k, kv.v, kv.pos, kv.mass):
        x[dst] = x[src]


def move(kv: KV, src: Tensor, dst: Tensor) -> None:
    """Copy slots with their positions and masses, int32 [M, n] both: lists of slots of different pages, each in order.

    No slot of a list is written before it is read. What is left behind is for the caller to make holes of.
    """
    s, d = src.long().flatten(), dst.long().flatten()
    for x in (kv.k.view(-1, kv.head_dim), kv.v.view(-1, kv.head_dim), kv.pos.view(-1)):
        x[d] = x[s]
    mass, S = kv.mass.transpose(1, 2), kv.page_size  # [P, S, C]
    mass[d // S, d % S] = mass[s // S, s % S]


def select_victims(priority: Tensor, pos: Tensor, lengths: Tensor, sinks: int, last_evictable: int, n: int) -> Tensor:
    """The n slots that go first of each list, in order: places int64 [N, n].

    priority float32 and pos int32 [N, S]; of a list only the first `used` (int32 [N], at least n) are asked. See
    kernels/order.py for the order.
    """
    rank = eviction_key(priority, pos, sinks, last_evictable)
    return rank.masked_fill_(torch.arange(pos.shape[-1]) >= lengths[:, None], 2**63 - 1).topk(n, largest=False).indices
