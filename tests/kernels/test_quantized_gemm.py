"""The cpu backend's products are what packed weights and rounded activations mean, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from retain.kernels import cpu
from retain.kernels.quantized import Weight, quantize_int4, quantize_int8

pytestmark = [
    pytest.mark.skipif(cpu.unavailable_reason() is not None, reason=str(cpu.unavailable_reason())),
    pytest.mark.usefixtures("isa"),
]

WEIGHT_DTYPES = ["float32", "bfloat16", "int8", "int4"]


def make_weight(dtype: str, out: int, columns: int) -> Weight:
    w = torch.randn(out, columns, generator=torch.Generator().manual_seed(out + columns))
    return (
        {"int4": quantize_int4, "int8": quantize_int8}[dtype](w)
        if dtype.startswith("int")
        else w.to(getattr(torch, dtype))
    )


def round_activations(x: Tensor, dtype: str) -> Tensor:
    """The activations as the product of that kind sees them."""
    if dtype == "float32":
        return x
    if dtype == "bfloat16":
        return x.bfloat16().float()
    groups = x.view(len(x), -1, 32)
    step = groups.abs().amax(-1, keepdim=True) / 127
    return (torch.round(groups / step.where(step > 0, 1)) * step).view_as(x)


def run_linear(m: Weight, x: Tensor, bias: Tensor | None = None, accumulate_into: Tensor | None = None) -> Tensor:
    """x W^T + bias by a program of one operation; `onto` it, where given."""
    from retain.kernels.cpu.forward import pack_weight
    from retain.kernels.cpu.memory import Arena

    y = torch.full((len(x), m.shape[0]), torch.nan) if accumulate_into is None else accumulate_into.clone()
    packed = pack_weight(m, Arena())
    b = 0 if bias is None else bias.data_ptr()
    cpu._C.linear(*packed.c_args, x.contiguous().data_ptr(), len(x), b, y.data_ptr(), accumulate_into is not None)
    return y


@pytest.mark.parametrize("kind", WEIGHT_DTYPES)
@pytest.mark.parametrize(("out", "columns"), [(16, 32), (40, 64), (7, 96), (200, 576)])
@pytest.mark.parametrize("rows", [1, 3, 12, 13, 40])
def test_linear_matches_dequantized(kind: str, out: int, columns: int, rows: int) -> None:
    m = make_weight(kind, out, columns)
    rng = torch.Generator().manual_seed(rows)
    x, bias, onto = (torch.randn(*n, generator=rng) for n in ((rows, columns), (out,), (rows, out)))
    dense = m.double() if isinstance(m, Tensor) else m.dequantize().double()
    want = round_activations(x, kind).double() @ dense.T
    top = want.abs().max().item()
    for got, more in (
        (run_linear(m, x), 0.0),
        (run_linear(m, x, bias), bias),
        (run_linear(m, x, bias, onto), onto + bias),
    ):
        assert (got - (want + more)).abs().max().item() <= 3e-6 * top


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_odd_in_features(kind: str) -> None:
    m, x = make_weight(kind, 20, 33), torch.randn(5, 33, generator=torch.Generator().manual_seed(0))
    assert isinstance(m, Tensor)
    want = round_activations(x, kind) @ m.float().T
    assert torch.allclose(run_linear(m, x), want, atol=1e-4)


@pytest.mark.parametrize("kind", WEIGHT_DTYPES)
def test_batch_invariance(kind: str) -> None:
    m, x = make_weight(kind, 48, 576), torch.randn(29, 576, generator=torch.Generator().manual_seed(1))
    together = run_linear(m, x)
    for n in (1, 2, 5, 12):
        assert torch.equal(run_linear(m, x[:n]), together[:n])
        assert torch.equal(run_linear(m, x[-n:]), together[-n:])


@pytest.mark.parametrize("kind", WEIGHT_DTYPES)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_non_finite_inputs_propagate(kind: str, wrong: float) -> None:
    m, x = make_weight(kind, 16, 64), torch.ones(1, 64)
    x[0, 40] = wrong
    assert not run_linear(m, x).isfinite().any()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_zeros_and_extremes(kind: str) -> None:
    m = make_weight(kind, 16, 64)
    assert torch.equal(run_linear(m, torch.zeros(2, 64)), torch.zeros(2, 16))
    x = torch.full((1, 64), 3.0)
    x[0, ::2] = -3.0
    dense = m.dequantize()  # type: ignore[union-attr]
    assert torch.allclose(run_linear(m, x), x @ dense.T, atol=1e-4)
