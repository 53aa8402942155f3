"""Arguments that several kernels share, by the names of their parameters.

A launch passes all arguments as keywords: `kernel[grid](**table_args(tables), tiles=tiles, ...)`. Python raises an
error for a parameter that has no argument, or two. Triton's compiler raises one for an argument without a parameter;
its interpreter leaves that out. Tuples would not do: Triton specializes on each field of one (docs/log/gpu.md).
"""

from __future__ import annotations

from torch import Tensor

from retain.kernels.api import Tables

KernelArgs = dict[str, object]


def array_args(x: Tensor, name: str, *strides: str) -> KernelArgs:
    """Return a tensor and its first strides, under these names."""
    return {name: x, **dict(zip(strides, x.stride(), strict=False))}


def query_args(q: Tensor) -> KernelArgs:
    """Return the arguments for queries [T, H, D]."""
    return array_args(q, "q", "q_token", "q_head")


def slot_args(slots: Tensor) -> KernelArgs:
    """Return the arguments for the slots [G, T] of fresh tokens."""
    return array_args(slots, "slots", "slot_head", "slot_token")


def table_args(t: Tables) -> KernelArgs:
    """Return the arguments for the page tables of one layer, and for the numbers of their pages."""
    pages = array_args(t.pages, "pages", "page_row", "page_head")
    return pages | array_args(t.counts, "counts", "count_row", "count_head")


def visibility_args(t: Tables) -> KernelArgs:
    """Return windows and `dense` of one layer; where a kernel does not read `dense`, windows stand in."""
    return array_args(t.windows, "windows", "window_row") | {"dense": t.windows if t.dense is None else t.dense}
