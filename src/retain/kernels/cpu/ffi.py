"""Conversion of the contract's data to C++ structs of addresses, sizes and strides, and the checks that it needs.

C++ reads these addresses without a check of types and shapes: callers check them first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import retain.kernels.cpu._C as _C
from retain.kernels.api import KV, EvictionLists, GroupInputs, Tables
from retain.kernels.attention_params import AttentionParams
from retain.kernels.experts import Router
from retain.kernels.linear_attention import LinearAttention, Mamba2Rule
from retain.kernels.shape_checks import shape_error
from retain.kernels.slots.pool_dtypes import INT4, INT8, K8V4
from retain.kernels.slots.scoring import AttentionScoring

POOL_DTYPES = {torch.float32: 0, torch.bfloat16: 1, INT8: 2, K8V4: 3, INT4: 4}  # DType in types.h


def to_c_pool(kv: KV) -> _C.Pool:
    """Convert a pool of K and V to the C++ structure with its addresses and strides."""
    return _C.Pool(
        kv.k.data_ptr(), kv.v.data_ptr(), kv.pos.data_ptr(), kv.mass.data_ptr(),
        kv.num_pages, kv.page_size, kv.k_dim, kv.v_dim, kv.mass.shape[1], POOL_DTYPES[kv.dtype],
        kv.k.stride(0) * kv.k.itemsize, kv.v.stride(0) * kv.v.itemsize,
        _address(kv.sketches), kv.sketch_bytes, kv.resident,
    )  # fmt: skip


def to_c_tables(t: Tables) -> _C.PageTables:
    """Convert the tables of one layer; of the tables of all layers, convert the first layer's."""
    *_, num_rows, G, n = t.pages.shape
    *_, page_row, page_head, _ = t.pages.stride()
    by_layer = t.pages, t.counts, t.windows
    return _C.PageTables(
        t.pages.data_ptr(), page_row, page_head, t.counts.data_ptr(), *t.counts.stride()[-2:],
        t.windows.data_ptr(), t.windows.stride(-1), t.rows.data_ptr(), t.query_start_loc.data_ptr(),
        t.rows.shape[0], G, num_rows, n, *(x.stride(0) if len(t.pages.shape) == 4 else 0 for x in by_layer),
        _address(t.looks),
    )  # fmt: skip


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def to_c_demoted(t: Tables) -> tuple[_C.Pool, _C.PageTables]:
    """Convert the pool and the tables of demoted tokens; without them, C++ gets a pool without memory."""
    if t.demoted is None:
        return _C.Pool(), _C.PageTables()
    tables = replace(t, pages=t.demoted.pages, counts=t.demoted.counts, looks=None)  # who demotes does not look
    return to_c_pool(t.demoted.kv), to_c_tables(tables)


def to_c_group(group: GroupInputs) -> _C.GroupArgs:
    """Convert what the layers of a KV cache group read and write."""
    tables = group.tables
    slots = group.slot_mapping
    return _C.GroupArgs(
        to_c_pool(group.kv), to_c_tables(tables), *to_c_demoted(tables),
        slots.data_ptr(), *slots.stride(), len(tables.pages),
    )  # fmt: skip


def to_c_params(params: AttentionParams, address: Callable[[Tensor], int] = Tensor.data_ptr) -> _C.AttentionParams:
    """Convert the parameters of attention. C++ has their fields in the same order, and 0 for what is absent."""
    return _C.AttentionParams(*(address(x) if isinstance(x, Tensor) else x or 0 for x in vars(params).values()))


def to_c_router(r: Router, num_experts: int, address: Callable[[Tensor], int]) -> _C.Router:
    """Convert the router of a layer's experts. `address` keeps a tensor alive and returns its address."""
    bias, expert_scale = (0 if x is None else address(x) for x in (r.bias, r.expert_scale))
    return _C.Router(
        num_experts, r.top_k, r.is_sigmoid, r.normalize, r.scale, bias, r.num_groups, r.top_groups,
        r.group_best, expert_scale, r.sum_epsilon,
    )  # fmt: skip


