"""Parts of a softmax in base 2 that the attention kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

from retain.kernels.api import NO_WINDOW as _NO_WINDOW
from retain.kernels.triton.noise import LOG2E

NO_WINDOW = tl.constexpr(_NO_WINDOW)


@triton.jit
def finite_or_zero(x):
    """Replace -inf by 0, so that subtracting a row's maximum from -inf never gives NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def safe_log2(total):
    """Return log2 of a sum, and 0 for an empty sum: its row's maximum is -inf already."""
    return tl.log2(tl.where(total == 0.0, 1.0, total))


@triton.jit
def cap_scores(x, softcap):
    """Return softcap * tanh(x / softcap) in base 2, of scores for base e."""
    return softcap * LOG2E * (1.0 - 2.0 / (1.0 + tl.exp(x * (2.0 / softcap))))
