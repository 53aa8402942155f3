"""Pages as kernels address them.

A page of K, or of V, is S slots of D numbers. In a pool of quantized slots the bfloat16 scales of the slots follow: [S]
for 8 bits, [D / group, S] for 4 bits, of which a byte has two numbers. Pages of another dtype in the memory of a pool
are shorter than the distance between them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from retain.kernels.api import KV
from retain.kernels.slots.pool_dtypes import FP8, QUANTIZED_DTYPES
from retain.kernels.slots.quantized_slots import (
    SCALE_BYTES,
    dequantize,
    dequantize_4bit,
    group_size,
    pack_nibbles,
    quantize_4bit,
    rotate,
    unpack_nibbles,
)
from retain.kernels.slots.reinterpret import PageFormat, view_pages

# Arguments of kernels that read single numbers there: whether 16 bytes divide the address depends on the layer, and
# must not make a variant of a kernel.
TABLE_ADDRESSES = ("pages", "counts", "windows", "dense")


@dataclass(frozen=True)
class PageArgs:
    """The arguments for the memory of K and V. Where the pool has no scales, k and v stand in for them."""

    k: Tensor
    v: Tensor
    scales: dict[str, Tensor]  # k_scales, v_scales
    words: dict[str, Tensor]  # k_words, v_words: the same memory as int32, pairs of scales
    pairs: dict[str, Tensor]  # k of fp8 as pairs of numbers, uint16; v of fp8 as pairs, uint16, of int8 as int16
    constants: dict[str, int | bool]  # K_PAGE, V_PAGE: elements from page to page; QUANTIZED; K_GROUP, V_GROUP
    halves: dict[str, bool]  # K_HALVES, V_HALVES: whether a row's bytes are wide enough for products of their own


def page_args(kv: KV) -> PageArgs:
    """Return the arguments of a pool. K_GROUP and V_GROUP are the numbers of 4 bits that share a scale, or 0.

    Kernels see floats of 8 bits as bytes: uint8 without such a group.
    """
    is_quantized = kv.dtype in QUANTIZED_DTYPES
    k, v = (x.view(torch.uint8) if kv.dtype == FP8 else x for x in (kv.k, kv.v))
    k_scales, v_scales = (x.view(torch.bfloat16) if is_quantized else x for x in (kv.k, kv.v))
    k_words, v_words = (x.view(torch.int32) if is_quantized and x.stride(0) % 4 == 0 else x for x in (kv.k, kv.v))
    scales = {"k_scales": k_scales, "v_scales": v_scales}
    words = {"k_words": k_words, "v_words": v_words}
    pair_dtypes = {torch.int8: torch.int16, FP8: torch.uint16}
    k_pairs = kv.k.view(torch.uint16) if kv.dtype == FP8 else kv.k
    v_pairs = kv.v.view(pair_dtypes[kv.v.dtype]) if kv.v.dtype in pair_dtypes else kv.v
    constants = {
        "K_PAGE": kv.k.stride(0),
        "V_PAGE": kv.v.stride(0),
        "QUANTIZED": is_quantized,
        "K_GROUP": group_size(kv.k_dim) if kv.k.dtype == torch.uint8 else 0,
        "V_GROUP": group_size(kv.v_dim) if kv.v.dtype == torch.uint8 else 0,
    }
    halves = {
        "K_HALVES": kv.k.dtype == torch.uint8 and _has_halves(kv.k_dim),
        "V_HALVES": kv.v.dtype == torch.uint8 and _has_halves(kv.v_dim),
    }
    return PageArgs(k, v, scales, words, {"k": k_pairs, "v": v_pairs}, constants, halves)


def _has_halves(dim: int) -> bool:
    """Return whether half of the numbers of a row are a power of 2 that tensor cores multiply."""
    return dim >= 32 and dim & (dim - 1) == 0


def view_pool(memory: tuple[Tensor, Tensor], format: PageFormat) -> KV:
    """Return pages of a format in the memory of K and V, with positions and masses of their own."""
    k, v = view_pages(memory, format)
    if format.dtype not in QUANTIZED_DTYPES:
        k = k.view(len(k), format.page_size, format.k_dim)
        v = v.view(len(v), format.page_size, format.v_dim)
    return KV.over(k, v, format)


def slots_of(kv: KV, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return views of all slots of x, which is kv.k or kv.v: the numbers, and the scales of quantized slots.

    Numbers are [P, S, D], scales [P, S]; of 4 bits [P, S, D / 2] and [P, S, D / group].
    """
    P, S, D = kv.num_pages, kv.page_size, kv.k_dim if x is kv.k else kv.v_dim
    if kv.dtype not in QUANTIZED_DTYPES:
        return x, None
    width = D // 2 if x.dtype == torch.uint8 else D
    numbers, scales = x[:, : S * width].view(P, S, width), x.view(torch.bfloat16)[:, S * width // SCALE_BYTES :]
    return numbers, scales.unflatten(1, (-1, S)).transpose(1, 2) if x.dtype == torch.uint8 else scales


def write_4bit(kv: KV, slot_mapping: Tensor, x: Tensor, to: Tensor) -> None:
    """Store x [T, G, ...] in slots of `to`, which is kv.k or kv.v. A kernel of its own would save little of a step."""
    integers, scales = quantize_4bit(x)
    to_numbers, to_scales = slots_of(kv, to)
    assert to_scales is not None
    slots = slot_mapping.T.long()  # [T, G]
    page, place = slots // kv.page_size, slots % kv.page_size
    to_numbers[page, place] = pack_nibbles(integers)
    to_scales[page, place] = scales


def read_slots(kv: KV, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V of slots in float32, [..., D] for slots [...]."""
    page, place = slots // kv.page_size, slots % kv.page_size
    k, v = (_read(kv, x, page, place) for x in (kv.k, kv.v))
    return rotate(k) if kv.dtype in QUANTIZED_DTYPES else k, v


def _read(kv: KV, x: Tensor, page: Tensor, place: Tensor) -> Tensor:
    numbers, scales = slots_of(kv, x)
    if scales is None:
        return numbers[page, place].float()
    if x.dtype == torch.uint8:
        return dequantize_4bit(unpack_nibbles(numbers[page, place]), scales[page, place])
    return dequantize(numbers[page, place], scales[page, place])
