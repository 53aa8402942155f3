"""Products with packed weights on a GPU, or in Triton's interpreter, equal those with the dense matrix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from retain.kernels import triton
from retain.kernels.quantized import IQ4, MXFP4, NVFP4, Int5, Int6, QuantizedWeight, quantize_int4, quantize_int8
from tests.helpers.ptx import floats, run_asm

pytestmark = pytest.mark.skipif(triton.unavailable_reason() is not None, reason=str(triton.unavailable_reason()))
if not triton.unavailable_reason():
    from retain.kernels.triton import packed_weight, unpack_kernels
    from retain.kernels.triton.packed_weight import PackedMatrix, linear, look_up, pack_weight

DEVICE = torch.device("cpu" if triton.is_interpreted() else "cuda")
SHAPES = [(1, 32), (77, 96), (129, 64), (256, 352), (300, 1056)]  # out, in


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def from_codebook(kind: type[IQ4 | MXFP4 | NVFP4]) -> Callable[[Tensor], QuantizedWeight]:
    """What makes a matrix of a file's kind; the numbers mean nothing."""

    def make(x: Tensor) -> QuantizedWeight:
        q = (x * 1000).int().remainder(16).byte()
        return kind(q, x[:, :: kind.GROUP].half() / 64)

    return make


KINDS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "int4": quantize_int4,
    "int8": quantize_int8,
    "iq4": from_codebook(IQ4),
    "mxfp4": from_codebook(MXFP4),
    "nvfp4": from_codebook(NVFP4),
    "int5": lambda x: Int5((x * 1000).int().remainder(32).byte(), x[:, ::32].half() / 64, x[:, 1::32].half()),
    "int6": lambda x: Int6((x * 1000).int().remainder(64).to(torch.int8) - 32, x[:, ::16].half() / 64),
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


@pytest.mark.parametrize("kind", KINDS)
def test_other_rows_change_no_bit(kind: str) -> None:
    packed = pack(KINDS[kind](random(200, 1056) / 32))
    x = random(packed_weight.FEW_ROWS, 1056, seed=1).to(DEVICE)
    together = linear(x, packed, None)
    for T in (1, 2, 17, 40):
        assert torch.equal(linear(x[:T], packed, None), together[:T])


BITS = {"int4": 5, "int8": 8.5, "iq4": 4.5, "mxfp4": 4.5, "nvfp4": 5, "int5": 7, "int6": 7}  # with scales and shifts


@pytest.mark.parametrize("kind", KINDS)
def test_packed_matrices_take_their_own_bytes(kind: str) -> None:
    weight = random(256, 512)
    assert pack(KINDS[kind](weight), torch.bfloat16).nbytes == weight.numel() * BITS[kind] / 8


def nibbles_from(n: int) -> tuple[list[list[int]], int]:
    """The four nibbles of two words, and the register that holds the words. They differ with n."""
    nibbles = [[(n + 5 * word + 3 * i) % 16 for i in range(4)] for word in range(2)]
    words = [sum(x << 4 * i for i, x in enumerate(of_word)) for of_word in nibbles]
    return nibbles, words[1] << 16 | words[0]


each_dtype = pytest.mark.parametrize("name", ["BFLOAT16", "FLOAT16"])
BY_NAME = {"BFLOAT16": torch.bfloat16, "FLOAT16": torch.float16}


@each_dtype
def test_asm_unpacks_every_int4(name: str) -> None:
    dtype = BY_NAME[name]
    s, b, t, c = (int(torch.tensor(x, dtype=dtype).view(torch.uint16)) * 0x10001 for x in (0.5, 3.0, 2.0, -1.0))
    for n in range(16):
        nibbles, register = nibbles_from(n)
        found = run_asm(getattr(unpack_kernels, f"_NIBBLES_TO_{name}").value, register, s, b, t, c)
        for i, (scale, shift) in enumerate(((0.5, 3.0), (0.5, 3.0), (2.0, -1.0), (2.0, -1.0))):
            assert floats(found[i], dtype) == [(of_word[i] - 8) * scale + shift for of_word in nibbles]


@each_dtype
def test_asm_unpacks_every_int8(name: str) -> None:
    for first in range(0, 256, 4):
        numbers = [(first + i) % 256 for i in range(4)]
        asm = getattr(unpack_kernels, f"_INT8_TO_{name}").value
        found = run_asm(asm, sum(x << 8 * i for i, x in enumerate(numbers)))
        signed = [x - 256 * (x > 127) for x in numbers]
        dtype = BY_NAME[name]
        assert floats(found[0], dtype) == signed[::2] and floats(found[1], dtype) == signed[1::2]


@each_dtype
def test_asm_unpacks_every_int6(name: str) -> None:
    for n in range(64):
        numbers = [[(n + 13 * word + 29 * i) % 64 for i in range(4)] for word in range(2)]
        words = [sum((x & 15) << 4 * i for i, x in enumerate(of_word)) for of_word in numbers]
        tops = [sum((x >> 4) << 2 * i for i, x in enumerate(of_word)) for of_word in numbers]
        signs = [top | 0xFF00 * (top > 127) for top in tops]  # as a byte that becomes a word has them
        registers = (words[1] << 16 | words[0], signs[1] << 16 | signs[0])
        found = run_asm(getattr(unpack_kernels, f"_INT6_TO_{name}").value, *registers)
        for i in range(4):
            assert floats(found[i], BY_NAME[name]) == [of_word[i] - 32 for of_word in numbers]


@each_dtype
def test_asm_unpacks_every_float_of_4_bits(name: str) -> None:
    for n in range(16):
        nibbles, register = nibbles_from(n)
        found = run_asm(getattr(unpack_kernels, f"_E2M1_TO_{name}").value, register)
        for i in range(4):
            assert floats(found[i], BY_NAME[name]) == [MXFP4.CODEBOOK[of_word[i]] for of_word in nibbles]


def test_asm_looks_up_every_number_of_a_codebook() -> None:
    for n in range(16):
        nibbles, register = nibbles_from(n)
        for first, found in zip((0, 2), run_asm(unpack_kernels._IQ4_TO_INT8.value, register), strict=True):
            numbers = [IQ4.CODEBOOK[of_word[first + i]] & 0xFF for of_word in nibbles for i in range(2)]
            assert found == sum(x << 8 * i for i, x in enumerate(numbers))
