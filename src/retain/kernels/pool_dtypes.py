"""The dtypes of pools: their names, and the bytes of their slots and pages.

torch.int8 is 8 bits for K and V; torch.uint8 is 8 bits for K and 4 for V, called k8v4. See quantized_slots.py.
"""

from __future__ import annotations

import torch

from retain.kernels.quantized_slots import SCALE_BYTES, group_size

QUANTIZED_DTYPES = (torch.int8, torch.uint8)


def pool_dtype(name: str) -> torch.dtype:
    """Return the dtype of a pool by its name: a name of torch's, or k8v4."""
    dtype: torch.dtype = torch.uint8 if name == "k8v4" else getattr(torch, name)
    return dtype


def key_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of a slot's K with its scale, in a pool of this dtype."""
    return head_dim + SCALE_BYTES if dtype in QUANTIZED_DTYPES else head_dim * dtype.itemsize


def value_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of a slot's V with its scales, in a pool of this dtype."""
    if dtype == torch.uint8:
        return head_dim // 2 + SCALE_BYTES * (head_dim // group_size(head_dim))
    return key_bytes(head_dim, dtype)


def page_bytes(page_size: int, head_dim: int, dtype: torch.dtype, score_columns: int = 1) -> int:
    """Return the bytes of one page: K, V, positions and masses."""
    return page_size * (key_bytes(head_dim, dtype) + value_bytes(head_dim, dtype) + 4 + 4 * score_columns)
