"""Products with packed weights on a GPU, or in Triton's interpreter, equal those with the dense matrix."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from retain.kernels import triton
from retain.kernels.quantized import IQ4, MXFP4, NVFP4, Int5, Int6, QuantizedWeight, quantize_int4, quantize_int8

pytestmark = pytest.mark.skipif(triton.unavailable_reason() is not None, reason=str(triton.unavailable_reason()))
if not triton.unavailable_reason():
    from retain.kernels.triton import packed_weight
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


@pytest.mark.parametrize("kind", ["int4", "int8", "int5", "int6"])
def test_other_rows_change_no_bit(kind: str) -> None:
    packed = pack(KINDS[kind](random(200, 1056) / 32))
    x = random(packed_weight.FEW_ROWS, 1056, seed=1).to(DEVICE)
    together = linear(x, packed, None)
    for T in (1, 2, 17, 40):
        assert torch.equal(linear(x[:T], packed, None), together[:T])


def test_packed_matrices_take_their_own_bytes() -> None:
    weight = random(256, 512)
    dense = weight.bfloat16().nbytes
    int4, int8 = (pack(quantize(weight), torch.bfloat16).nbytes for quantize in (quantize_int4, quantize_int8))
    assert int4 == dense * 5 // 16  # a scale and a shift of 2 bytes for 32 numbers
    assert int8 == dense * 17 // 32


DTYPES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def run_asm(code: str, *inputs: int) -> list[int]:
    """Run the PTX of an inline asm on registers, and return its results: a GPU runs it, the interpreter does not."""
    num_results = len(set(re.findall(r"\$\d+", code))) - len(inputs)
    registers = {f"${num_results + i}": x for i, x in enumerate(inputs)}
    for line in re.findall(r"^(?!\.reg)(.+, .+);", code, re.M):
        op, to, *names = line.replace(",", "").split()
        a, b, c, table = (registers[x] if x in registers else int(x, 0) for x in (*names, "0", "0", "0")[:4])
        if op.startswith("fma"):
            dtype = DTYPES[op.removeprefix("fma.rn.")]
            x, y, z = (torch.tensor(floats(n, dtype), dtype=torch.float64) for n in (a, b, c))
            low, high = (x * y + z).to(dtype).view(torch.uint16).tolist()
            registers[to] = high << 16 | low
        elif op == "lop3.b32":
            assert table == 0xEA
            registers[to] = a & b | c
        else:
            registers[to] = {"mov.b32": a, "shr.u32": a >> b, "xor.b32": a ^ b}[op]
    return [registers[f"${i}"] for i in range(num_results)]


def floats(register: int, dtype: torch.dtype) -> list[float]:
    return torch.tensor([register & 0xFFFF, register >> 16], dtype=torch.uint16).view(dtype).tolist()


@pytest.mark.parametrize("name", ["BFLOAT16", "FLOAT16"])
def test_asm_unpacks_every_number(name: str) -> None:
    """Of two words, the lower one has the nibbles n, n + 1, ... or the bytes n, n + 1."""
    from retain.kernels.triton import weight_kernels

    dtype = {"BFLOAT16": torch.bfloat16, "FLOAT16": torch.float16}[name]
    s, b, t, c = (int(torch.tensor(x, dtype=dtype).view(torch.uint16)) * 0x10001 for x in (0.5, 3.0, 2.0, -1.0))
    asm = getattr(weight_kernels, f"_NIBBLES_TO_{name}").value
    for n in range(16):
        nibbles = [[(n + 5 * word + i) % 16 for i in range(4)] for word in range(2)]
        words = [sum(x << 4 * i for i, x in enumerate(of_word)) for of_word in nibbles]
        found = run_asm(asm, words[1] << 16 | words[0], s, b, t, c)
        for i, (scale, shift) in enumerate(((0.5, 3.0), (0.5, 3.0), (2.0, -1.0), (2.0, -1.0))):
            assert floats(found[i], dtype) == [(of_word[i] - 8) * scale + shift for of_word in nibbles]
    asm = getattr(weight_kernels, f"_INT8_TO_{name}").value
    for n in range(256):
        numbers = [(n + 77 * i) % 256 for i in range(4)]
        found = run_asm(asm, sum(x << 8 * i for i, x in enumerate(numbers)))
        signed = [x - 256 * (x > 127) for x in numbers]
        assert floats(found[0], dtype) == signed[::2] and floats(found[1], dtype) == signed[1::2]
