"""Kernels that prepare a step: tokens that only the device knows yet."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def insert_pending_tokens(input_ids, sources, sampled, tokens, T: tl.constexpr):
    """Replace the ids of T of the fresh tokens that are pending; see kernels/pending_tokens.py."""
    t = tl.program_id(0) * T + tl.arange(0, T)
    source = tl.load(sources + t, mask=t < tokens, other=-1)
    is_pending = source >= 0
    token = tl.load(sampled + source, mask=is_pending, other=0)
    tl.store(input_ids + t, tl.maximum(token, 0), mask=is_pending)