def to_c_linear_attention(params: LinearAttention, address: Callable[[Tensor], int]) -> _C.LinearAttention:
    """Convert the sizes, the gates and the rule of linear attention."""
    p = params
    rule = p.rule
    found = (_C.UpdateRule.gated_delta, 0, 0.0, 0.0)
    if isinstance(rule, Mamba2Rule):
        found = (_C.UpdateRule.mamba2, address(rule.skip), *rule.time_step_limits)
    gates = address(p.decay), address(p.time_bias)
    return _C.LinearAttention(p.num_key_heads, p.num_value_heads, p.k_dim, p.v_dim, *gates, *found)


def to_c_scoring(scoring: AttentionScoring | None, layer: int = 0) -> _C.AttentionScoring:
    """Convert the scoring of a step; without one, C++ changes no mass."""
    if scoring is None:
        return _C.AttentionScoring()
    return _C.AttentionScoring(*(x.data_ptr() for x in vars(scoring).values()), layer)


def check_tables(t: Tables) -> None:
    """Raise ValueError or TypeError unless the tables of one layer have the shapes and dtypes of the contract."""
    N, G, n = t.pages.shape
    B = len(t.rows)
    shapes = [x.shape for x in (t.counts, t.query_start_loc, t.windows)]
    if shapes != [(N, G), (B + 1,), (N,)]:
        raise shape_error(
            "attend",
            f"tables with counts [{N}, {G}], query_start_loc [{B + 1}], windows [{N}]",
            counts=t.counts,
            query_start_loc=t.query_start_loc,
            windows=t.windows,
        )
    for name in ("pages", "counts", "windows", "rows", "query_start_loc"):
        if (dtype := getattr(t, name).dtype) != torch.int32:
            raise TypeError(f"attend: tables.{name} must be int32, not {dtype}")
    if t.pages.stride(-1) != 1 and n > 1:
        raise ValueError("attend: the last dimension of tables.pages must be contiguous")
    if t.demoted:
        check_tables(replace(t, pages=t.demoted.pages, counts=t.demoted.counts, demoted=None))


def check_eviction_lists(lists: EvictionLists, holes: Tensor, n: int) -> None:
    """Raise ValueError or TypeError unless the lists, and room for n holes of each, are those of the contract."""
    N, L, G, _ = lists.pages.shape
    B, M, _ = lists.slots_used.shape
    tensors = {name: x for name, x in vars(lists).items() if name != "max_slots"} | {"holes": holes}
    shapes = [x.shape for x in (lists.rows, lists.layers, lists.slots_used, lists.evictable, lists.by_mass, holes)]
    if shapes != [(B,), (M,), (B, M, G), (B, 2), (B,), (N, L, G, holes.shape[-1])] or not 0 <= n <= holes.shape[-1]:
        raise shape_error(
            "punch",
            f"slots_used [B, M, {G}], rows [B], layers [M], evictable [B, 2], by_mass [B], holes [{N}, {L}, {G}, {n}]",
            **tensors,
        )
    for name, x in tensors.items():
        if x.dtype != torch.int32:
            raise TypeError(f"punch: {name} must be int32, not {x.dtype}")
        if name in ("pages", "holes") and x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"punch: the last dimension of {name} must be contiguous")


def to_c_hidden_states(states: Tensor | None, B: int) -> tuple[int, int]:
    """Return the address of the hidden states of B requests, and their width; 0 and 0 for None. Raises ValueError."""
    if states is None:
        return 0, 0
    if states.dim() != 2 or len(states) != B or states.dtype != torch.float32 or not states.is_contiguous():
        raise ValueError(f"hidden states of {B} requests are rows of float32, not {states.dtype} {list(states.shape)}")
    return states.data_ptr(), states.shape[1]


def check_scoring(scoring: AttentionScoring | None, T: int, B: int) -> None:
    """Raise ValueError or TypeError unless the scoring fits T fresh tokens of B requests."""
    if scoring is None:
        return
    for name, x in vars(scoring).items():
        n = T if name in ("weights", "temperature") else B
        dtype = torch.float32 if name in ("weights", "temperature", "decay") else torch.int32
        if x.shape != (n,) or not x.is_contiguous():
            raise ValueError(f"scoring.{name} must be [{n}] and contiguous, not {list(x.shape)}")
        if x.dtype != dtype:
            raise TypeError(f"scoring.{name} must be {dtype}, not {x.dtype}")
