"""A step's attention, of one layer: the tiles of a plan (plan.py), over the tables of a call and its demoted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
from torch import Tensor

from retain.kernels.api import KV, Tables
from retain.kernels.attention_params import AttentionParams
from retain.kernels.slots import quantized_slots
from retain.kernels.slots.pool_dtypes import QUANTIZED_DTYPES
from retain.kernels.triton import looks, prefill_kernels
from retain.kernels.triton.launches import AttentionCall, launch_decode, launch_mass, launch_merge, launch_prefill
from retain.kernels.triton.plan import AttentionPlan


def attend(
    q: Tensor,
    kv: KV,
    tables: Tables,
    plan: AttentionPlan,
    q_pos: Tensor,
    params: AttentionParams,
    layer: int,
    out: Tensor | None = None,
) -> Tensor:
    """Return the output [T, H, V] of one layer, and update the masses that the plan scores.

    `out` is memory for it. Rows of no tile, those of padding requests, keep what is there; without `out` they are 0.
    """
    call = AttentionCall(_prepare_queries(q, kv), kv, tables, plan, q_pos, params, layer)
    calls = [call, *([_demoted_call(call, q)] if plan.demoted else [])]
    # The interpreter truncates to bfloat16 where a GPU rounds, so torch rounds for it. With demoted tokens a prefill
    # tile goes on from its output, which must not be rounded between.
    in_float32 = (triton.knobs.runtime.interpret and q.dtype == torch.bfloat16) or (plan.demoted and plan.prefill)
    if in_float32 or out is None:
        out = torch.zeros(*q.shape[:2], kv.v_dim, dtype=torch.float32 if in_float32 else q.dtype, device=q.device)
    for i in range(len(plan.tile_lists)):
        _attend_tiles(calls, i, out)
    if plan.looks:
        looks.attend(call, plan.looks, out)
    for part in calls:
        if part.plan.mass_buffers:
            launch_mass(part, part.plan.mass_buffers)
    return out.to(q.dtype)


def _prepare_queries(q: Tensor, kv: KV) -> Tensor:
    if kv.dtype in QUANTIZED_DTYPES:
        return quantized_slots.rotate(q)  # as the keys are
    return q if q.stride(-1) == 1 else q.contiguous()


def _demoted_call(call: AttentionCall, q: Tensor) -> AttentionCall:
    """Return the call for the demoted tokens, which follow the others in no order of positions."""
    demoted, plan = call.tables.demoted, call.plan.demoted
    assert demoted and plan
    tables = replace(call.tables, pages=demoted.pages, counts=demoted.counts, dense=None)
    q = call.q if call.kv.dtype in QUANTIZED_DTYPES else _prepare_queries(q, demoted.kv)
    return replace(call, q=q, kv=demoted.kv, tables=tables, plan=plan)


def _attend_tiles(calls: Sequence[AttentionCall], i: int, o: Tensor) -> None:
    """Compute the tiles of list i over the tables of each call, and merge what is split."""
    call, lists = calls[0], [c.plan.tile_lists[i] for c in calls]
    H, tiles, device = call.q.shape[1], lists[0], o.device
    J, G, num_splits = len(tiles.data), call.tables.pages.shape[1], sum(x.num_splits for x in lists)
    if num_splits:
        num_rows = J * G * num_splits * tiles.max_rows
        split_max, split_sum = torch.empty(2, (2 if call.changes_scores else 1) * num_rows, device=device)
        split_out, first = torch.empty(num_rows, call.kv.v_dim, device=device), 0
        splits = {"split_max": split_max, "split_sum": split_sum, "split_out": split_out}
        sizes = {"width": tiles.max_rows, "num_splits": num_splits}
        for c, x in zip(calls, lists, strict=True):
            own = {name: part[first * tiles.max_rows :] for name, part in splits.items()}
            launch_decode(c, x, {**own, **sizes})
            first += x.num_splits
        launch_merge(calls, tiles, o, {**splits, **sizes})
    else:
        log_sums = torch.empty(len(o) * H if len(calls) > 1 else 1, device=device)
        parts = (prefill_kernels.FIRST, prefill_kernels.SECOND) if len(calls) > 1 else (prefill_kernels.ONLY,)
        for c, x, part in zip(calls, lists, parts, strict=True):
            launch_prefill(c, x, o, log_sums, part.value)
