"""The launches of attention kernels, and the arguments that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from retain.kernels.api import KV, Tables
from retain.kernels.attention_params import AttentionParams
from retain.kernels.slots.pool_dtypes import FP8, QUANTIZED_DTYPES
from retain.kernels.triton import decode_kernels, mass_kernels, merge_kernels, prefill_kernels, prefill_mass_kernels
from retain.kernels.triton.kernel_args import KernelArgs, array_args, query_args, table_args, visibility_args
from retain.kernels.triton.noise import PLAIN
from retain.kernels.triton.page_layout import page_args
from retain.kernels.triton.plan import AttentionPlan, MassBuffers, TileList
from retain.kernels.triton.prefill_plan import PrefillScoring, attention_block, count_noise_columns, mass_block

TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
LOG2E = 1.4426950408889634
MAX_SPLITS_PER_PROGRAM = 4  # so that the longest table of a step does not keep one program busy for long
ENOUGH_PROGRAMS = 2048  # three times what an H200 computes at once
MASS_HEADS = 4  # query heads whose weights of prompts are added at once, at most
MASS_SLOTS = 1024  # slots of a program that adds stored weights to masses


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one layer's attention."""

    q: Tensor
    kv: KV
    tables: Tables
    plan: AttentionPlan
    q_pos: Tensor
    params: AttentionParams
    layer: int

    @property
    def changes_scores(self) -> bool:
        """Return whether noise or a temperature changes the scores that become masses."""
        buffers = self.plan.mass_buffers
        return buffers is not None and buffers.noise_mode != PLAIN.value


def launch_decode(call: AttentionCall, tiles: TileList, splits: KernelArgs) -> None:
    """Compute the splits of decode tiles over the tables of a call; `splits` have `num_splits` for each tile."""
    q, kv, tables, plan, params = call.q, call.kv, call.tables, call.plan, call.params
    buffers, pages = plan.mass_buffers, page_args(kv)
    shape = shape_args(call) | plan.blocks.constants
    J, G = len(tiles.data), shape["G"]
    decode_kernels.attention_decode[(J, G, programs_per_tile(J * G, tiles.num_splits))](
        **query_args(q), **splits, **pages.pairs, **pages.scales, **pages.words, pos=kv.pos, **table_args(tables),
        **visibility_args(tables), tiles=tiles.data, q_pos=call.q_pos, **score_args(params, q),
        **_scoring_args(call), **_stored_weight_args(call),
        M=tiles.rows_per_tile, DENSE=tables.dense is not None, UPDATE_MASS=buffers is not None, **shape,
        NOISE=buffers.noise_mode if buffers else 0, ONE_TOKEN=tiles.max_rows == shape["R"], **_decode_dot_args(kv),
        **key_args(call), **value_args(call), **pages.constants, **pages.halves, **decode_options(call, tiles),
    )  # fmt: skip


