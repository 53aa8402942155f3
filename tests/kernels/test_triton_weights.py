"""Products with packed weights on a GPU, or in Triton's interpreter, equal those with the dense matrix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from retain.kernels import triton
from retain.kernels.quantized import IQ4, MXFP4, QuantizedWeight, quantize_int4, quantize_int8

pytestmark = pytest.mark.skipif(triton.unavailable_reason() is not None, reason=str(triton.unavailable_reason()))
if not triton.unavailable_reason():
    from retain.kernels.triton import packed_weight
    from retain.kernels.triton.packed_weight import PackedMatrix, linear, look_up, pack_weight

DEVICE = torch.device("cpu" if triton.is_interpreted() else "cuda")
SHAPES = [(1, 32), (77, 96), (129, 64), (256, 352), (300, 1056)]  # out, in


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def from_codebook(kind: type[IQ4 | MXFP4]) -> Callable[[Tensor], QuantizedWeight]:
    """What makes a matrix of a file's kind; the numbers mean nothing."""

    def make(x: Tensor) -> QuantizedWeight:
        q = (x * 1000).int().remainder(16).byte()
        return kind(q, x[:, ::32].half() / 64)

    return make


KINDS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "int4": quantize_int4,
    "int8": quantize_int8,
    "iq4": from_codebook(IQ4),
    "mxfp4": from_codebook(MXFP4),
}


def pack(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> PackedMatrix:
    packed = pack_weight(weight, dtype, DEVICE)
    assert isinstance(packed, PackedMatrix)
    return packed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_those_of_the_dense_matrix(kind: str, shape: tuple[int, int]) -> None:
    weight = KINDS[kind](random(*shape))
    packed, dense = pack(weight), weight.dequantize()
    assert torch.equal(packed_weight.unpack_rows(packed, None, torch.float32).cpu(), dense)
    index = torch.randint(0, shape[0], (11,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(look_up(index.to(DEVICE), packed, torch.float32).cpu(), dense[index])
    assert look_up(index[:0].to(DEVICE), packed, torch.float32).shape == (0, shape[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("T", [0, 1, 3, 16, 17, 64, 65, 129])
def test_products_equal_those_of_the_dense_matrix(
    T: int, shape: tuple[int, int], kind: str, dtype: torch.dtype
) -> None:
    weight = KINDS[kind](random(*shape) / shape[1] ** 0.5)
    x, bias, y = (
        random(*size, seed=seed).to(dtype) for seed, size in enumerate(((T, shape[1]), shape[:1], (T, shape[0])))
    )
    packed = pack(weight, dtype)
    product = x.float() @ weight.dequantize().T
    for b, add_to in ((None, None), (bias, None), (None, y), (bias, y)):
        expected = product + (0 if b is None else b.float()) + (0 if add_to is None else add_to.float())
        rows = torch.cat((x, x), 1).to(DEVICE)[:, : shape[1]]  # not contiguous
        to = None if add_to is None else add_to.to(DEVICE)
        found = linear(rows, packed, None if b is None else b.to(DEVICE), to)
        assert found.dtype == dtype and (to is None or found.data_ptr() == to.data_ptr())
        torch.testing.assert_close(found.cpu().float(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-9}


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_other_rows_change_no_bit(kind: str) -> None:
    packed = pack(KINDS[kind](random(200, 1056) / 32))
    x = random(70, 1056, seed=1).to(DEVICE)
    together = linear(x, packed, None)
    for T in (1, 2, 17, 40, 65):
        assert torch.equal(linear(x[:T], packed, None), together[:T])


def test_packed_matrices_take_their_own_bytes() -> None:
    weight = random(256, 512)
    dense = weight.bfloat16().nbytes
    int4, int8 = (pack(quantize(weight), torch.bfloat16).nbytes for quantize in (quantize_int4, quantize_int8))
    assert int4 == dense * 5 // 16  # a scale and a shift of 2 bytes for 32 numbers
    assert int8 == dense * 17 // 32
