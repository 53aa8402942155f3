"""Launches of every kernel in all its variants, for the compiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from retain.kernels import ops
from retain.kernels.ops import Buffer
from tools.gpu_bench.cases import BF16, FP8, INT4, demoted_pages, keyformer_scoring, make_inputs

# D, R, dtype, fresh tokens of each request, with masses, ALiBi instead of rope, with demoted tokens
LAUNCH_CASES: list[tuple[int, int, torch.dtype, tuple[int, ...], bool, bool, bool]] = [
    (128, 4, BF16, (1, 1), True, False, False),
    (128, 4, BF16, (200, 1), False, False, False),
    (64, 3, torch.uint8, (1, 200), False, False, False),
    (64, 3, BF16, (1, 200), True, False, True),
    (64, 3, FP8, (1, 200), True, False, False),
    (64, 4, BF16, (1, 8), False, False, False),
    (128, 4, torch.int8, (200, 9), False, False, True),
    (256, 4, BF16, (1, 200), True, True, True),
    (128, 1, BF16, (1, 200), True, True, False),
    (128, 4, BF16, (200, 9), True, False, False),
    (256, 4, BF16, (200, 9), False, False, False),
    (64, 3, torch.float32, (200, 9), True, False, False),
    (80, 1, torch.float16, (200, 9), False, False, False),
    (64, 3, torch.uint8, (1, 200), True, False, False),
    (64, 3, torch.int8, (1, 2), True, False, False),
    (128, 2, torch.int8, (200, 9), True, True, False),
    (64, 3, INT4, (1, 200), True, False, False),
    (128, 4, INT4, (200, 9), False, True, False),
    (128, 4, FP8, (200, 9), False, True, True),
    (576, 16, BF16, (1, 9), True, False, False),
]
# D, R, dtype, slots of a page
LOOK_CASES: list[tuple[int, int, torch.dtype, int]] = [
    (128, 4, BF16, 64),
    (128, 4, torch.int8, 128),
    (64, 3, INT4, 224),
    (64, 3, FP8, 128),
    (128, 8, torch.uint8, 160),
    (80, 1, torch.float32, 64),
    (576, 128, BF16, 64),
]
VALUE_SIZES = {576: 512}  # where a value is not as large as a key


def launch_kernels(
    D: int,
    R: int,
    dtype: torch.dtype,
    fresh: tuple[int, ...],
    with_masses: bool,
    alibi: bool,
    demotes: bool,
    quick: bool,
) -> None:
    """Launch a step of two kv heads, and every other kernel of the backend.

    With demoted tokens it attends with a softcap and sink logits, too: `quick` with nothing else. A program attends
    without masses, so `quick` has none where other cases have that attention.
    """
    from retain.kernels import triton
    from retain.kernels.api import DemotedTables, EvictionLists, Tables
    from retain.kernels.attention_params import AttentionParams
    from retain.kernels.rope import Rope
    from retain.kernels.triton import fresh_tokens

    G, B, T, n = 2, len(fresh), sum(fresh), 40
    kv = triton.allocate(1 + B * G * n, 64, D, dtype, v_dim=VALUE_SIZES.get(D))
    ones = torch.ones(B, dtype=torch.int32)
    tables = Tables(
        pages=torch.arange(1, 1 + B * G * n, dtype=torch.int32).view(B, G, n),
        counts=torch.full((B, G), n, dtype=torch.int32),
        windows=ones * 2**30,
        rows=torch.arange(B, dtype=torch.int32),
        query_start_loc=torch.tensor([0, *fresh]).cumsum(0).int(),
        dense=ones,
        max_pages=n,
    )
    if demotes:
        tables = replace(tables, demoted=DemotedTables(demoted_pages(kv), tables.pages, tables.counts, n))
    q_dtype = BF16 if dtype in (torch.int8, torch.uint8, INT4, FP8) else dtype
    q, pos, slots = torch.ones(T, G * R, D, dtype=q_dtype), torch.ones(T).int(), torch.ones(G, T, dtype=torch.int32)
    slopes = torch.ones(G * R) if alibi else None
    scoring = keyformer_scoring(T, B) if with_masses else None
    if not (quick and demotes):
        triton.attend(q, kv, tables, pos, AttentionParams(0.1, alibi_slopes=slopes), scoring=scoring, layer=1)
    if demotes:
        capped = AttentionParams(0.1, slopes, softcap=30.0, sink_logits=torch.ones(G * R))
        triton.attend(q, kv, tables, pos, capped, scoring=scoring, layer=1)
    rope = None if alibi else Rope(torch.ones(D // 2))
    fresh_tokens.write(kv, slots, q[:, :G], q[:, :G, : kv.v_dim], pos, rope)
    if rope:
        fresh_tokens.rotate_and_write(kv, slots, (q, q[:, :G], q[:, :G, : kv.v_dim]), pos, rope)
    triton.copy(kv, torch.tensor([1]), torch.tensor([2]))
    priority, lengths = torch.ones(3, 4096), torch.full((3,), 4096).int()
    triton.select_victims(priority, priority.int(), lengths, first_evictable=4, last_evictable=4000, n=16)
    used, one = torch.full((B, 1, G), n * 64, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    lists = EvictionLists(tables.pages[:, None], tables.rows, one, used, torch.ones(B, 2).int(), ones, n * 64)
    triton.punch(kv, lists, torch.zeros(B, 1, G, 16, dtype=torch.int32), 16)
    if not (quick and with_masses):
        launch_program(kv, tables, R, slopes, q_dtype)


def launch_llama_attention(quick: bool) -> None:
    """Launch attention of Llama's heads: a token over each pool in the engine's pages, and prompts with noise."""
    cpu = torch.device("cpu")
    for dtype in (BF16, torch.int8, torch.uint8, INT4, FP8):
        make_inputs((8, 2, 128), 512, 2, dtype, cpu).attend()()
    for heads in (8,) if quick else (8, 2):  # 4 query heads share a kv head, or none
        for period in (1, 16, 64, 0):
            inputs = make_inputs((heads, 2, 128), 512, 1, BF16, cpu, tokens=512, holes=0)
            inputs.attend(keyformer_scoring(512, 1, temperature=1.0, noise_period=period))()


def launch_program(kv: Any, tables: Any, R: int, slopes: Any, dtype: torch.dtype) -> None:
    """Launch the kernels of a program of one layer."""
    from retain.kernels.api import GroupInputs
    from retain.kernels.attention_params import AttentionParams
    from retain.kernels.experts import Experts, Router
    from retain.kernels.rope import Rope
    from retain.kernels.triton import forward
    from retain.kernels.triton.plan import plan_attention

    D, G, T = kv.k_dim, tables.pages.shape[1], int(tables.query_start_loc[-1])
    p = forward.TritonProgram(dtype, torch.device("cpu"))
    x, y, scores = Buffer("x", 4096), Buffer("y", 2048), Buffer("scores", 8)
    experts = Experts(8, torch.ones(8 * 256, 2048), torch.ones(8 * 2048, 128), Router(2), "silu")
    qkv, out = Buffer("qkv", (R + 1) * G * D + G * kv.v_dim), Buffer("o", R * G * kv.v_dim)
    rope = Rope(torch.ones(D // 2)) if slopes is None else None
    operations = [
        ops.Norm(x, x, torch.ones(4096), None, 1e-5, subtract_mean=False),
        ops.Norm(x, x, torch.ones(4096), torch.ones(4096), 1e-5, subtract_mean=True),
        ops.Activate(x, y, "silu", gated=True),
        ops.Activate(y, y, "gelu_tanh"),
        ops.MixExperts(y, scores, y, experts),
        ops.Attend(qkv, out, 0, (R * G, G, D), AttentionParams(0.1, slopes, torch.zeros(G, D)), rope),
    ]
    p.load(operations)
    pos = torch.ones(T, dtype=torch.int32)
    step = forward.DeviceStep(
        groups=[GroupInputs(kv, as_single_layer(tables), torch.ones(1, G, T, dtype=torch.int32))],
        caches=[(0, 0)],
        plans=[plan_attention(tables, R, D, kv, None)],
        requests=pos,
        input_ids=pos,
        positions=pos,
        logits_indices=pos,
    )
    run_operations(p, step, [x, qkv, scores])


def run_operations(p: Any, step: Any, given: Sequence[Buffer]) -> None:
    """Run what a program has loaded, on given buffers of ones."""
    for buffer in given:
        step.buffers[p.operands.buffers[buffer]] = torch.ones(len(step.positions), buffer.width, dtype=p.dtype)
    for to, compute in p.computes:
        step.buffers[to] = compute(step)


# Numbers of a key and of a value, slots of a page, dtype of the rows
UpdateRuleName = Literal["delta", "mamba2"]
STATE_CASES: list[tuple[int, int, int, torch.dtype, UpdateRuleName]] = [
    (128, 128, 16, BF16, "delta"),
    (128, 64, 16, BF16, "mamba2"),
    (128, 128, 64, BF16, "delta"),
    (128, 128, 32, BF16, "delta"),
    (64, 48, 16, torch.float32, "delta"),
    (256, 256, 16, BF16, "delta"),
    (256, 64, 32, torch.float32, "mamba2"),
]


def launch_state_kernels(k_dim: int, v_dim: int, page_size: int, dtype: torch.dtype, rule_name: UpdateRuleName) -> None:
    """Launch the kernels of a convolution and of linear attention, for two key heads and four value heads."""
    from retain.kernels import triton
    from retain.kernels.api import GroupInputs, Tables
    from retain.kernels.linear_attention import GatedDeltaRule, LinearAttention, Mamba2Rule
    from retain.kernels.slots.kv_cache_spec import ConvolutionSpec, LinearStateSpec, LinearTokensSpec
    from retain.kernels.triton import forward

    T, H = 40, 4
    rule = Mamba2Rule(torch.ones(H)) if rule_name == "mamba2" else GatedDeltaRule()
    params = LinearAttention(2, H, k_dim, v_dim, -torch.ones(H), torch.ones(H), rule)
    width = params.qkv_width
    specs = (
        ConvolutionSpec(4, width // 8, width // 8, 4),
        LinearTokensSpec(H, k_dim, v_dim, page_size),
        LinearStateSpec(H, k_dim, v_dim, page_size),
    )
    groups = []
    for spec in specs:
        G = spec.num_kv_heads
        kv = triton.allocate(2, page_size, spec.k_dim, torch.float32, v_dim=spec.v_dim)
        pages, counts, windows = (torch.ones(shape, dtype=torch.int32) for shape in ((1, 1, G, 3), (1, 1, G), (1, 1)))
        tables = Tables(pages, counts, windows, torch.zeros(1).int(), torch.tensor([0, T]).int())
        groups.append(GroupInputs(kv, tables, torch.ones(1, G, T, dtype=torch.int32)))
    p = forward.TritonProgram(dtype, torch.device("cpu"))
    x, gates, out = Buffer("x", width), Buffer("gates", params.gates_width), Buffer("out", H * v_dim)
    p.load(
        [
            ops.Convolve(x, x, 0, torch.ones(width, 4), torch.ones(width)),
            ops.AttendLinearly(x, gates, out, (1, 2), params),
        ]
    )
    pos = torch.ones(T, dtype=torch.int32)
    step = forward.DeviceStep(
        groups=groups,
        caches=[(0, 0), (1, 0), (2, 0)],
        plans=[None, None, None],
        requests=torch.ones(1, 6, dtype=torch.int32),
        input_ids=pos,
        positions=pos,
        logits_indices=pos,
    )
    run_operations(p, step, [x, gates])


def launch_look_kernels(D: int, R: int, dtype: torch.dtype, page_size: int) -> None:
    """Launch a step of two kv heads whose token looks at few slots, by scores with sinks."""
    from retain.kernels import triton
    from retain.kernels.api import NO_WINDOW, Tables
    from retain.kernels.attention_params import AttentionParams
    from retain.kernels.slots.reinterpret import PageFormat

    G, n, v_dim = 2, 40, VALUE_SIZES.get(D, D)
    kv = triton.allocate(1 + G * n, page_size, D, dtype, v_dim=v_dim)
    kv = kv.with_sketches(PageFormat(page_size, dtype, D, v_dim, has_sketches=True).sketch_bytes)
    one = torch.ones(1, dtype=torch.int32)
    tables = Tables(
        pages=torch.arange(1, 1 + G * n, dtype=torch.int32).view(1, G, n),
        counts=torch.full((1, G), n, dtype=torch.int32),
        windows=one * NO_WINDOW,
        rows=one - 1,
        query_start_loc=torch.arange(2).int(),
        dense=one,
        max_pages=n,
        looks=one * 100,
    )
    q_dtype = torch.float32 if dtype == torch.float32 else BF16
    q = torch.ones(1, G * R, D, dtype=q_dtype)
    triton.write(kv, torch.ones(G, 1, dtype=torch.int32), q[:, :G], q[:, :G, :v_dim], one)
    triton.attend(q, kv, tables, one, AttentionParams(D**-0.5, sink_logits=torch.zeros(G * R)))


def as_single_layer(tables: Any) -> Any:
    """Return the tables of one layer as the tables of all layers."""
    d = tables.demoted and replace(tables.demoted, pages=tables.demoted.pages[None], counts=tables.demoted.counts[None])
    pages, counts, windows = tables.pages[None], tables.counts[None], tables.windows[None]
    return replace(tables, pages=pages, counts=counts, windows=windows, demoted=d)


def launch_step_kernels() -> None:
    """Launch the kernels that prepare a step: pending tokens, and slots of rings, of states and in holes."""
    from retain.kernels.slots.slot_rule import SlotRule
    from retain.kernels.triton.step_inputs import FreshTokens, insert_pending_tokens

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.int32)

    N, L, G, T = 4, 3, 2, 7
    insert_pending_tokens(ones(T).long(), ones(T), ones(N).long())
    fresh = FreshTokens(ones(T), ones(T), ones(T))
    for keeps_last in (False, True):
        for num_holes in (0, 5):
            holes = ones(N, L, G, num_holes)
            rule = SlotRule(ones(N, L, G, 9), ones(N, L), ones(N, L), ones(N, L), holes, ones(T), keeps_last)
            fresh.map_slots(rule, ones(T), 64, ones(L, G, T))
