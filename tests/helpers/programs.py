"""Programs of a few operations."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from retain.kernels import ops
from retain.kernels.api import CPU, Backend, Program
from retain.kernels.ops import Buffer, Operation


def load_program(
    backend: Backend, operations: Iterable[Operation], returned: Buffer, device: torch.device = CPU
) -> Program:
    """Return a program in float32 whose logits are the rows of a buffer."""
    program = backend.program(torch.float32, device)
    program.load([*operations, *return_rows(returned)])
    return program


def return_rows(buffer: Buffer) -> list[Operation]:
    """Return the operations at the end of a program whose logits are the rows of a buffer."""
    last = Buffer("last", buffer.width)
    return [
        ops.GatherRows(buffer, last),
        ops.MatMul(last, Buffer(ops.LOGITS, buffer.width), torch.eye(buffer.width)),
    ]
