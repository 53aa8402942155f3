"""Random inputs of attention: pools of every dtype, tables, queries; and what float64 makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

BF16 = torch.bfloat16
INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # torch's stubs lack it
FP8 = torch.float8_e4m3fn
PAGE_SIZE = 64  # slots of a page of bfloat16
SHAPES = {"llama": (32, 8, 128), "mpt": (32, 32, 128)}  # H, G, D of Llama-3.1-8B and of MPT-7B
QUICK_SHAPES = {"llama": (4, 2, 32)}
SLOTS_AT_ONCE = 2**18  # that `fill` writes


@dataclass(frozen=True)
class AttentionInputs:
    """A step of attention in one layer; each request has equally many fresh tokens."""

    q: Tensor
    kv: Any
    tables: Any
    positions: Tensor  # int32 [T]

    def attend(self, scoring: Any = None, tables: Any = None) -> Callable[[], Tensor]:
        """Return a function that attends, as a step does: the plan is made before."""
        from retain.kernels.attention_params import AttentionParams
        from retain.kernels.triton import attention
        from retain.kernels.triton.plan import plan_attention

        q = self.q
        D = q.shape[2]
        own = tables or self.tables
        plan = plan_attention(own, q.shape[1] // own.pages.shape[1], D, self.kv, scoring)
        return partial(attention.attend, q, self.kv, own, plan, self.positions, AttentionParams(D**-0.5), 0)

    @property
    def num_bytes(self) -> int:
        """The bytes of K and V, with scales, that the queries attend to."""
        D = self.q.shape[2]
        return sum(int(counts.sum()) * kv.page_size * slot_bytes(D, kv.dtype) for kv, _, counts in pools(self))


def slot_bytes(D: int, dtype: torch.dtype) -> int:
    """Return the bytes of K and V of a slot, with scales."""
    from retain.kernels.slots.pool_dtypes import key_bytes, value_bytes

    return key_bytes(D, dtype) + value_bytes(D, dtype)


def pools(inputs: AttentionInputs) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Yield the pools of a step, each with its pages and counts."""
    tables = inputs.tables
    yield inputs.kv, tables.pages, tables.counts
    if tables.demoted:
        yield tables.demoted.kv, tables.demoted.pages, tables.demoted.counts


