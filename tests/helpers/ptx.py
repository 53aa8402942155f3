"""Run the PTX of an inline asm on the host. A GPU runs it, and Triton's interpreter does not."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

DTYPES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}
BITWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mov.b32": lambda a, b: a,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "xor.b32": lambda a, b: a ^ b,
    "and.b32": lambda a, b: a & b,
}
LOP3: dict[int, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    0xEA: lambda a, b, c: a & b | c,
    0x6A: lambda a, b, c: a & b ^ c,
}


def run_asm(code: str, *inputs: Tensor | int) -> list[Tensor]:
    """Run a block of instructions in N threads, and return their results.

    A register is the [N] integers of 32 bits that the threads have in it. An input may be one that all have.
    """
    num_results = len(set(re.findall(r"\$\d+", code))) - len(inputs)
    threads = torch.broadcast_tensors(*map(as_register, inputs))
    registers = {f"${num_results + i}": x for i, x in enumerate(threads)}
    for line in re.findall(r"^(?!\.reg)(.+, .+);", code, re.M):
        op, to, *names = re.sub("[,{}]", "", line).split()
        if op == "mov.b32" and len(names) == 2:  # into two registers of 16 bits
            registers[to], registers[names[0]] = registers[names[1]] & 0xFFFF, registers[names[1]] >> 16
            continue
        a, b, c = (registers[x] if x in registers else as_register(int(x, 0)) for x in (*names, "0", "0")[:3])
        registers[to] = run_instruction(op, a, b, c, int(names[3], 0) if len(names) > 3 else 0)
    return [registers[f"${i}"] for i in range(num_results)]


def as_register(x: Tensor | int) -> Tensor:
    """Return integers of 64 bits, of which a register is the low half."""
    return torch.as_tensor(x, dtype=torch.int64)


def run_instruction(op: str, a: Tensor, b: Tensor, c: Tensor, table: int) -> Tensor:
    """Return the result of one instruction."""
    if op == "cvt.rn.f16x2.e4m3x2":
        numbers = torch.stack((a & 0xFF, a >> 8), -1).to(torch.uint8).view(torch.float8_e4m3fn)
        return register_of(numbers.to(torch.float16))
    name, _, kind = op.rpartition(".rn.")
    if name in ("fma", "sub"):
        x, y, z = (floats(n, DTYPES[kind]).double() for n in (a, b, c))
        return register_of((x * y + z if name == "fma" else x - y).to(DTYPES[kind]))
    if op == "lop3.b32":
        return LOP3[table](a, b, c)
    if op == "prmt.b32":
        selected = [c >> 4 * i & 15 for i in range(4)]
        assert all((x < 8).all() for x in selected), "the highest bit of a place would spread a sign"
        return sum((((b << 32 | a) >> 8 * x & 0xFF) << 8 * i for i, x in enumerate(selected)), as_register(0))
    return BITWISE[op](a, b) & 0xFFFFFFFF


def floats(register: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the two floats of 16 bits in each register [..., 2], the low one first."""
    return torch.stack((register & 0xFFFF, register >> 16), -1).to(torch.uint16).view(dtype)


def register_of(numbers: Tensor) -> Tensor:
    """Return the register with two floats of 16 bits [..., 2]."""
    low, high = numbers.view(torch.uint16).long().unbind(-1)
    return high << 16 | low


def assert_numbers(register: Tensor, dtype: torch.dtype, expected: Tensor) -> None:
    """Check the two floats of 16 bits in the register of each of N threads, the low one first: `expected` [N, 2]."""
    torch.testing.assert_close(floats(register, dtype).float(), expected.float(), rtol=0, atol=0, equal_nan=True)
