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


@pytest.mark.parametrize("backend", [reference, cpu])
def test_an_operation_that_a_backend_does_not_know_is_named(backend: Backend) -> None:
    with pytest.raises(ValueError, match="there is no operation Square"):
        backend.program(torch.float32, CPU).load([Square(Buffer("x", 8), 1.0)])


@pytest.mark.parametrize("limit", [None, torch.tensor(0.1)])
def test_a_number_is_neither_missing_nor_a_tensor(limit: Any) -> None:
    with pytest.raises(TypeError, match="limit of Clip is"):
        cpu.program(torch.float32, CPU).load([ops.Clip(Buffer("x", 8), limit)])


@pytest.mark.parametrize(
    ("fields", "message"), [({}, "no field out"), ({"out": 0, "limit": "1"}, "type of field limit")]
)
def test_cpp_refuses_a_record_in_one_line(fields: dict[str, Any], message: str) -> None:
    program: Any = cpu.program(torch.float32, CPU)
    with pytest.raises(ValueError, match=message):
        program.operands.program.add("Clip", fields)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: ops.Clip(x, 0.1),
        lambda x: ops.Scale(x, torch.full((5,), 0.5)),
        lambda x: ops.Multiply(x, by=x),
        lambda x: ops.Activate(x, x, "relu"),
        lambda x: ops.Norm(x, x, torch.ones(8), None, 1e-5, subtract_mean=False),
    ],
)
def test_an_operation_may_work_on_logits(operation: Callable[[Buffer], Operation]) -> None:
    x, logits = Buffer("x", 8), Buffer(ops.LOGITS, 8)
    ids = torch.tensor([3, 0, 6])
    rows = []
    for backend in (reference, cpu):
        p = backend.program(torch.float32, CPU)
        p.load([ops.Embed(x, random(7, 8)), ops.MatMul(x, logits, random(8, 8, seed=1)), operation(logits)])
        rows.append(p.run(make_layerless_batch(backend, ids, torch.arange(3))).clone())
    torch.testing.assert_close(rows[1], rows[0])


@pytest.mark.parametrize(
    "operation",
    [
        ops.Norm(Buffer("x", 8), Buffer("x", 8), torch.ones(2, 2), None, 1e-5, subtract_mean=False, first=-2),
        ops.Norm(Buffer("x", 8), Buffer("x", 8), torch.ones(1, 1, 8), None, 1e-5, subtract_mean=False),
        ops.Multiply(Buffer("x", 8), Buffer("y", 9), first=-1),
        ops.ScaleByPosition(Buffer("x", 8), -3, 0.1, 10),
    ],
)
def test_columns_outside_of_a_buffer_are_refused(operation: Operation) -> None:
    with pytest.raises(ops.WidthError):
        operation.check()


def test_a_program_without_logits_says_so() -> None:
    p = reference.program(torch.float32, CPU)
    p.load([ops.Embed(Buffer("x", 8), random(7, 8))])
    with pytest.raises(ValueError, match="no operation of the program writes logits"):
        p.run(make_layerless_batch(reference, torch.tensor([1]), torch.arange(1)))


@pytest.mark.parametrize("backend", [reference, cpu])
def test_a_buffer_has_one_width(backend: Backend) -> None:
    with pytest.raises(ops.WidthError, match="buffer 'x' has width 9, but 8 is expected"):
        backend.program(torch.float32, CPU).load([ops.Clip(Buffer("x", 8), 1.0), ops.Clip(Buffer("x", 9), 1.0)])
