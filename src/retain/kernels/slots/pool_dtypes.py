"""The dtypes of pools: their names, their tensors, and the bytes of their slots and pages.

torch.int8 is 8 bits for K and V, torch.int4 is 4 bits, and torch.uint8 is 8 bits for K and 4 for V, called k8v4.
torch.float8_e4m3fn, called fp8, is floats of 8 bits. Torch computes with none of them: slots are bytes. See
quantized_slots.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from retain.kernels.slots.quantized_slots import SCALE_BYTES, group_size

INT8 = torch.int8
K8V4 = torch.uint8
INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # torch's stubs lack it
FP8 = torch.float8_e4m3fn
INTEGER_DTYPES = (INT8, K8V4, INT4)
QUANTIZED_DTYPES = (*INTEGER_DTYPES, FP8)
_NAMES = {"k8v4": K8V4, "fp8": FP8}  # where torch has others


LARGEST_VALUE = 2.0**100  # of a number in V: its products with scales and units are finite, too
LARGEST_FLOAT16 = 65504.0


def pool_dtype(name: str) -> torch.dtype:
    """Return the dtype of a pool by its name: a name of torch's, k8v4 or fp8."""
    dtype: torch.dtype = _NAMES.get(name) or getattr(torch, name)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a pool's dtype, which `pool_dtype` reads."""
    return next((name for name, named in _NAMES.items() if named == dtype), str(dtype).removeprefix("torch."))


def tensor_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of the tensors of K and V in a pool: integers of 8 bits are int8, of 4 bits uint8."""
    by_pool = {K8V4: (torch.int8, torch.uint8), INT4: (torch.uint8, torch.uint8)}
    return by_pool.get(dtype, (dtype, dtype))


def dtype_of_tensors(keys: torch.dtype, values: torch.dtype) -> torch.dtype:
    """Return the dtype of the pool whose tensors of K and V have these."""
    return INT4 if keys == torch.uint8 else values


def bound_values(v: Tensor, dtype: torch.dtype) -> Tensor:
    """Return V as a pool of this dtype can hold it: NaN as 0, and no number larger than the largest.

    A hole has a weight of 0, and 0 times NaN or infinity is NaN.
    """
    largest = LARGEST_FLOAT16 if dtype == torch.float16 else LARGEST_VALUE
    v = v if v.dtype == torch.float64 else v.float()
    return v.nan_to_num(0.0, largest, -largest).clamp(-largest, largest)


def key_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of a slot's K with its scales, in a pool of this dtype."""
    return _row_bytes(head_dim, tensor_dtypes(dtype)[0], dtype in QUANTIZED_DTYPES)


def value_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of a slot's V with its scales, in a pool of this dtype."""
    return _row_bytes(head_dim, tensor_dtypes(dtype)[1], dtype in QUANTIZED_DTYPES)


def slots_in_page(
    page_size: int, k_dim: int, dtype: torch.dtype, other: torch.dtype, largest: int = 512, v_dim: int | None = None
) -> int:
    """Return how many slots of another dtype a page has room for: a multiple of 16, at most `largest`.

    `v_dim` is None where it is `k_dim`.
    """
    keys = page_size * key_bytes(k_dim, dtype) // key_bytes(k_dim, other)
    v_dim = v_dim or k_dim
    values = page_size * value_bytes(v_dim, dtype) // value_bytes(v_dim, other)
    return min(keys, values, largest) // 16 * 16


def _row_bytes(head_dim: int, dtype: torch.dtype, is_quantized: bool) -> int:
    if not is_quantized:
        return head_dim * dtype.itemsize
    if dtype == torch.uint8:
        return head_dim // 2 + SCALE_BYTES * (head_dim // group_size(head_dim))
    return head_dim + SCALE_BYTES
