"""Random inputs of kernels."""

from __future__ import annotations

from typing import Any

import torch

BF16 = torch.bfloat16
INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # torch's stubs lack it


def demoted_pages(kv: Any) -> Any:
    """Return the pages of a pool as pages of slots of 4 bits."""
    from retain.kernels import triton
    from retain.kernels.pool_dtypes import slots_in_page
    from retain.kernels.reinterpret import PageFormat

    num_slots = slots_in_page(kv.page_size, kv.k_dim, kv.dtype, INT4)
    return triton.reinterpret(kv, PageFormat(num_slots, INT4, kv.k_dim, kv.v_dim))


def keyformer_scoring(T: int, B: int, device: str = "cpu") -> Any:
    """Return Keyformer's scoring of every query."""
    from retain.kernels.scoring import GUMBEL, AttentionScoring

    ones = torch.ones(B, dtype=torch.int32, device=device)
    return AttentionScoring(
        weights=torch.ones(T, device=device),
        temperature=torch.full((T,), 1.5, device=device),
        decay=torch.ones(B, device=device),
        noise=ones * GUMBEL,
        seed=ones,
        redraw_noise=ones,
    )