def programs_per_tile(num_tiles: int, num_splits: int) -> int:
    """Return how many programs share the splits of each of so many tiles and kv heads.

    Up to ENOUGH_PROGRAMS there is one for each split. Beyond, a program computes several splits in turn, and reads its
    tile and queries once.
    """
    fewest = -(-num_splits // MAX_SPLITS_PER_PROGRAM)
    return max(fewest, min(num_splits, -(-ENOUGH_PROGRAMS // num_tiles)))


def decode_options(call: AttentionCall, tiles: TileList) -> dict[str, int]:
    """Return how a launch of decode tiles is compiled: for speed, chosen by counting instructions (docs/log/gpu.md).

    Fewer warps execute fewer instructions for a block of slots. Fewer registers for a thread let more programs run side
    by side, which hide loads: 6 of 2 warps, 3 of 4 with 168 registers, 4 of 4 with 128.
    """
    kv, rows, D = call.kv, tiles.rows_per_tile, max(call.kv.k_dim, call.kv.v_dim)
    options = {"num_stages": 3 if D <= 256 else 1}
    if kv.dtype == torch.float32:
        return options | {"num_warps": 8 if D > 128 or rows > 8 else 4}
    if rows > 16 or D > 256:
        return options | {"num_warps": 8 if D > 128 else 4}
    if kv.dtype in QUANTIZED_DTYPES:
        limit = {"maxnreg": 168} if rows <= 8 else {}
        return options | limit | {"num_warps": 4 if D > 128 else 2}
    return options | {"num_warps": 4, "maxnreg": 168 if D > 128 or rows > 8 else 128}


def launch_prefill(call: AttentionCall, tiles: TileList, o: Tensor, log_sums: Tensor, part: int) -> None:
    """Compute prefill tiles over the tables of a call. `log_sums` [T, H] go from the first part to the second."""
    q, kv, tables, plan, params = call.q, call.kv, call.tables, call.plan, call.params
    scoring = tiles.scoring if plan.mass_buffers else None
    lse, log_weights = (plan.mass_buffers.lse, scoring.log_weights) if scoring and plan.mass_buffers else (q, q)
    pages, block = page_args(kv), attention_block(q.shape[-1], kv)
    prefill_kernels.attention_prefill[(tables.pages.shape[1], len(tiles.data))](
        **query_args(q), o=o, log_sums=log_sums, k=pages.k, v=pages.v, **pages.scales, pos=kv.pos,
        **table_args(tables), **visibility_args(tables), tiles=tiles.data, q_pos=call.q_pos, **score_args(params, q),
        sinks=q if params.sink_logits is None else params.sink_logits, **_scoring_args(call), lse=lse,
        log_weights=log_weights, T=len(q),
        M=tiles.rows_per_tile, PART=part, DENSE=tables.dense is not None, SINKS=params.sink_logits is not None,
        UPDATE_MASS=scoring is not None, **_change_args(call, tiles, scoring), **dot_args(kv),
        **shape_args(call) | {"N": block.slots}, **key_args(call), **value_args(call), **pages.constants,
        num_warps=block.num_warps, num_stages=block.num_stages,
    )  # fmt: skip


def launch_merge(calls: Sequence[AttentionCall], tiles: TileList, o: Tensor, splits: KernelArgs) -> None:
    """Combine the splits of decode tiles into their outputs."""
    call, demoted, buffers, sinks = calls[0], calls[-1], calls[0].plan.mass_buffers, calls[0].params.sink_logits
    s = buffers.scoring if buffers else None
    rows = tiles.rows_per_tile if triton.knobs.runtime.interpret else 1
    has_demoted = len(calls) > 1
    # Where the kernel does not read a tensor, o stands in.
    merge_kernels.merge_splits[(len(tiles.data), call.tables.pages.shape[1], -(-tiles.max_rows // rows))](
        o=o, **splits, first_demoted=tiles.num_splits, tiles=tiles.data,
        **array_args(call.tables.counts, "counts", "count_row", "count_head"),
        **array_args(demoted.tables.counts, "demoted_counts", "demoted_row", "demoted_head"),
        lse=buffers.lse if buffers else o, sinks=o if sinks is None else sinks, temperature=s.temperature if s else o,
        noise=s.noise if s else o,
        ROWS=rows, SINKS=sinks is not None, UPDATE_MASS=buffers is not None, NOISE=buffers.noise_mode if buffers else 0,
        DEMOTED_S=demoted.kv.page_size if has_demoted else 0, DEMOTED_N=demoted.plan.blocks.n,
        DEMOTED_MIN_BLOCKS=demoted.plan.blocks.min_blocks, **shape_args(call), **call.plan.blocks.constants,
        **value_args(call), num_warps=max(pad_width(call.kv.v_dim) // 128, 1),
    )  # fmt: skip


def launch_mass(call: AttentionCall, buffers: MassBuffers) -> None:
    """Add what tokens leave on the slots that they attend to."""
    kv, tables, plan, s = call.kv, call.tables, call.plan, buffers.scoring
    shape, C = shape_args(call), kv.mass.shape[1]
    G, n = shape["G"], plan.blocks.n
    num_blocks, blocks_at_once = buffers.block_max.shape[-1], max(MASS_SLOTS // n, 1)
    for tiles in plan.decode:
        mass_kernels.accumulate_mass[(len(tiles.data), G, -(-num_blocks // blocks_at_once))](
            mass=kv.mass, **table_args(tables), **array_args(tables.windows, "windows", "window_row"),
            tiles=tiles.data, weights=s.weights, decay=s.decay, lse=buffers.lse, **_stored_weight_args(call), **shape,
            N=n, C=C, BLOCKS=blocks_at_once,
        )  # fmt: skip
    for scoring in plan.prefill_scoring:
        _launch_prefill_mass(call, scoring)


def _launch_prefill_mass(call: AttentionCall, scoring: PrefillScoring) -> None:
    """Add what the scored tokens of prefill tiles leave on the slots of the tables of a call."""
    q, kv, tables, pages, shape = call.q, call.kv, call.tables, page_args(call.kv), shape_args(call)
    block = mass_block(q.shape[-1], shape["R"], kv)
    num_blocks = -(-max(call.plan.max_pages, 1) * kv.page_size // block.slots)
    heads = min(shape["R"] & -shape["R"], MASS_HEADS)
    assert call.plan.mass_buffers
    prefill_mass_kernels.recompute_mass[(len(scoring.tiles), shape["G"], num_blocks)](
        **query_args(q), k=pages.k, k_scales=pages.scales["k_scales"], pos=kv.pos, mass=kv.mass, **table_args(tables),
        **visibility_args(tables), tiles=scoring.tiles, q_pos=call.q_pos, **score_args(call.params, q),
        **_scoring_args(call), decay=call.plan.mass_buffers.scoring.decay, log_weights=scoring.log_weights, T=len(q),
        TT=block.rows // heads, HEADS=heads, C=kv.mass.shape[1], DENSE=tables.dense is not None,
        PERIOD=scoring.noise_period, **scoring.constants, **dot_args(kv), **shape | {"N": block.slots},
        **key_args(call), **pages.constants,
        num_warps=block.num_warps, num_stages=block.num_stages,
    )  # fmt: skip


def _scoring_args(call: AttentionCall) -> KernelArgs:
    """Return the layer, and the scoring on the device; where the kernels read no masses, q stands in for pointers."""
    names = "weights", "temperature", "noise", "seed", "noise_period"
    buffers = call.plan.mass_buffers
    return {name: getattr(buffers.scoring, name) if buffers else call.q for name in names} | {"layer": call.layer}


def _stored_weight_args(call: AttentionCall) -> KernelArgs:
    """Return the stored weights, and their sizes; where the kernels read no masses, q stands in for pointers."""
    buffers = call.plan.mass_buffers
    split_weights, block_max = (buffers.split_weights, buffers.block_max) if buffers else (call.q, call.q)
    sizes = {"max_slots": split_weights.shape[-1], "num_blocks": block_max.shape[-1]}
    return {"split_weights": split_weights, "block_max": block_max, **sizes}


def _change_args(call: AttentionCall, tiles: TileList, scoring: PrefillScoring | None) -> dict[str, object]:
    """Return the constants that say how scoring changes a softmax. Noise may be too large for products in float16."""
    is_exact = call.kv.dtype == torch.float32 or triton.knobs.runtime.interpret
    noise_dot = {"NOISE_DOT": tl.float32 if is_exact else tl.bfloat16}
    if scoring is None:
        unchanged = {"CHANGE": prefill_kernels.UNCHANGED.value, "NOISE": 0, "REDRAW": False, "NOISE_COLUMNS": 0}
        return noise_dot | unchanged
    columns = count_noise_columns(scoring, shape_args(call)["R"], tiles.rows_per_tile, call.kv.device)
    return noise_dot | scoring.constants | {"REDRAW": scoring.noise_period > 0, "NOISE_COLUMNS": columns}


def score_args(p: AttentionParams, q: Tensor) -> KernelArgs:
    """Return ALiBi's slopes, the factor on q.k, and the softcap; where a kernel reads no slopes, q stands in."""
    capped, biased = p.softcap is not None, p.alibi_slopes is not None
    args = {"factor": p.scale * (1.0 if capped else LOG2E), "softcap": p.softcap or 0.0, "SOFTCAP": capped}
    return {"slopes": p.alibi_slopes if biased else q, "ALIBI": biased, **args}


def shape_args(call: AttentionCall) -> dict[str, int]:
    """Return the constants of most kernels: kv heads, query heads of each, slots of a page."""
    G = call.tables.pages.shape[1]
    return {"G": G, "R": call.q.shape[1] // G, "S": call.kv.page_size}


def key_args(call: AttentionCall) -> dict[str, int]:
    """Return the numbers of a key, and their padded width."""
    return {"D": call.kv.k_dim, "DP": pad_width(call.kv.k_dim)}


def value_args(call: AttentionCall) -> dict[str, int]:
    """Return the numbers of a value, and their padded width."""
    return {"V": call.kv.v_dim, "VP": pad_width(call.kv.v_dim)}


@cache  # Triton's functions of numbers take some us
def pad_width(width: int) -> int:
    """Return the width of rows in kernels: a power of 2, and at least two times the 16 that tensor cores need.

    Rows of 8 or 4 bits are two parts, each with products of its own.
    """
    return max(int(triton.next_power_of_2(width)), 32)


def dot_args(kv: KV) -> dict[str, object]:
    """Return the dtype and precision of products: the pool's, exact for float32. The interpreter has no bfloat16.

    bfloat16 holds every integer of 8 bits. Numbers of 4 bits times their scales are rounded to it.
    """
    dtype = torch.bfloat16 if kv.dtype in QUANTIZED_DTYPES else kv.dtype
    exact = dtype == torch.float32 or (dtype == torch.bfloat16 and triton.knobs.runtime.interpret)
    return {"DOT": tl.float32 if exact else TRITON_DTYPES[dtype], "PRECISION": "ieee" if exact else "tf32"}


def _decode_dot_args(kv: KV) -> dict[str, object]:
    """Return the dtypes of the products with K and with V, and their precision.

    float16 holds every number of 8 bits; an integer becomes one with fewer instructions than bfloat16. K of int8 is not
    converted.
    """
    args = dot_args(kv)
    exact = args["DOT"] == tl.float32
    k, v = (args["DOT"] if exact or x.dtype not in (torch.int8, FP8) else tl.float16 for x in (kv.k, kv.v))
    return {"K_DOT": k, "V_DOT": v, "PRECISION": args["PRECISION"]}
