"""Products with packed weights on a GPU, or in Triton's interpreter, equal those with the dense matrix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from retain.kernels import triton
from retain.kernels.weights.quantized import (
    IQ4,
    MXFP4,
    NVFP4,
    Int5,
    Int6,
    QuantizedWeight,
    quantize_int4,
    quantize_int8,
)
from tests.helpers.ptx import assert_numbers, register_of, run_asm

pytestmark = pytest.mark.skipif(triton.unavailable_reason() is not None, reason=str(triton.unavailable_reason()))
if not triton.unavailable_reason():
    from retain.kernels.triton import packed_weight, unpack_kernels
    from retain.kernels.triton.packed_weight import DeviceWeight, linear, look_up, pack_weight

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


def pack(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> DeviceWeight:
    packed = pack_weight(weight, dtype, DEVICE)
    assert isinstance(packed, DeviceWeight)
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


PLACES = 5 * torch.arange(2)[:, None] + 3 * torch.arange(4)  # of four numbers in each of two words
NIBBLES = (torch.arange(16)[:, None, None] + PLACES) % 16  # [16, 2, 4]: each is at each place once


def join(numbers: Tensor, bits: int) -> Tensor:
    """Return the integers that have the last dimension's numbers in so many bits each, the first one lowest."""
    return (numbers << bits * torch.arange(numbers.shape[-1])).sum(-1)


REGISTERS = join(join(NIBBLES, 4), 16)
each_dtype = pytest.mark.parametrize("name", ["BFLOAT16", "FLOAT16"])
BY_NAME = {"BFLOAT16": torch.bfloat16, "FLOAT16": torch.float16}


@each_dtype
def test_asm_unpacks_every_int4(name: str) -> None:
    dtype = BY_NAME[name]
    constants = register_of(torch.tensor([0.5, 3.0, 2.0, -1.0], dtype=dtype)[:, None].expand(4, 2))
    found = run_asm(getattr(unpack_kernels, f"_NIBBLES_TO_{name}").value, REGISTERS, *constants)
    for i, (scale, shift) in enumerate(((0.5, 3.0), (0.5, 3.0), (2.0, -1.0), (2.0, -1.0))):
        assert_numbers(found[i], dtype, (NIBBLES[..., i] - 8) * scale + shift)


@each_dtype
def test_asm_unpacks_every_int8(name: str) -> None:
    numbers = (torch.arange(256)[:, None] + torch.arange(4)) % 256
    found = run_asm(getattr(unpack_kernels, f"_INT8_TO_{name}").value, join(numbers, 8))
    for i in range(2):
        assert_numbers(found[i], BY_NAME[name], numbers[:, i::2].to(torch.int8))


@each_dtype
def test_asm_unpacks_every_int6(name: str) -> None:
    numbers = (torch.arange(64)[:, None, None] + 13 * torch.arange(2)[:, None] + 29 * torch.arange(4)) % 64
    tops = join(numbers >> 4, 2)
    signs = tops | 0xFF00 * (tops > 127)  # as a byte that becomes a word has them
    registers = join(join(numbers & 15, 4), 16), join(signs, 16)
    found = run_asm(getattr(unpack_kernels, f"_INT6_TO_{name}").value, *registers)
    for i in range(4):
        assert_numbers(found[i], BY_NAME[name], numbers[..., i] - 32)


@each_dtype
def test_asm_unpacks_every_float_of_4_bits(name: str) -> None:
    found = run_asm(getattr(unpack_kernels, f"_E2M1_TO_{name}").value, REGISTERS)
    for i in range(4):
        assert_numbers(found[i], BY_NAME[name], torch.tensor(MXFP4.CODEBOOK)[NIBBLES[..., i]])


def test_asm_looks_up_every_number_of_a_codebook() -> None:
    codebook = torch.tensor(IQ4.CODEBOOK) & 0xFF
    for first, found in zip((0, 2), run_asm(unpack_kernels._IQ4_TO_INT8.value, REGISTERS), strict=True):
        numbers = codebook[NIBBLES[..., first : first + 2]].flatten(1)
        assert torch.equal(found, join(numbers, 8))
