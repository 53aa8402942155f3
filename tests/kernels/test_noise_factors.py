"""The factors of Gumbel noise, which the kernels of prompts compute without a logarithm's special cases."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton as triton_compiler
import triton.language as tl

from retain.kernels import triton
from retain.kernels.triton.noise import negative_log

pytestmark = pytest.mark.skipif(triton.unavailable_reason() is not None, reason=str(triton.unavailable_reason()))


@triton_compiler.jit
def store_negative_log(x, out, N: tl.constexpr):
    """Store -ln of N numbers."""
    n = tl.arange(0, N)
    tl.store(out + n, negative_log(tl.load(x + n)))


def test_negative_log_is_exact_for_all_numbers_that_noise_draws() -> None:
    """Both ends and some between: near 1 the logarithm is small, and its inverse the largest weight."""
    ends = torch.arange(2**12)
    k = torch.cat([ends, 2**23 - 1 - ends, torch.arange(0, 2**23, 2**10)])
    u = (2 * k.double() + 1) / 2**24
    device = "cpu" if triton.is_interpreted() else "cuda"
    x = u.float().to(device)
    out = torch.empty_like(x)
    store_negative_log[(1,)](x, out, N=len(x))
    exact = -u.log()
    assert ((out.cpu().double() - exact).abs() <= 2e-7 * exact).all()
