"""Attention of tokens that look at few slots, as kernel launches: see "Looks" in kernels/api.py.

Scores by keys in 4 bits, ranks, a choice; then attention to the chosen slots by the kernel for decode tiles, to means
for the others by one of its own, and a sum of both by the kernel that merges splits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from retain.kernels.api import KV, Tables
from retain.kernels.slots import quantized_slots
from retain.kernels.slots.pool_dtypes import QUANTIZED_DTYPES
from retain.kernels.slots.reinterpret import SKETCH_GROUP, PageFormat
from retain.kernels.triton import look_kernels
from retain.kernels.triton.kernel_args import array_args, query_args, table_args
from retain.kernels.triton.launches import (
    AttentionCall,
    dot_args,
    key_args,
    launch_decode,
    launch_merge,
    pad_width,
    score_args,
    shape_args,
    value_args,
)
from retain.kernels.triton.page_layout import page_args, slots_of, view_pool
from retain.kernels.triton.plan import DecodeBlocks, LookPlan, TileList, decode_blocks, max_decode_rows, pad_rows
from retain.kernels.triton.sketches import DeviceSketches, sketches_of

SCORED_SLOTS = 64  # of a block, whose maximum and sum are kept
FEW_SCORED_SLOTS = 16  # where long keys fill the memory of a core
BLOCKS_PER_PROGRAM = 4
RANKED_SLOTS = 1024  # of a program
CHOSEN_SLOTS = 4096  # that are read at once
GATHERED_SLOTS = 64  # of a program
MEAN_BLOCKS = DecodeBlocks(16, 8)  # of groups


@dataclass(frozen=True)
class _Choice:
    """What J tiles choose in each kv head: see look_kernels.py for shapes and numbers."""

    scores: Tensor
    ranks: Tensor
    thresholds: Tensor  # int64 [J, G]
    chosen: Tensor  # int32 [J, G, max_slots]: numbers of slots, in the order of tables
    num_chosen: Tensor  # int32 [J, G]


def attend(call: AttentionCall, looks: LookPlan, o: Tensor) -> None:
    """Write the outputs of all tokens that look, a number of tiles at a time."""
    rotated = call.q if call.kv.dtype in QUANTIZED_DTYPES else quantized_slots.rotate(call.q)
    sketches = sketches_of(call.kv)
    for tiles in looks.parts():
        choice = _choose(replace(call, q=rotated), tiles, sketches)
        _attend_to_choice(call, tiles, choice, sketches, o)


def _choose(call: AttentionCall, looks: LookPlan, sketches: DeviceSketches) -> _Choice:
    """Choose slots for each tile and kv head, by rotated queries."""
    q, tables, device, shape = call.q, call.tables, call.q.device, shape_args(call)
    J, G, H, max_slots = len(looks.tiles), shape["G"], q.shape[1], max(call.plan.max_pages, 1) * call.kv.page_size
    parts = count_parts(shape["R"], call.kv.k_dim)
    is_long = call.kv.k_dim > 256
    n = FEW_SCORED_SLOTS if is_long else SCORED_SLOTS
    num_blocks = triton.cdiv(max_slots, n)
    scores = torch.empty(J, H, max_slots, device=device)
    block_max, block_sum = (torch.empty(J, H, num_blocks, device=device) for _ in range(2))
    ranks = torch.empty(J, G, max_slots, dtype=torch.int64, device=device)
    blocks = {"scores": scores, "block_max": block_max, "block_sum": block_sum, "num_blocks": num_blocks}
    shared = {**table_args(tables), "tiles": looks.tiles, "max_slots": max_slots}
    keys = sketches.keys
    windows = array_args(tables.windows, "windows", "window_row")
    look_kernels.score_sketches[(J, G * parts, triton.cdiv(num_blocks, BLOCKS_PER_PROGRAM))](
        **query_args(q), k=keys.k, k_scales=keys.scales["k_scales"], k_words=keys.words["k_words"], pos=call.kv.pos,
        **shared, **windows, q_pos=call.q_pos, **score_args(call.params, q), **blocks,
        G=G * parts, R=shape["R"] // parts, PARTS=parts, S=shape["S"],
        M=pad_rows(shape["R"] // parts), **key_args(call), N=n, BLOCKS=BLOCKS_PER_PROGRAM,
        **dot_args(sketches.kv), K_PAGE=keys.constants["K_PAGE"], K_GROUP=keys.constants["K_GROUP"],
        K_HALVES=keys.halves["K_HALVES"], num_warps=8 if is_long else 4, num_stages=1 if is_long else 3,
    )  # fmt: skip
    sinks = call.params.sink_logits
    look_kernels.rank_slots[(J, G, triton.cdiv(max_slots, RANKED_SLOTS))](
        pos=call.kv.pos, sketches=sketches.numbers, **shared, **blocks, ranks=ranks,
        sinks=q if sinks is None else sinks, **shape, N=n, SINKS=sinks is not None,
        SKETCH_PAGE=sketches.constants["SKETCH_PAGE"], DEVIATIONS=sketches.first_deviation, SLOTS=RANKED_SLOTS,
        num_warps=4,
    )  # fmt: skip
    thresholds = torch.empty(J, G, dtype=torch.int64, device=device)
    chosen = torch.empty(J, G, max_slots, dtype=torch.int32, device=device)
    num_chosen = torch.empty(J, G, dtype=torch.int32, device=device)
    look_kernels.choose_slots[(J, G)](
        **shared, **windows, looks=looks.num_slots, ranks=ranks, thresholds=thresholds, chosen=chosen,
        num_chosen=num_chosen, G=G, S=shape["S"], SLOTS=CHOSEN_SLOTS, num_warps=16,
    )  # fmt: skip
    return _Choice(scores, ranks, thresholds, chosen, num_chosen)


def _attend_to_choice(
    call: AttentionCall, looks: LookPlan, choice: _Choice, sketches: DeviceSketches, o: Tensor
) -> None:
    """Attend to the chosen slots of each tile and kv head, and to means for the others; merge both."""
    S, device = call.kv.page_size, o.device
    rows = looks.tiles[:, 1].long()
    parts = count_parts(shape_args(call)["R"], call.kv.k_dim)
    slots = _decode_call(call, choice, rows, parts)
    groups = replace(  # to the merge, whose splits they are: each is a page of one slot
        slots,
        kv=replace(call.kv, page_size=1),
        tables=replace(slots.tables, counts=_for_parts(call.tables.counts[rows], parts) * (S // SKETCH_GROUP)),
        plan=replace(call.plan, blocks=MEAN_BLOCKS),
    )
    J, G, max_slots = len(looks.tiles), slots.tables.pages.shape[1], choice.chosen.shape[-1]
    R = call.q.shape[1] // G
    num_splits = slots.plan.blocks.max_splits(max_slots)
    mean_splits = MEAN_BLOCKS.max_splits(max_slots // SKETCH_GROUP)
    tiles = TileList(looks.tiles_by_index, pad_rows(R), num_splits, R)
    num_rows = J * G * (num_splits + mean_splits) * R
    split_max, split_sum = torch.empty(2, num_rows, device=device)
    split_out = torch.empty(num_rows, call.kv.v_dim, device=device)
    splits = {"split_max": split_max, "split_sum": split_sum, "split_out": split_out}
    sizes = {"width": R, "num_splits": num_splits + mean_splits}
    launch_decode(slots, tiles, splits | sizes)
    look_kernels.attend_to_means[(J, G, mean_splits)](
        **splits, **sizes, first_split=num_splits, sketches=sketches.numbers, **table_args(call.tables),
        tiles=looks.tiles, scores=choice.scores, ranks=choice.ranks, thresholds=choice.thresholds, max_slots=max_slots,
        G=G, R=R, PARTS=parts, M=pad_rows(R), S=S, **value_args(call), **MEAN_BLOCKS.constants, **sketches.constants,
        **dot_args(call.kv), num_warps=4,
    )  # fmt: skip
    launch_merge([slots, groups], tiles, o, splits | sizes)


def count_parts(R: int, D: int) -> int:
    """Return into how many parts the R query heads of a kv head are divided, so that tiles of them are small enough."""
    return next(n for n in range(1, R + 1) if R % n == 0 and R // n <= max_decode_rows(D))


def _for_parts(x: Tensor, parts: int) -> Tensor:
    """Return what is of kv heads [J, G, ...] for each part of these."""
    return x.repeat_interleave(parts, 1) if parts > 1 else x


def _decode_call(call: AttentionCall, choice: _Choice, rows: Tensor, parts: int) -> AttentionCall:
    """Return the call for tables of chosen slots, each a page of its own; slots with scales are copied to pages.

    Each part of the query heads of a kv head has its table.
    """
    kv, chosen, num_chosen = call.kv, choice.chosen, choice.num_chosen
    if _has_plain_slots(kv):
        k, v = kv.k.view(-1, 1, kv.k_dim), kv.v.view(-1, 1, kv.v_dim)
        pages = replace(kv, k=k, v=v, pos=kv.pos.view(-1, 1), page_size=1)
    else:
        pages, chosen, num_chosen = _gather(kv, chosen, num_chosen)
    tables = Tables(
        pages=_for_parts(chosen, parts),
        counts=_for_parts(num_chosen, parts),
        windows=call.tables.windows[rows],
        rows=call.tables.rows,
        query_start_loc=call.tables.query_start_loc,
    )
    plan = replace(call.plan, blocks=decode_blocks(kv), mass_buffers=None)
    return replace(call, kv=pages, tables=tables, plan=plan)


def _has_plain_slots(kv: KV) -> bool:
    """Return whether slot after slot of a pool lies as far behind the one before, also across pages."""
    widths = (kv.k, kv.k_dim), (kv.v, kv.v_dim)
    return kv.dtype not in QUANTIZED_DTYPES and all(x.stride(0) == kv.page_size * dim for x, dim in widths)


def _gather(kv: KV, chosen: Tensor, num_chosen: Tensor) -> tuple[KV, Tensor, Tensor]:
    """Return pages with copies of chosen slots, the tables [J, G, n] of these, and how many pages each has."""
    J, G, max_slots = chosen.shape
    S = kv.page_size
    n = max_slots // S
    format = PageFormat(S, kv.dtype, kv.k_dim, kv.v_dim)
    k, v = (torch.empty(1 + J * G * n, size, dtype=torch.uint8, device=kv.device) for size in format.bytes)
    to = view_pool((k, v), format)
    pages, to_pages = page_args(kv), page_args(to)
    for name, x, to_x, dim in (("k", pages.k, to_pages.k, kv.k_dim), ("v", pages.v, to_pages.v, kv.v_dim)):
        _, scales = slots_of(kv, getattr(kv, name))
        num_scales = 0 if scales is None else scales[0, 0].numel()
        width = dim // 2 if num_scales and getattr(kv, name).dtype == torch.uint8 else dim
        look_kernels.gather_slots[(J, G, triton.cdiv(max_slots, GATHERED_SLOTS))](
            x=x, to=to_x, pos=kv.pos, to_pos=to.pos, chosen=chosen, num_chosen=num_chosen, max_slots=max_slots,
            scales=pages.scales[f"{name}_scales"], to_scales=to_pages.scales[f"{name}_scales"], G=G, S=S,
            W=width, WP=pad_width(width), PAGE=x.stride(0), TO_PAGE=to_x.stride(0), SCALES=num_scales,
            SCALE_ROWS=triton.next_power_of_2(max(num_scales, 1)), FIRST_SCALE=S * width // 2, N=GATHERED_SLOTS,
            num_warps=4,
        )  # fmt: skip
    width = triton.cdiv(n, 16) * 16  # strides of other widths would be variants of kernels
    places = torch.arange(width, dtype=torch.int32, device=kv.device)
    heads = torch.arange(J * G, dtype=torch.int32, device=kv.device).view(J, G, 1)
    return to, 1 + heads * n + places, (num_chosen + S - 1) // S
