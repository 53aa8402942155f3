"""Products of each head with its own matrix, and copies of heads: every backend against the definition in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from retain.kernels import cpu, ops, reference, triton
from retain.kernels.api import CPU, Backend, Batch
from retain.kernels.head_columns import HeadColumns
from retain.kernels.ops import Buffer, WidthError
from retain.kernels.weights.quantized import quantize_int4, quantize_int8
from retain.kernels.weights.weight import Weight
from tests.helpers.backend_variants import ISAS, use_isa
from tests.helpers.layerless_batch import make_layerless_batch
from tests.helpers.programs import load_program

H, IN, OUT, WIDTH, OUT_WIDTH = 3, 64, 32, 230, 170
SOURCE, TARGET = HeadColumns(H, IN, IN + 8, first=5), HeadColumns(H, OUT, OUT + 21, first=7)
COPIED, COPY = HeadColumns(2, 11, 40, first=3), HeadColumns(2, 11, 60, first=41)  # between the targets
KINDS: dict[str, Any] = {
    "float32": torch.Tensor.float, "bfloat16": torch.Tensor.bfloat16, "int8": quantize_int8, "int4": quantize_int4
}  # fmt: skip
needs_triton = pytest.mark.skipif(triton.unavailable_reason() is not None, reason=str(triton.unavailable_reason()))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def device_of(backend: Backend) -> torch.device:
    return torch.device("cuda") if backend is triton and not triton.is_interpreted() else CPU


def run(backend: Backend, weight: Weight, num_tokens: int, choices: Tensor) -> Tensor:
    """The rows [T, OUT_WIDTH] of a program that multiplies heads of embedded tokens, and copies others."""
    x, y = Buffer("x", WIDTH), Buffer("y", OUT_WIDTH)
    operations = [
        ops.Embed(x, random(num_tokens, WIDTH, seed=1)),
        ops.Embed(y, random(num_tokens, OUT_WIDTH, seed=2)),
        ops.HeadMatMul(x, y, weight, SOURCE, TARGET),
        ops.CopyColumns(x, y, COPIED, COPY),
    ]
    p = load_program(backend, operations, y, device_of(backend))
    return p.run(make_batch(backend, choices)).cpu().clone()


def make_batch(backend: Backend, choices: Tensor) -> Batch:
    """A step of as many tokens as are chosen."""
    return make_layerless_batch(backend, choices, torch.arange(len(choices)), device_of(backend))


def by_words(weight: Weight, num_tokens: int) -> Tensor:
    """The same rows, one head at a time."""
    x, y = random(num_tokens, WIDTH, seed=1), random(num_tokens, OUT_WIDTH, seed=2)
    dense = weight.float() if isinstance(weight, Tensor) else weight.dequantize()
    for h in range(H):
        own = x[:, 5 + 72 * h : 69 + 72 * h] @ dense[OUT * h : OUT * (h + 1)].T
        y[:, 7 + 53 * h : 39 + 53 * h] = own
    for h in range(2):
        y[:, 41 + 60 * h : 52 + 60 * h] = x[:, 3 + 40 * h : 14 + 40 * h]
    return y


def make_weight(kind: str) -> Weight:
    weight: Weight = KINDS[kind](random(H * OUT, IN, seed=3) / IN**0.5)
    return weight


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_cpu_equals_the_reference(kind: str, num_tokens: int) -> None:
    weight, ids = make_weight(kind), torch.arange(num_tokens)
    expected = by_words(weight, num_tokens)
    torch.testing.assert_close(run(reference, weight, num_tokens, ids), expected, atol=1e-5, rtol=0)
    for isa in ISAS:
        with use_isa(isa):
            found = run(cpu, weight, num_tokens, ids)
            tolerance = 1e-5 if kind == "float32" else 0.06  # activations are rounded, too
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
            alone = torch.cat([run(cpu, weight, num_tokens, ids[i : i + 1]) for i in range(0, num_tokens, 7)])
            assert torch.equal(alone, found[::7]), f"{isa}: a token's bits depend on its company"


@needs_triton
@pytest.mark.parametrize("kind", ["float32", "int4"])
def test_triton_equals_the_reference(kind: str) -> None:
    weight = make_weight(kind)
    torch.testing.assert_close(run(triton, weight, 5, torch.arange(5)), by_words(weight, 5), atol=1e-4, rtol=0)


def test_columns_that_nothing_has_written_are_no_numbers() -> None:
    """In the definition, so that every test of a family notices a program that reads them."""
    x, y = Buffer("x", 16), Buffer("y", 32)
    copy = ops.CopyColumns(x, y, HeadColumns(1, 16, 16), HeadColumns(1, 16, 16, first=16))
    p = load_program(reference, [ops.Embed(x, torch.ones(4, 16)), copy], y)
    assert p.run(make_batch(reference, torch.arange(3))).isnan().all()


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (HeadColumns(H, IN, IN, first=40), TARGET, "heads up to column 232 do not fit a buffer of width 230"),
        (HeadColumns(H, IN, IN - 1), TARGET, "3 heads of 64 numbers, 63 apart from 0 on, overlap"),
        (HeadColumns(2, IN, IN), TARGET, "the heads of a linear layer has width 2, but 3 is expected"),
        (HeadColumns(H, 60, IN), TARGET, "the input of a head has width 64, but 60 is expected"),
        (SOURCE, HeadColumns(H, 16, 40), "the outputs of all heads has width 96, but 48 is expected"),
    ],
)
def test_columns_that_do_not_fit_are_refused(source: HeadColumns, target: HeadColumns, message: str) -> None:
    x, y = Buffer("x", WIDTH), Buffer("y", OUT_WIDTH)
    with pytest.raises(WidthError, match=message):
        ops.HeadMatMul(x, y, make_weight("float32"), source, target).check()


def test_outputs_that_fill_no_tile_are_refused() -> None:
    x, y = Buffer("x", WIDTH), Buffer("y", OUT_WIDTH)
    with pytest.raises(WidthError, match="a linear layer of each head has 24 outputs, not a multiple of 16"):
        ops.HeadMatMul(x, y, torch.zeros(H * 24, IN), SOURCE, HeadColumns(H, 24, 24)).check()
