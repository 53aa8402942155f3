"""Whether torch's attention of prompts keeps the engine's law: a token's bits depend neither on company nor on chunks.

A prompt without holes and masses is dense and causal, so that torch's SDPA could attend instead of our kernel. It may
where all of these are equal, and is worth it where `tflop_s` is above ours.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.gpu_bench.cases import BF16
from tools.gpu_bench.timing import KernelBench, Line, describe_error

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def compare_library_prompts(bench: KernelBench, sizes: tuple[int, int, int], T: int) -> Iterator[Line]:
    """Yield for each kernel of torch whether a prompt of T tokens has the same bits in parts and beside another."""
    H, G, D = sizes
    rng = torch.Generator(bench.device).manual_seed(0)
    q, k, v = (torch.randn(2, n, T, D, generator=rng, device=bench.device, dtype=BF16) for n in (H, G, G))
    cuts = [T // 2, T // 2 + 64, T // 4 + 1, T - 1]
    for name, kernel in KERNELS.items():
        line: Line = {"case": "torch SDPA", "kernel": name, "tokens": T}
        try:
            with sdpa_kernel(kernel):
                line |= compare_bits(q, k, v, cuts) | {"tflop_s": time_prompt(bench, q[:1], k[:1], v[:1])}
        except RuntimeError as error:  # this device, or these heads, have no such kernel
            yield line | {"unavailable": describe_error(error)}
            continue
        try:
            with sdpa_kernel(kernel):
                yield line | compare_ends(q[:1], k[:1], v[:1], cuts)
        except RuntimeError as error:  # the mask of an end has kernels of its own
            yield line | {"no ends": describe_error(error)}


def compare_bits(q: Tensor, k: Tensor, v: Tensor, cuts: list[int]) -> Line:
    """Return the cuts before which the first of two prompts keeps its bits; and whether it does beside the other."""
    alone = causal(q[:1], k[:1], v[:1])
    equal = [c for c in cuts if torch.equal(causal(q[:1, :, :c], k[:1, :, :c], v[:1, :, :c]), alone[:, :, :c])]
    return {"cuts": cuts, "equal before": equal, "equal beside": torch.equal(causal(q, k, v)[:1], alone)}


def compare_ends(q: Tensor, k: Tensor, v: Tensor, cuts: list[int]) -> Line:
    """Return the cuts behind which a prompt keeps its bits. Heads share no keys: the mask of an end allows none."""
    from torch.nn.attention.bias import causal_lower_right

    T, R = q.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(R, 1) for x in (k, v))
    whole = causal(q, k, v)

    def end(cut: int) -> Tensor:
        return F.scaled_dot_product_attention(q[:, :, cut:], k, v, attn_mask=causal_lower_right(T - cut, T))

    return {"equal behind": [cut for cut in cuts if torch.equal(end(cut), whole[:, :, cut:])]}


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with torch from the first token on."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] > k.shape[1])


def time_prompt(bench: KernelBench, q: Tensor, k: Tensor, v: Tensor) -> float | None:
    """Return the TFLOP/s of a whole prompt, half of whose products count; None where it was not timed."""
    (found,) = bench.time({"prompt": lambda: causal(q, k, v)}).values()
    _, H, T, D = q.shape
    return 2 * H * D * T**2 / found["us"] / 1e6 if "us" in found else None