def requests_in(num_bytes: int, shape: tuple[int, int, int], slots: int, dtype: torch.dtype) -> int:
    """Return how many requests have so many bytes of K and V together; at least 1."""
    _, G, D = shape
    return max(num_bytes // (slot_bytes(D, dtype) * G * slots), 1)


def make_inputs(
    shape: tuple[int, int, int],
    slots: int,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_uneven: bool = False,
    tokens: int = 1,
    holes: float = 0.1,
    demoted: bool = False,
) -> AttentionInputs:
    """Return random inputs: requests of `slots` slots a head, in whole pages; the last `tokens` are queries.

    With `is_uneven` heads have different numbers of pages, up to these. A share of the slots are holes. With `demoted`
    the second half of each table's pages has slots of 4 bits.
    """
    from retain.kernels import triton
    from retain.kernels.api import NO_WINDOW, DemotedTables, Tables

    H, G, D = shape
    S = page_size(dtype)
    n = -(-slots // S)
    slots = n * S
    kv = triton.allocate(1 + batch * G * n, S, D, dtype, 1, device)
    pages = 1 + torch.randperm(batch * G * n, device=device).int().view(batch, G, n)
    pos = torch.arange(slots, device=device, dtype=torch.int32).expand(batch, G, -1)
    fill(kv, pages[..., : n // 2] if demoted else pages)
    pos = torch.where(torch.rand(pos.shape, device=device) < holes, -1, pos)
    kv.pos[pages.long()] = pos.view(batch, G, n, S)
    ones = torch.ones(batch, dtype=torch.int32, device=device)
    counts = draw_counts(batch, G, n) if is_uneven else torch.full((batch, G), n, dtype=torch.int32)
    tables = Tables(
        pages=pages,
        counts=counts.to(device),
        windows=ones * NO_WINDOW,
        rows=torch.arange(batch, dtype=torch.int32),
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32) * tokens,
        dense=None if holes else ones,
        max_pages=n,
    )
    if demoted:
        four = demoted_pages(kv)
        fill(four, pages[..., n // 2 :])
        four.pos.copy_(torch.randint(0, slots, four.pos.shape, device=device))
        half = tables.counts // 2
        behind = DemotedTables(four, pages[..., n // 2 :], half, n // 2)
        tables = replace(tables, counts=half, max_pages=n // 2, demoted=behind)
    q = torch.randn(batch * tokens, H, D, device=device).to(BF16)
    own = torch.arange(slots - tokens, slots, device=device, dtype=torch.int32)
    return AttentionInputs(q, kv, tables, own.repeat(batch))


def page_size(dtype: torch.dtype) -> int:
    """Return the slots of a page as the engine chooses them: its bytes stay about those of bfloat16."""
    from retain.config import SLOTS_PER_PAGE
    from retain.kernels.slots.pool_dtypes import dtype_name

    return PAGE_SIZE * SLOTS_PER_PAGE.get(dtype_name(dtype), 1)


def draw_counts(batch: int, G: int, n: int) -> Tensor:
    """Return the pages of each head, 1 to n: as many heads have 1 to 8 of 64 pages as have 8 to 64."""
    rng = torch.Generator().manual_seed(1)
    return (n ** torch.rand(batch, G, generator=rng)).round().int()


def fill(kv: Any, pages: Tensor) -> None:
    """Write random tokens into all slots of some pages."""
    from retain.kernels import triton

    slots = pages.flatten().int()[:, None] * kv.page_size + torch.arange(kv.page_size, device=pages.device).int()
    for part in slots.flatten().split(SLOTS_AT_ONCE):
        k, v = (torch.randn(len(part), 1, kv.k_dim, device=part.device) for _ in range(2))
        triton.write(kv, part[None], k.to(BF16), v.to(BF16), torch.zeros_like(part))


def demoted_pages(kv: Any) -> Any:
    """Return the pages of a pool as pages of slots of 4 bits."""
    from retain.kernels import triton
    from retain.kernels.slots.pool_dtypes import slots_in_page
    from retain.kernels.slots.reinterpret import PageFormat

    num_slots = slots_in_page(kv.page_size, kv.k_dim, kv.dtype, INT4)
    return triton.reinterpret(kv, PageFormat(num_slots, INT4, kv.k_dim, kv.v_dim))


def keyformer_scoring(T: int, B: int, temperature: float = 1.5, noise_period: int = 1) -> Any:
    """Return Keyformer's scoring of every query; noise is drawn anew for so many positions, or once (0)."""
    from retain.kernels.slots.scoring import GUMBEL, AttentionScoring

    ones = torch.ones(B, dtype=torch.int32)
    return AttentionScoring(
        weights=torch.ones(T),
        temperature=torch.full((T,), temperature),
        decay=torch.ones(B),
        noise=ones * GUMBEL,
        seed=ones,
        noise_period=ones * noise_period,
    )


def h2o_scoring(T: int, B: int) -> Any:
    """Return H2O's scoring of every query."""
    from retain.kernels.slots.scoring import NO_NOISE

    scoring = keyformer_scoring(T, B)
    return replace(scoring, noise=scoring.noise * 0 + NO_NOISE, temperature=torch.ones(T))


def attend_in_float64(inputs: AttentionInputs, scoring: Any = None) -> tuple[Tensor, list[Tensor]]:
    """Return the output [T, H, D], and how much the masses of each pool change, like its `mass`.

    No slot may be in two tables.
    """
    q = inputs.q.double()
    _, H, D = q.shape
    G = inputs.tables.pages.shape[1]
    starts = inputs.tables.query_start_loc.tolist()
    out = torch.zeros_like(q)
    changes = [torch.zeros_like(kv.mass, dtype=torch.float64) for kv, _, _ in pools(inputs)]
    for b, (first, end) in enumerate(pairwise(starts)):
        for g in range(G):
            heads = slice(g * (H // G), (g + 1) * (H // G))
            k, v, pos, places = read_head(inputs, b, g)
            query_pos = inputs.positions[first:end]
            x = torch.einsum("trd,sd->trs", q[first:end, heads], k) * D**-0.5
            is_hidden = ((pos < 0) | (pos > query_pos[:, None]))[:, None]
            weights = x.masked_fill(is_hidden, -torch.inf).softmax(-1)
            out[first:end, heads] = weights @ v
            if scoring is None:
                continue
            noise = draw_noise(scoring, b, g, query_pos, pos)[:, None]
            tau = scoring.temperature[first:end].to(q.device)[:, None, None]
            weights = ((x + noise) / tau).masked_fill(is_hidden, -torch.inf).softmax(-1)
            parts = weights.sum((0, 1)).split([len(slots) for slots in places])
            for change, slots, part in zip(changes, places, parts, strict=True):
                change.view(-1)[slots] += part
    return out, changes


def read_head(inputs: AttentionInputs, b: int, g: int) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return K, V (float64) and positions of the slots of a head, and the numbers of the slots in each pool."""
    from retain.kernels import triton

    keys, values, positions, places = [], [], [], []
    for kv, pages, counts in pools(inputs):
        own = pages[b, g, : int(counts[b, g])].long()
        slots = (own[:, None] * kv.page_size + torch.arange(kv.page_size, device=own.device)).flatten()
        k, v = triton.read_slots(kv, slots)
        keys.append(k.double())
        values.append(v.double())
        positions.append(kv.pos.view(-1)[slots])
        places.append(slots)
    return torch.cat(keys), torch.cat(values), torch.cat(positions), places


def draw_noise(scoring: Any, b: int, g: int, query_pos: Tensor, pos: Tensor) -> Tensor:
    """Return the noise of a head's slots for each query [t, slots], or [1] where there is none."""
    from retain.kernels.reference.noise import noise_draw, noise_key, sample_noise

    key = noise_key(scoring.seed[b].to(pos.device), 0, g, noise_draw(query_pos, scoring.noise_period[b].to(pos.device)))
    noise = sample_noise(int(scoring.noise[b]), key[:, None], pos)
    return noise.to(pos.device).double().expand(len(query_pos), len(pos))
