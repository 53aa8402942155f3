"""Decode attention on a GPU: how numbers are unpacked, queries become integers, and programs share the splits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.attention_case import AttentionCase
from tests.helpers.device_adapter import triton_backend
from tests.helpers.ptx import floats, run_asm
from tests.kernels.test_attention_mass import SCORING_KINDS

backend = triton_backend()
pytestmark = pytest.mark.skipif(backend.unavailable_reason() is not None, reason=str(backend.unavailable_reason()))
if not backend.unavailable_reason():
    import triton
    import triton.language as tl

    from retain.kernels.triton import attention, quantized_loads
    from retain.kernels.triton.attention import SPLITS_OF_PROGRAM, split_programs
    from retain.kernels.triton.decode_kernels import to_int16

    @triton.jit
    def convert(x, high, low, unit, D: tl.constexpr, M: tl.constexpr):  # type: ignore[no-untyped-def]
        """Store what to_int16 returns for x [D, M]."""
        at = tl.arange(0, D)[:, None] * M + tl.arange(0, M)[None, :]
        a, b, c = to_int16(tl.load(x + at))
        tl.store(high + at, a)
        tl.store(low + at, b)
        tl.store(unit + tl.arange(0, M), c)


DEVICE = "cpu" if backend.is_interpreted() else "cuda"
BYTES = [[(first + 37 * i) % 256 for i in range(4)] for first in range(256)]  # each is at each place once


def as_numbers(values: list[int], dtype: torch.dtype) -> list[float]:
    return torch.tensor(values, dtype=torch.uint8).view(dtype).float().tolist()


@pytest.mark.parametrize(("name", "dtype"), [("INT8", torch.int8), ("FP8", torch.float8_e4m3fn)])
def test_asm_takes_the_even_and_the_odd_numbers_out_of_pairs(name: str, dtype: torch.dtype) -> None:
    for values in BYTES:
        register = sum(x << 8 * i for i, x in enumerate(values))
        for which, start in (("EVEN", 0), ("ODD", 1)):
            (found,) = run_asm(getattr(quantized_loads, f"_{which}_{name}_TO_FLOAT16").value, register)
            assert str(floats(found, torch.float16)) == str(as_numbers(values, dtype)[start::2])  # NaN equals itself


def test_asm_converts_every_byte_of_a_float_of_8_bits() -> None:
    for values in BYTES:
        found = run_asm(quantized_loads._FP8_TO_FLOAT16.value, sum(x << 8 * i for i, x in enumerate(values)))
        numbers = [x for register in found for x in floats(register, torch.float16)]
        assert str(numbers) == str(as_numbers(values, torch.float8_e4m3fn))


def test_asm_multiplies_every_nibble_by_its_scale() -> None:
    scales = [int(torch.tensor(x, dtype=torch.bfloat16).view(torch.uint16)) for x in (0.5, 2.0, -1.0, 4.0)]
    registers = scales[0] | scales[1] << 16, scales[2] | scales[3] << 16
    for values in BYTES:
        word = sum(x << 8 * i for i, x in enumerate(values))
        found = run_asm(quantized_loads._NIBBLES_TO_BFLOAT16.value, word, *registers)
        numbers = [x for register in found for x in floats(register, torch.bfloat16)]
        nibbles = [x & 15 for x in values] + [x >> 4 for x in values]
        assert numbers == [(n - 8) * s for n, s in zip(nibbles, 2 * [0.5, 2.0, -1.0, 4.0], strict=True)]


def test_queries_are_integers_of_16_bits_times_their_unit() -> None:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-8, 8)
    x[:, 3] = 0
    x[7, 5], x[7, 6] = float("inf"), float("nan")
    high, low = (torch.empty(x.shape, dtype=torch.int8, device=DEVICE) for _ in range(2))
    unit = torch.empty(16, device=DEVICE)
    convert[(1,)](x.to(DEVICE), high, low, unit, D=64, M=16)
    integers = 256 * high.cpu().int() + low.cpu()
    is_finite = x.isfinite().all(0)
    assert unit.isfinite().cpu().equal(is_finite)
    x, integers, unit = x[:, is_finite], integers[:, is_finite], unit.cpu()[is_finite]
    assert ((integers * unit - x).abs() <= unit * 0.501).all()
    assert integers.abs().amax(0).equal(torch.where(x.any(0), 127 * 256, 0).int())


@given(st.integers(1, 10**5), st.integers(1, 64), st.data())
def test_a_program_has_few_splits_and_a_table_has_all(tables: int, most: int, data: st.DataObject) -> None:
    programs, splits = split_programs(tables, most), data.draw(st.integers(1, most))
    per_program = -(-splits // programs)
    assert 1 <= programs <= most
    assert per_program <= SPLITS_OF_PROGRAM
    assert programs * per_program >= splits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.uint8])
@pytest.mark.parametrize("scored", [False, True])
def test_splits_in_one_program_have_the_bits_of_splits_in_many(
    dtype: torch.dtype, scored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a program has several splits follows from the other requests of a step."""
    case = AttentionCase(fresh=(1, 2), pages=((40, 17), (3, 9)), D=32, R=2, dtype=dtype, shared_pages=False)
    scoring = case.build_scoring(*SCORING_KINDS["keyformer"]) if scored else None
    results = []
    for enough in (1, 10**6):
        monkeypatch.setattr(attention, "ENOUGH_PROGRAMS", enough)
        kv = case.build_cache(backend)
        results.append((case.attend(backend, kv, scoring), kv.mass))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("name", ["k_dim", "v_dim"])
def test_pairs_of_8_bits_need_even_rows(name: str) -> None:
    with pytest.raises(ValueError, match=f"an even {name} .* in int8, not 15"):
        backend.allocate(2, 16, dtype=torch.int8, **{"k_dim": 16, "v_dim": 16} | {name: 15})
