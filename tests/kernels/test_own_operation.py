"""An operation of a test's own: a class, its definition, and what the other backends lower it to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton as triton_language
import triton.language as tl
from torch import Tensor

from retain.kernels import cpu, ops, reference, triton
from retain.kernels.api import CPU, Backend
from retain.kernels.ops import Buffer, Operation
from tests.helpers.layerless_batch import make_layerless_batch
from tests.helpers.programs import return_rows
from tests.kernels.test_head_linear import device_of, random

needs_triton = pytest.mark.skipif(triton.unavailable_reason() is not None, reason=str(triton.unavailable_reason()))


@dataclass(frozen=True, eq=False)
class Square(Operation):
    """Set out = factor out^2."""

    out: Buffer
    factor: float

    def check(self) -> None:
        """Raise ValueError for no factor."""
        if self.factor == 0:
            raise ValueError("squares times 0 are nothing")


def define(o: Any, op: Square) -> Callable[[Any], Tensor]:
    out = o.buffers[op.out]
    return lambda s: op.factor * s.buffers[out].square()


def to_records(o: Any, op: Square) -> Iterator[tuple[str, dict[str, Any]]]:
    """Two operations that C++ has."""
    yield o.record(ops.Multiply(op.out, by=op.out))
    yield o.record(ops.Scale(op.out, torch.full((op.out.width,), op.factor)), n=op.out.width)


@triton_language.jit
def square_kernel(x, n, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(x + at, at < n)
    tl.store(x + at, rows * rows * factor, at < n)


def launch(o: Any, op: Square) -> Callable[[Any], Tensor]:
    out = o.buffers[op.out]

    def compute(s: Any) -> Tensor:
        rows: Tensor = s.buffers[out]
        square_kernel[(triton_language.cdiv(rows.numel(), 64),)](rows, rows.numel(), op.factor, BLOCK=64)
        return rows

    return compute


@pytest.mark.parametrize(
    ("backend", "lowering"),
    [(reference, define), (cpu, to_records), pytest.param(triton, launch, marks=needs_triton)],
)
def test_an_operation_is_its_definition_in_every_backend(backend: Backend, lowering: Callable[..., Any]) -> None:
    x = Buffer("x", 48)
    table = random(7, 48)
    p: Any = backend.program(torch.float32, device_of(backend))
    p.lowerings[Square] = lowering
    p.load([ops.Embed(x, table), Square(x, 0.5), *return_rows(x)])
    ids = torch.tensor([3, 0, 6])
    found = p.run(make_layerless_batch(backend, ids, torch.arange(3), device_of(backend)))
    torch.testing.assert_close(found.cpu(), 0.5 * table[ids].square())


@pytest.mark.parametrize("backend", [reference, cpu])
def test_an_operation_is_checked_before_it_is_lowered(backend: Backend) -> None:
    with pytest.raises(ValueError, match="squares times 0 are nothing"):
        backend.program(torch.float32, CPU).load([Square(Buffer("x", 8), 0.0)])


def test_an_operation_that_cpp_does_not_know_is_named() -> None:
    with pytest.raises(ValueError, match="there is no operation Square"):
        cpu.program(torch.float32, CPU).load([Square(Buffer("x", 8), 1.0)])


@pytest.mark.parametrize("backend", [reference, cpu])
def test_a_buffer_has_one_width(backend: Backend) -> None:
    with pytest.raises(ops.WidthError, match="buffer 'x' has width 9, but 8 is expected"):
        backend.program(torch.float32, CPU).load([ops.Clip(Buffer("x", 8), 1.0), ops.Clip(Buffer("x", 9), 1.0)])
