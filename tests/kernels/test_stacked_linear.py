"""Linear layers whose matrices are of several kinds: every backend against the product with the dense matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from retain.kernels import cpu, ops, reference, triton
from retain.kernels.api import CPU, Backend
from retain.kernels.ops import Buffer, Operation, WidthError
from retain.kernels.weights.quantized import quantize_int4, quantize_int8
from retain.kernels.weights.weight import StackedWeight, dense_chunks, stack_rows
from tests.helpers.backend_variants import ISAS, use_isa
from tests.helpers.layerless_batch import make_layerless_batch
from tests.kernels.test_head_linear import device_of, needs_triton, random

IN, OUT = 64, 71
BIAS = random(OUT, seed=3)
IDS = torch.arange(7)


def make_stack() -> StackedWeight:
    """Parts of 40, 7 and 24 rows: neither begins a tile, and one is smaller than a vector."""
    x = random(OUT, IN, seed=4) / IN**0.5
    weight = stack_rows([quantize_int4(x[:40]), x[40:47], quantize_int8(x[47:])])
    assert isinstance(weight, StackedWeight) and len(weight.parts) == 3
    return weight


def run(backend: Backend, ids: Tensor, bias: Tensor | None, add: bool, as_logits: bool = False) -> Tensor:
    """The rows [T, OUT] of a program with one linear layer, whose output held embedded tokens."""
    device = device_of(backend)
    p = backend.program(torch.float32, device)
    x = Buffer("x", IN)
    logits = Buffer(ops.LOGITS, OUT)
    y = logits if as_logits else Buffer("y", OUT)
    operations: list[Operation] = [ops.Embed(x, random(7, IN, seed=1))]
    if not as_logits:
        operations.append(ops.Embed(y, random(7, OUT, seed=2)))
    operations.append(ops.MatMul(x, y, make_stack(), bias, add))
    if not as_logits:
        operations.append(ops.MatMul(y, logits, torch.eye(OUT)))
    p.load(operations)
    batch = make_layerless_batch(backend, ids, torch.arange(len(ids)), device)
    return p.run(batch).cpu().clone()


CASES = [(None, False), (BIAS, False), (None, True), (BIAS, True)]


def by_words(bias: Tensor | None, add: bool) -> Tensor:
    y = random(7, IN, seed=1) @ torch.cat(list(dense_chunks(make_stack()))).T
    return y + (0 if bias is None else bias) + (random(7, OUT, seed=2) if add else 0)


@pytest.mark.parametrize(("bias", "add"), CASES)
def test_cpu_and_the_reference_equal_the_dense_product(bias: Tensor | None, add: bool) -> None:
    expected = by_words(bias, add)
    torch.testing.assert_close(run(reference, IDS, bias, add), expected, atol=1e-5, rtol=0)
    for isa in ISAS:
        with use_isa(isa):
            found = run(cpu, IDS, bias, add)
            torch.testing.assert_close(found, expected, atol=0.06, rtol=0)  # activations are rounded, too
            exact = found[:, 40:47]  # of the float32 part
            torch.testing.assert_close(exact, expected[:, 40:47], atol=1e-5, rtol=0)
            assert torch.equal(run(cpu, IDS[3:4], bias, add), found[3:4]), f"{isa}: bits depend on other tokens"
            if not add:
                assert torch.equal(run(cpu, IDS, bias, add, as_logits=True), found)


@needs_triton
@pytest.mark.parametrize(("bias", "add"), CASES)
def test_triton_equals_the_dense_product(bias: Tensor | None, add: bool) -> None:
    torch.testing.assert_close(run(triton, IDS, bias, add), by_words(bias, add), atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", [reference, cpu])
@pytest.mark.parametrize("width", [OUT - 1, OUT + 1])
def test_a_stack_fills_its_output(backend: Backend, width: int) -> None:
    p = backend.program(torch.float32, CPU)
    operation = ops.MatMul(Buffer("x", IN), Buffer("y", width), make_stack())
    with pytest.raises(WidthError, match=f"the output of a linear layer has width {OUT}, but {width}"):
        p.load([operation])
