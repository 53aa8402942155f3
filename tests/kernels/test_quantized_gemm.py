"""The cpu backend's matrix products equal dequantized weights times rounded activations, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from retain.kernels import cpu
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
from retain.kernels.weights.weight import Weight

pytestmark = [
    pytest.mark.skipif(cpu.unavailable_reason() is not None, reason=str(cpu.unavailable_reason())),
    pytest.mark.usefixtures("isa"),
]

# Nothing is quantized to these: numbers are drawn, with the smallest and the largest.
STORED_KINDS: dict[str, type[QuantizedWeight]] = {
    "iq4": IQ4,
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
    "int5": Int5,
    "int6": Int6,
}
WEIGHT_DTYPES = ["float32", "bfloat16", "int8", "int4", *STORED_KINDS]


def make_weight(dtype: str, out: int, columns: int) -> Weight:
    rng = torch.Generator().manual_seed(out + columns)
    w = torch.randn(out, columns, generator=rng)
    if kind := STORED_KINDS.get(dtype):
        return draw_numbers(kind, w)
    if dtype == "int4":
        return quantize_int4(w)
    return quantize_int8(w) if dtype == "int8" else w.to(getattr(torch, dtype))


def draw_numbers(kind: type[QuantizedWeight], w: Tensor) -> QuantizedWeight:
    """A matrix of a kind with every number that it has; `w` [out, in] gives scales and shifts."""
    q = torch.randint(16, w.shape, generator=torch.Generator().manual_seed(w.numel()), dtype=torch.uint8)
    scale = w[:, : w.shape[1] // kind.GROUP].half()
    if kind is Int5:
        return Int5(2 * q + (w > 0), scale, w[:, -scale.shape[1] :].half())
    return Int6((4 * q + w.abs().mul(8).byte() % 4).to(torch.int8) - 32, scale) if kind is Int6 else kind(q, scale)


def round_activations(x: Tensor, dtype: str) -> Tensor:
    """The activations as they enter a product with weights of this dtype."""
    if dtype == "float32":
        return x
    if dtype == "bfloat16":
        return x.bfloat16().float()
    groups = x.view(len(x), -1, 32)
    step = groups.abs().amax(-1, keepdim=True) / 127
    return (torch.round(groups / step.where(step > 0, 1)) * step).view_as(x)


def run_linear(
    weight: Weight,
    x: Tensor,
    bias: Tensor | None = None,
    add_to: Tensor | None = None,
    products: str = "integers",
) -> Tensor:
    """x W^T + bias, plus `add_to` if given."""
    from retain.kernels.cpu.memory import Arena
    from retain.kernels.cpu.packing import pack_weight

    y = torch.full((len(x), weight.shape[0]), torch.nan) if add_to is None else add_to.clone()
    packed, bias_ptr = pack_weight(weight, Arena()), 0 if bias is None else bias.data_ptr()
    args = *packed.c_args, getattr(cpu._C.Products, products)
    cpu._C.packed_gemm(*args, x.contiguous().data_ptr(), len(x), bias_ptr, y.data_ptr(), add_to is not None)
    return y


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize(("out", "columns"), [(16, 32), (40, 64), (7, 96), (200, 576)])
def test_linear_matches_dequantized(isa: str, dtype: str, out: int, columns: int) -> None:
    weight = make_weight(dtype, out, columns)
    dense = weight.double() if isinstance(weight, Tensor) else weight.dequantize().double()
    for rows in (1, 3, 12, 13, 40):
        rng = torch.Generator().manual_seed(rows)
        x, bias, add_to = (torch.randn(*n, generator=rng) for n in ((rows, columns), (out,), (rows, out)))
        expected = round_activations(x, dtype).double() @ dense.T
        tolerance = 3e-6 * expected.abs().max().item()
        for y, added in (
            (run_linear(weight, x), 0.0),
            (run_linear(weight, x, bias), bias),
            (run_linear(weight, x, bias, add_to), add_to + bias),
        ):
            assert (y - (expected + added)).abs().max().item() <= tolerance, f"{rows} rows"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_odd_in_features(dtype: str) -> None:
    weight, x = make_weight(dtype, 20, 33), torch.randn(5, 33, generator=torch.Generator().manual_seed(0))
    assert isinstance(weight, Tensor)
    expected = round_activations(x, dtype) @ weight.float().T
    assert torch.allclose(run_linear(weight, x), expected, atol=1e-4)


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize(("out", "columns", "rows"), [(48, 576, 29), (20, 2144, 300)])
def test_other_rows_change_no_bit(dtype: str, out: int, columns: int, rows: int) -> None:
    weight = make_weight(dtype, out, columns)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    together = run_linear(weight, x)
    for n in (1, 2, 3, 5, 12, 17):
        assert torch.equal(run_linear(weight, x[:n]), together[:n])
        assert torch.equal(run_linear(weight, x[-n:]), together[-n:])


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_inputs_propagate(dtype: str, value: float) -> None:
    weight, x = make_weight(dtype, 16, 64), torch.ones(1, 64)
    x[0, 40] = value
    assert not run_linear(weight, x).isfinite().any()


@pytest.mark.parametrize("dtype", ["int8", "int4", *STORED_KINDS])
def test_zeros_and_extremes(dtype: str) -> None:
    weight = make_weight(dtype, 16, 64)
    assert torch.equal(run_linear(weight, torch.zeros(2, 64)), torch.zeros(2, 16))
    x = torch.full((1, 64), 3.0)
    x[0, ::2] = -3.0
    dense = weight.dequantize()  # type: ignore[union-attr]
    assert torch.allclose(run_linear(weight, x), x @ dense.T, atol=1e-4)


@pytest.mark.parametrize("dtype", ["int8", "int4", *STORED_KINDS])
@pytest.mark.parametrize(("out", "columns"), [(16, 32), (20, 288), (48, 256), (104, 576)])
def test_products_in_bfloat16_have_the_bits_of_a_bfloat16_copy(dtype: str, out: int, columns: int) -> None:
    """For any number of rows: of one panel or several, of an odd number of tiles, with and without a bias."""
    weight = make_weight(dtype, out, columns)
    assert not isinstance(weight, Tensor)
    copy = weight.dequantize().bfloat16()
    for rows in (1, 2, 3, 5, 12, 13, 40, 300):
        rng = torch.Generator().manual_seed(rows)
        x, bias, add_to = (torch.randn(*n, generator=rng) for n in ((rows, columns), (out,), (rows, out)))
        assert torch.equal(run_linear(weight, x, products="bfloat16"), run_linear(copy, x)), rows
        found = run_linear(weight, x, bias, add_to, products="bfloat16")
        assert torch.equal(found, run_linear(copy, x, bias, add_to)), rows
