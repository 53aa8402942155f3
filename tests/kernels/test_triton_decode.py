"""Decode attention on a GPU: how numbers are unpacked, queries become integers, and programs share the splits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.attention_case import AttentionCase
from tests.helpers.device_adapter import triton_backend
from tests.helpers.ptx import assert_numbers, register_of, run_asm
from tests.kernels.test_attention_mass import SCORING_KINDS

backend = triton_backend()
pytestmark = pytest.mark.skipif(backend.unavailable_reason() is not None, reason=str(backend.unavailable_reason()))
if not backend.unavailable_reason():
    import triton
    import triton.language as tl

    from retain.kernels.triton import launches, quantized_loads
    from retain.kernels.triton.decode_kernels import quantize_queries
    from retain.kernels.triton.launches import ENOUGH_PROGRAMS, MAX_SPLITS_PER_PROGRAM, programs_per_tile
    from retain.kernels.triton.quantized_loads import locate_block, slot_offsets, word_offsets

    @triton.jit
    def quantize(x, high, low, scale, D: tl.constexpr, M: tl.constexpr):  # type: ignore[no-untyped-def]
        """Store what quantize_queries returns for x [D, M]."""
        at = tl.arange(0, D)[:, None] * M + tl.arange(0, M)[None, :]
        a, b, c = quantize_queries(tl.load(x + at))
        tl.store(high + at, a)
        tl.store(low + at, b)
        tl.store(scale + tl.arange(0, M), c)

    @triton.jit
    def locate(  # type: ignore[no-untyped-def]
        table, offsets, words, count, S: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr
    ):
        """Store the offsets of the slots of one block for each program."""
        i, n = tl.program_id(0), tl.arange(0, N)
        location = locate_block(table, i, n, count - 1, S, N)
        tl.store(offsets + i * N + n, slot_offsets(location, n, S, N, PAGE, WIDTH))
        tl.store(words + i * N + n, word_offsets(location, n, S, N, PAGE // 4))


DEVICE = "cpu" if backend.is_interpreted() else "cuda"
BYTES = (torch.arange(256)[:, None] + 37 * torch.arange(4)) % 256  # [256, 4]: each byte is at each place once
WORDS = (BYTES << 8 * torch.arange(4)).sum(1)


def as_numbers(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(torch.uint8).view(dtype).float()


@pytest.mark.parametrize("S", [16, 32, 48, 64, 80, 128, 160, 224])
@pytest.mark.parametrize("N", [16, 32, 64])
def test_blocks_find_every_slot_of_a_table(S: int, N: int) -> None:
    count, PAGE, WIDTH = 7, 32 * S, 16
    table = torch.randperm(100, generator=torch.Generator().manual_seed(S))[:count].int()
    blocks = -(-count * S // N)
    offsets, words = (torch.zeros(blocks * N, dtype=torch.int64, device=DEVICE) for _ in range(2))
    locate[(blocks,)](table.to(DEVICE), offsets, words, count, S=S, N=N, PAGE=PAGE, WIDTH=WIDTH)
    slot = torch.arange(count * S)
    page, place = table[slot // S].long(), slot % S
    assert torch.equal(offsets.cpu()[: count * S], page * PAGE + place * WIDTH)
    assert torch.equal(words.cpu()[: count * S], page * (PAGE // 4) + place // 2)


@pytest.mark.parametrize(("name", "dtype"), [("INT8", torch.int8), ("FP8", torch.float8_e4m3fn)])
def test_asm_takes_the_low_and_the_high_bytes_out_of_pairs(name: str, dtype: torch.dtype) -> None:
    for which, start in (("LOW", 0), ("HIGH", 1)):
        (found,) = run_asm(getattr(quantized_loads, f"_{which}_{name}_TO_FLOAT16").value, WORDS)
        assert_numbers(found, torch.float16, as_numbers(BYTES[:, start::2], dtype))


def test_asm_converts_every_byte_of_a_float_of_8_bits() -> None:
    found = run_asm(quantized_loads._FP8_TO_FLOAT16.value, WORDS)
    for i, register in enumerate(found):
        assert_numbers(register, torch.float16, as_numbers(BYTES[:, 2 * i : 2 * i + 2], torch.float8_e4m3fn))


def test_asm_multiplies_every_nibble_by_its_scale() -> None:
    scales = torch.tensor([[0.5, 2.0], [-1.0, 4.0]])
    found = run_asm(quantized_loads._NIBBLES_TO_BFLOAT16.value, WORDS, *register_of(scales.bfloat16()))
    nibbles = torch.cat((BYTES & 15, BYTES >> 4), 1)
    for i, register in enumerate(found):
        assert_numbers(register, torch.bfloat16, (nibbles[:, 2 * i : 2 * i + 2] - 8) * scales[i % 2])


def test_queries_are_integers_of_16_bits_times_their_scale() -> None:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-8, 8)
    x[:, 3] = 0
    x[7, 5], x[7, 6] = float("inf"), float("nan")
    high, low = (torch.empty(x.shape, dtype=torch.int8, device=DEVICE) for _ in range(2))
    scale = torch.empty(16, device=DEVICE)
    quantize[(1,)](x.to(DEVICE), high, low, scale, D=64, M=16)
    integers = 256 * high.cpu().int() + low.cpu()
    is_finite = x.isfinite().all(0)
    assert scale.isfinite().cpu().equal(is_finite)
    x, integers, scale = x[:, is_finite], integers[:, is_finite], scale.cpu()[is_finite]
    assert ((integers * scale - x).abs() <= scale * 0.501).all()
    assert integers.abs().amax(0).equal(torch.where(x.any(0), 127 * 256, 0).int())


@given(st.integers(1, 10**5), st.integers(1, 64))
def test_splits_share_a_program_only_where_programs_are_many(num_tiles: int, num_splits: int) -> None:
    programs = programs_per_tile(num_tiles, num_splits)
    assert 1 <= programs <= num_splits <= programs * MAX_SPLITS_PER_PROGRAM
    assert programs == num_splits or num_tiles * programs >= ENOUGH_PROGRAMS


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.uint8, torch.int4, torch.float8_e4m3fn])
@pytest.mark.parametrize("scored", [False, True])
def test_splits_in_one_program_have_the_bits_of_splits_in_many(
    dtype: torch.dtype, scored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a program has several splits follows from the other requests of a step."""
    case = AttentionCase(fresh=(1, 2), pages=((40, 17), (3, 9)), D=32, R=2, dtype=dtype, shared_pages=False)
    scoring = case.build_scoring(*SCORING_KINDS["keyformer"]) if scored else None
    results = []
    for enough in (1, 10**6):
        monkeypatch.setattr(launches, "ENOUGH_PROGRAMS", enough)
        kv = case.build_cache(backend)
        results.append((case.attend(backend, kv, scoring), kv.mass))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("name", ["k_dim", "v_dim"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int4, torch.float8_e4m3fn])
def test_quantized_pools_refuse_odd_head_dims(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"an even {name} .*, not 15"):
        backend.allocate(2, 16, dtype=dtype, **{"k_dim": 16, "v_dim": 16} | {name: 15})
