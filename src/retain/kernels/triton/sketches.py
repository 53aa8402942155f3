"""The sketches of pages: keys as pages of 4 bits, then the means of values by groups, and deviations from them.

Keys of 4 bits lie as in a pool of them (page_layout.py), so kernels read both alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from retain.kernels.api import KV
from retain.kernels.slots import quantized_slots
from retain.kernels.slots.pool_dtypes import INT4, key_bytes
from retain.kernels.slots.reinterpret import SKETCH_GROUP
from retain.kernels.triton import look_kernels
from retain.kernels.triton.kernel_args import slot_args
from retain.kernels.triton.page_layout import PageArgs, page_args, read_slots, write_4bit


@dataclass(frozen=True)
class DeviceSketches:
    """The sketches of a pool as kernels address them."""

    kv: KV  # whose keys are those of 4 bits
    numbers: Tensor  # bfloat16 [P, n]: all of a page; means and deviations are among them
    first_mean: int
    first_deviation: int

    @property
    def keys(self) -> PageArgs:
        """The arguments for the keys; rows whose pages are not aligned have no halves."""
        args = page_args(self.kv)
        is_aligned = args.constants["K_PAGE"] % 16 == 0
        return replace(args, halves=args.halves | {"K_HALVES": args.halves["K_HALVES"] and is_aligned})

    @property
    def constants(self) -> dict[str, int]:
        """Return the constants of kernels: how far pages are apart, and where means begin, in bfloat16."""
        return {"SKETCH_PAGE": self.numbers.stride(0), "MEANS": self.first_mean}


def sketches_of(kv: KV) -> DeviceSketches:
    """Return the sketches of a pool. Raises ValueError where it has none."""
    if kv.sketches is None:
        raise ValueError("tables.looks: the pool has no sketches")
    size = 0 if kv.dtype == INT4 else kv.page_size * key_bytes(kv.k_dim, INT4)
    keys = kv.sketches[:, :size]
    of_keys = replace(kv, k=keys, v=keys, v_dim=kv.k_dim) if size else kv
    first_mean = size // 2
    return DeviceSketches(
        kv=of_keys,
        numbers=kv.sketches.view(torch.bfloat16),
        first_mean=first_mean,
        first_deviation=first_mean + kv.page_size // SKETCH_GROUP * kv.v_dim,
    )


def write(kv: KV, slot_mapping: Tensor) -> None:
    """Compute the sketches of slots [G, T] from what they hold."""
    sketches = sketches_of(kv)
    if sketches.kv is not kv:
        keys, _ = read_slots(kv, slot_mapping.T.long())
        write_4bit(sketches.kv, slot_mapping, quantized_slots.rotate(keys), sketches.kv.k)
    G, T = slot_mapping.shape
    pages = page_args(kv)
    look_kernels.summarize_groups[(T, G)](
        **slot_args(slot_mapping), pos=kv.pos, v=pages.v, v_scales=pages.scales["v_scales"], sketches=sketches.numbers,
        S=kv.page_size, V=kv.v_dim, VP=max(triton.next_power_of_2(kv.v_dim), 16),
        **{name: pages.constants[name] for name in ("V_PAGE", "V_GROUP", "QUANTIZED")},
        **sketches.constants, DEVIATIONS=sketches.first_deviation, num_warps=4,
    )  # fmt: skip
