"""Run the PTX of an inline asm on the host. A GPU runs it, and Triton's interpreter does not."""

from __future__ import annotations

import re

import torch

DTYPES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}
LOP3 = {0xEA: lambda a, b, c: a & b | c, 0x6A: lambda a, b, c: a & b ^ c}


def run_asm(code: str, *inputs: int) -> list[int]:
    """Run a block of instructions on registers of 32 bits, and return its results."""
    num_results = len(set(re.findall(r"\$\d+", code))) - len(inputs)
    registers = {f"${num_results + i}": x for i, x in enumerate(inputs)}
    for line in re.findall(r"^(?!\.reg)(.+, .+);", code, re.M):
        op, to, *names = re.sub("[,{}]", "", line).split()
        if op == "mov.b32" and len(names) == 2:  # into two registers of 16 bits
            registers[to], registers[names[0]] = registers[names[1]] & 0xFFFF, registers[names[1]] >> 16
            continue
        a, b, c, table = (registers[x] if x in registers else int(x, 0) for x in (*names, "0", "0", "0")[:4])
        registers[to] = run_instruction(op, a, b, c, table)
    return [registers[f"${i}"] for i in range(num_results)]


def run_instruction(op: str, a: int, b: int, c: int, table: int) -> int:
    """Return the result of one instruction."""
    if op == "cvt.rn.f16x2.e4m3x2":
        numbers = torch.tensor([a & 0xFF, a >> 8], dtype=torch.uint8).view(torch.float8_e4m3fn)
        return register_of(numbers.to(torch.float16))
    name, _, kind = op.rpartition(".rn.")
    if name in ("fma", "sub"):
        x, y, z = (torch.tensor(floats(n, DTYPES[kind]), dtype=torch.float64) for n in (a, b, c))
        return register_of((x * y + z if name == "fma" else x - y).to(DTYPES[kind]))
    if op == "lop3.b32":
        return LOP3[table](a, b, c)
    if op == "prmt.b32":
        selected = [c >> 4 * i & 15 for i in range(4)]
        assert all(x < 8 for x in selected), "the highest bit of a place would spread a sign"
        return sum(((b << 32 | a) >> 8 * x & 0xFF) << 8 * i for i, x in enumerate(selected))
    results = {"mov.b32": a, "shr.u32": a >> b, "shl.b32": a << b, "xor.b32": a ^ b, "and.b32": a & b}
    return results[op] & 0xFFFFFFFF


def floats(register: int, dtype: torch.dtype) -> list[float]:
    """Return the two floats of 16 bits in a register, the low one first."""
    return torch.tensor([register & 0xFFFF, register >> 16], dtype=torch.uint16).view(dtype).tolist()


def register_of(numbers: torch.Tensor) -> int:
    """Return the register with two floats of 16 bits."""
    low, high = numbers.view(torch.uint16).tolist()
    return high << 16 | low
