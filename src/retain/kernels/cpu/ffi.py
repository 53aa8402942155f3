"""What C++ is told of tensors: their addresses, sizes and strides. Who calls has checked types and shapes."""

from __future__ import annotations

import torch

import retain.kernels.cpu._C as _C
from retain.kernels.api import KV, AttentionScoring, Tables


def to_c_pool(kv: KV) -> _C.Pool:
    """The memory of a pool."""
    bf16 = kv.k.dtype == torch.bfloat16
    return _C.Pool(
        kv.k.data_ptr(), kv.v.data_ptr(), kv.pos.data_ptr(), kv.mass.data_ptr(),
        kv.num_pages, kv.page_size, kv.head_dim, kv.mass.shape[1], bf16,
    )  # fmt: skip


def to_c_tables(t: Tables) -> _C.Tables:
    """Those of one layer; or, where they are of all, those of the first."""
    *_, rows, G, n = t.pages.shape
    *_, page_row, page_head, _ = t.pages.stride()
    return _C.Tables(
        t.pages.data_ptr(), page_row, page_head, t.counts.data_ptr(), *t.counts.stride()[-2:],
        t.windows.data_ptr(), t.windows.stride(-1), t.sinks.data_ptr(), t.sinks.stride(-1),
        t.rows.data_ptr(), t.query_start_loc.data_ptr(), t.rows.shape[0], G, rows, n,
    )  # fmt: skip


def to_c_scoring(o: AttentionScoring | None, layer: int = 0) -> _C.Observe:
    """What fresh queries leave."""
    if o is None:
        return _C.Observe()
    parts = (o.weights, o.temperature, o.decay, o.noise, o.seed, o.redraw_noise)
    return _C.Observe(*(x.data_ptr() for x in parts), layer)


def check_scoring(o: AttentionScoring | None, T: int, B: int) -> None:
    """Raise ValueError or TypeError unless it fits T fresh tokens of B requests."""
    if o is None:
        return
    for name, n, dtype in (("weights", T, torch.float32), ("temperature", T, torch.float32), ("decay", B, torch.float32),
                           ("noise", B, torch.int32), ("seed", B, torch.int32), ("redraw_noise", B, torch.int32)):  # fmt: skip
        x = getattr(o, name)
        if x.shape != (n,) or not x.is_contiguous():
            raise ValueError(f"observe.{name} must be [{n}] and contiguous, not {list(x.shape)}")
        if x.dtype != dtype:
            raise TypeError(f"observe.{name} must be {dtype}, not {x.dtype}")
