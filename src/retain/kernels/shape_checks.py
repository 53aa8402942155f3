"""Checks of the shapes of arguments that all backends share."""

from __future__ import annotations

import torch
from torch import Tensor

from retain.kernels.api import KV, Batch, Tables
from retain.kernels.attention_params import AttentionParams


def check_write(kv: KV, slot_mapping: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> None:
    """Raise ValueError unless fresh tokens fit the slots of a pool."""
    T, G, _ = k.shape
    if k.shape != (T, G, kv.k_dim) or v.shape != (T, G, kv.v_dim) or (slot_mapping.shape, pos.shape) != ((G, T), (T,)):
        expected = f"slot_mapping [G, T], k [T, G, {kv.k_dim}], v [T, G, {kv.v_dim}], pos [T]"
        raise shape_error("write", expected, slot_mapping=slot_mapping, k=k, v=v, pos=pos)


def check_batch(batch: Batch) -> None:
    """Raise ValueError unless the tables of all layers and the tensors of a batch have matching shapes."""
    T = len(batch.input_ids)
    B = len(batch.rows)
    adapters = batch.adapters
    if adapters is not None and (adapters.shape, adapters.dtype) != ((T,), torch.int32):
        raise shape_error("run", f"adapters int32 [{T}]", adapters=adapters)
    for group in batch.groups:
        tables = group.tables
        L, _, G, _ = tables.pages.shape
        shapes = [x.shape for x in (batch.positions, group.slot_mapping, tables.query_start_loc)]
        num_mapped = 0 if group.slot_rule else T
        if shapes != [(T,), (L, G, num_mapped), (B + 1,)]:
            raise shape_error(
                "run",
                f"positions [{T}], slot_mapping [{L}, {G}, {num_mapped}], query_start_loc [{B + 1}]",
                positions=batch.positions,
                slot_mapping=group.slot_mapping,
                query_start_loc=tables.query_start_loc,
            )
        check_looks(tables, T)


def check_looks(tables: Tables, T: int) -> None:
    """Raise ValueError or TypeError unless each of T fresh tokens says how many slots it looks at."""
    looks = tables.looks
    if looks is None:
        return
    if looks.shape != (T,) or not looks.is_contiguous():
        raise ValueError(f"tables.looks must be [{T}] and contiguous, not {list(looks.shape)}")
    if looks.dtype != torch.int32:
        raise TypeError(f"tables.looks must be int32, not {looks.dtype}")


def check_places(function: str, src: Tensor, dst: Tensor, dims: int, dtype: torch.dtype) -> None:
    """Raise ValueError unless both tensors have this dtype, and one shape of so many dimensions."""
    if src.shape != dst.shape or src.dim() != dims:
        raise shape_error(function, f"src and dst {['[n]', '[M, n]'][dims - 1]}", src=src, dst=dst)
    if src.dtype != dtype or dst.dtype != dtype:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(f"{function}: src and dst must be {name}, not {src.dtype} and {dst.dtype}")


def check_attend(q: Tensor, kv: KV, tables: Tables, q_pos: Tensor, params: AttentionParams) -> None:
    """Raise ValueError unless queries [T, H, D], their positions and parameters fit a pool and tables of one layer."""
    T, H, D = q.shape
    G = tables.pages.shape[1]
    if D != kv.k_dim or H % G or q_pos.shape != (T,):
        raise shape_error("attend", f"q [T, H, {kv.k_dim}] with H a multiple of {G}, q_pos [T]", q=q, q_pos=q_pos)
    params.check(H, G, D)
    check_looks(tables, T)


def shape_error(function: str, expected: str, **got: Tensor) -> ValueError:
    """Return the error for arguments of a function whose shapes are not the expected ones."""
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in got.items())
    return ValueError(f"{function}: expected {expected}; got {shapes}")
