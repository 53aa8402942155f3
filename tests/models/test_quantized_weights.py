"""Quantized matrices mean what kernels/weights/quantized.py says, and are as near to the dense ones as steps allow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from retain.kernels.weights.quantized import (
    IQ4,
    MXFP4,
    NVFP4,
    Int4,
    Int5,
    Int6,
    Int8,
    QuantizedWeight,
    is_quantizable,
    quantize_int4,
    quantize_int8,
)
from retain.kernels.weights.weight import (
    StackedWeight,
    Weight,
    concat_rows,
    dense_chunks,
    scale_rows,
    select_rows,
    stack_rows,
)

NUMBERS = st.floats(-60000, 60000, width=32) | st.floats(-(2**-10), 2**-10, width=32) | st.floats(5, 6, width=32)
SHAPES = st.tuples(st.integers(1, 3), st.sampled_from([32, 64, 96]))
MATRICES = arrays(np.float32, SHAPES, elements=NUMBERS).map(torch.from_numpy)


def random_matrix(out: int, into: int, seed: int = 0) -> Tensor:
    return torch.randn(out, into, generator=torch.Generator().manual_seed(seed))


def expand_groups(x: Tensor) -> Tensor:
    """Repeat one value a group for each of its numbers."""
    return x.float().repeat_interleave(32, 1)


def float16_rounding_error(x: Tensor) -> Tensor:
    """The largest error of rounding to these float16 numbers."""
    return (x.float().abs() * 2**-11).clamp(min=2**-25)


def is_nearest_quantization(x: Tensor, m: Int4 | Int8, lowest: int, highest: int) -> bool:
    """Whether no neighbouring q is nearer, given the rounded scale and shift."""
    error = (x - m.dequantize()).abs()
    others = [replace(m, q=(m.q.int() + by).clamp(lowest, highest).to(m.q.dtype)) for by in (-1, 1)]
    return all((error <= (x - other.dequantize()).abs() + x.abs().max() * 2**-20).all() for other in others)


def make_int5(x: Tensor) -> Int5:
    """An Int5 of which numbers mean nothing."""
    return Int5((x.abs() * 9).byte() % 32, x[:, ::32].half(), x[:, 1::32].half())


def make_int6(x: Tensor) -> Int6:
    """An Int6 of which numbers mean nothing."""
    return Int6((x * 9).clamp(-32, 31).to(torch.int8), x[:, ::16].half())


MAKERS = [Tensor.clone, quantize_int4, quantize_int8, make_int5, make_int6]


def matrices_equal(a: Weight, b: Weight) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and all(torch.equal(x, getattr(b, name)) for name, x in vars(a).items())


def test_dequantize_number_by_number() -> None:
    q = torch.arange(128).reshape(2, 64)
    scale, shift = torch.tensor([[0.5, -2.0], [3.0, 0.0]]).half(), torch.tensor([[1.0, -1.5], [0.0, 7.0]]).half()
    four, eight = Int4((q % 16).byte(), scale, shift), Int8((q - 128).to(torch.int8), scale)
    five, six = Int5((q % 32).byte(), scale, shift), Int6((q % 64 - 32).to(torch.int8), torch.cat((scale, shift), 1))
    iq4, mxfp4 = (kind((q % 16).byte(), scale) for kind in (IQ4, MXFP4))
    nvfp4 = NVFP4((q % 16).byte(), six.scale)
    assert {m.shape for m in (four, five, six, eight, iq4, mxfp4, nvfp4)} == {(2, 64)}
    for o in range(2):
        for i in range(64):
            s, m = scale[o, i // 32], shift[o, i // 32]
            assert four.dequantize()[o, i] == s * (q[o, i] % 16) + m
            assert eight.dequantize()[o, i] == s * (q[o, i] - 128)
            assert five.dequantize()[o, i] == s * (q[o, i] % 32) + m
            assert six.dequantize()[o, i] == six.scale[o, i // 16] * (q[o, i] % 64 - 32)
            assert iq4.dequantize()[o, i] == s * IQ4.CODEBOOK[q[o, i] % 16]
            assert mxfp4.dequantize()[o, i] == s * MXFP4.CODEBOOK[q[o, i] % 16]
            assert nvfp4.dequantize()[o, i] == six.scale[o, i // 16] * MXFP4.CODEBOOK[q[o, i] % 16]
    assert four.dequantize().dtype == torch.float32
    assert torch.equal(four.dequantize(torch.bfloat16), four.dequantize().bfloat16())
    assert torch.equal(eight.dequantize(torch.bfloat16), eight.dequantize().bfloat16())


@given(MATRICES)
@example(torch.zeros(1, 32))
@example(torch.full((1, 32), 2.0**-26))
@example(torch.full((1, 32), -60000.0))
def test_int8_is_the_nearest(x: Tensor) -> None:
    m = quantize_int8(x)
    assert (m.q.dtype, m.scale.dtype) == (torch.int8, torch.float16)
    assert (m.q.shape, m.scale.shape) == (x.shape, (x.shape[0], x.shape[1] // 32))
    assert m.q.min() >= -127
    largest = x.abs().view(x.shape[0], -1, 32).amax(-1)
    assert torch.equal(m.scale, (largest / 127).half())
    assert not m.q[expand_groups(m.scale) == 0].any()
    assert (
        (x - m.dequantize()).abs()
        <= expand_groups(m.scale.float() / 2 + 127.5 * float16_rounding_error(m.scale)) * (1 + 1e-5)
    ).all()
    assert is_nearest_quantization(x, m, -127, 127)


@given(MATRICES)
@example(torch.zeros(1, 32))
@example(torch.full((1, 32), 5.0001))
@example(torch.full((1, 32), -60000.0))
def test_int4_is_the_nearest(x: Tensor) -> None:
    m = quantize_int4(x)
    assert (m.q.dtype, m.scale.dtype, m.shift.dtype) == (torch.uint8, torch.float16, torch.float16)
    assert (m.q.shape, m.scale.shape, m.shift.shape) == (x.shape, *[(x.shape[0], x.shape[1] // 32)] * 2)
    assert m.q.max() <= 15
    groups = x.view(x.shape[0], -1, 32)
    assert torch.equal(m.shift, groups.amin(-1).half())
    assert torch.equal(m.scale, ((groups.amax(-1) - groups.amin(-1)) / 15).half())
    allowed = expand_groups(
        m.scale.float() / 2 + 15.5 * float16_rounding_error(m.scale) + float16_rounding_error(m.shift)
    ) * (1 + 1e-5)
    assert ((x - m.dequantize()).abs() <= allowed).all()
    assert is_nearest_quantization(x, m, 0, 15)


@pytest.mark.parametrize("make", [quantize_int4, quantize_int8])
def test_representable_numbers_are_exact(make: type) -> None:
    """Multiples of the step are exact, also from bfloat16 and from a matrix that is not contiguous."""
    x = (torch.arange(64 * 64).reshape(64, 64) * 7 % 16).float()
    x[:, ::32], x[:, 1::32] = 0, 15 if make is quantize_int4 else 127
    assert torch.equal(make(x).dequantize(), x)
    assert torch.equal(make(x.bfloat16()).dequantize(), x)
    assert torch.equal(make(x.T.contiguous().T).dequantize(), x)


@pytest.mark.parametrize(("make", "large"), [(quantize_int4, 1e6), (quantize_int8, 1e7)])
def test_rejects_unrepresentable_numbers_and_shapes(make: type, large: float) -> None:
    for number in (large, -large, float("inf"), float("nan")):
        x = random_matrix(2, 64)
        x[1, 40] = number
        with pytest.raises(ValueError, match="not finite in float16"):
            make(x)
    assert is_quantizable(random_matrix(2, 64)) and not is_quantizable(random_matrix(2, 40))
    with pytest.raises(ValueError, match="40 inputs has no whole groups of 32"):
        make(random_matrix(2, 40))


@pytest.mark.parametrize("kind", MAKERS)
def test_select_rows(kind: type) -> None:
    x = kind(random_matrix(6, 64))
    dense = x if isinstance(x, Tensor) else x.dequantize()
    for index in ([3, 0, 5], [1, 1], [], list(range(6))):
        picked = select_rows(x, torch.tensor(index, dtype=torch.int64))
        assert type(picked) is type(x)
        assert torch.equal(picked if isinstance(picked, Tensor) else picked.dequantize(), dense[index])
    with pytest.raises(IndexError):
        select_rows(x, torch.tensor([6]))


@pytest.mark.parametrize("kind", MAKERS)
def test_scale_rows(kind: type) -> None:
    x, by = kind(random_matrix(3, 64)), torch.tensor([1.0, 0.3, -2.0])
    before, after = ((m if isinstance(m, Tensor) else m.dequantize()) for m in (x, scale_rows(x, by)))
    torch.testing.assert_close(after, before * by[:, None], rtol=2**-10, atol=2**-10)
    assert torch.equal(after[0], before[0]) and torch.equal(after[2], -2 * before[2])


def test_concat_of_one_kind_keeps_it() -> None:
    for kind in (quantize_int4, quantize_int8, make_int5, make_int6):
        parts: list[QuantizedWeight] = [kind(random_matrix(n, 64, seed=n)) for n in (2, 3, 1)]
        whole = concat_rows(parts)
        assert type(whole) is type(parts[0])
        assert torch.equal(whole.dequantize(), torch.cat([m.dequantize() for m in parts]))
        assert concat_rows(parts[:1]) is parts[0]
    dense = [random_matrix(n, 40).bfloat16() for n in (2, 3)]
    assert matrices_equal(concat_rows(dense), torch.cat(dense))


def test_concat_of_several_kinds_has_the_widest() -> None:
    four, eight, dense = (
        quantize_int4(random_matrix(2, 64)),
        quantize_int8(random_matrix(3, 64, seed=1)),
        random_matrix(1, 64, seed=2).bfloat16(),
    )
    five, six = make_int5(random_matrix(2, 64, seed=3)), make_int6(random_matrix(2, 64, seed=4))
    whole = concat_rows([four, five])
    assert isinstance(whole, Int5)
    assert torch.equal(whole.dequantize(), torch.cat([four.dequantize(), five.dequantize()]))
    for parts in ([four, eight], [eight, four, four], [four, six], [six, five]):
        whole = concat_rows(parts)
        assert isinstance(whole, Int8)
        expected = [m if isinstance(m, Int8) else quantize_int8(m.dequantize()) for m in parts]
        assert torch.equal(whole.dequantize(), torch.cat([m.dequantize() for m in expected]))
    for parts in ([four, dense], [dense, eight, four]):
        whole = concat_rows(parts)
        assert isinstance(whole, Tensor) and whole.dtype == torch.bfloat16
        assert torch.equal(
            whole, torch.cat([m if isinstance(m, Tensor) else m.dequantize(torch.bfloat16) for m in parts])
        )


def test_a_stack_keeps_the_numbers_of_all_kinds() -> None:
    four, five, six = (
        make(random_matrix(2, 64, seed=i)) for i, make in enumerate((quantize_int4, make_int5, make_int6))
    )
    dense = random_matrix(3, 64, seed=4)
    whole = stack_rows([four, stack_rows([four, six]), dense, five])
    assert isinstance(whole, StackedWeight)
    assert [type(part) for part in whole.parts] == [Int4, Int6, Tensor, Int5]  # adjacent ones of a kind are one
    numbers = torch.cat([m.dequantize() for m in (four, four, six)] + [dense, five.dequantize()])
    assert whole.shape == numbers.shape and torch.equal(torch.cat(list(dense_chunks(whole))), numbers)
    factors = torch.tensor([1.0, 2.0, -1.0, 0.5]).repeat(3)[: len(numbers)]
    assert torch.equal(torch.cat(list(dense_chunks(scale_rows(whole, factors)))), numbers * factors[:, None])
    index = torch.tensor([6, 0, 9])
    torch.testing.assert_close(select_rows(whole, index), numbers[index])
    for parts in ([four, four], [dense, dense]):
        assert matrices_equal(stack_rows(parts), concat_rows(parts))
    with pytest.raises(ValueError, match=r"\(2, 64\), \(1, 32\) cannot be stacked"):
        stack_rows([four, random_matrix(1, 32)])
