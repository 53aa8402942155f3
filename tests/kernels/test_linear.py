"""The cpu backend's products are what packed weights and rounded activations mean, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from retain.kernels import cpu
from retain.kernels.matrix import Matrix, int4, int8

pytestmark = [
    pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available())),
    pytest.mark.usefixtures("isa"),
]

KINDS = ["float32", "bfloat16", "int8", "int4"]


def matrix(kind: str, out: int, columns: int) -> Matrix:
    w = torch.randn(out, columns, generator=torch.Generator().manual_seed(out + columns))
    return {"int4": int4, "int8": int8}[kind](w) if kind.startswith("int") else w.to(getattr(torch, kind))


def rounded(x: Tensor, kind: str) -> Tensor:
    """The activations as the product of that kind sees them."""
    if kind == "float32":
        return x
    if kind == "bfloat16":
        return x.bfloat16().float()
    groups = x.view(len(x), -1, 32)
    step = groups.abs().amax(-1, keepdim=True) / 127
    return (torch.round(groups / step.where(step > 0, 1)) * step).view_as(x)


def product(m: Matrix, x: Tensor, bias: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
    """x W^T + bias by a program of one operation; `onto` it, where given."""
    from retain.kernels.cpu.forward import pack
    from retain.kernels.cpu.memory import Arena

    y = torch.full((len(x), m.shape[0]), torch.nan) if onto is None else onto.clone()
    packed = pack(m, Arena())
    b = 0 if bias is None else bias.data_ptr()
    cpu._C.linear(*packed.told, x.contiguous().data_ptr(), len(x), b, y.data_ptr(), onto is not None)
    return y


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("out", "columns"), [(16, 32), (40, 64), (7, 96), (200, 576)])
@pytest.mark.parametrize("rows", [1, 3, 12, 13, 40])
def test_products(kind: str, out: int, columns: int, rows: int) -> None:
    m = matrix(kind, out, columns)
    rng = torch.Generator().manual_seed(rows)
    x, bias, onto = (torch.randn(*n, generator=rng) for n in ((rows, columns), (out,), (rows, out)))
    dense = m.double() if isinstance(m, Tensor) else m.dense().double()
    want = rounded(x, kind).double() @ dense.T
    top = want.abs().max().item()
    for got, more in ((product(m, x), 0.0), (product(m, x, bias), bias), (product(m, x, bias, onto), onto + bias)):
        assert (got - (want + more)).abs().max().item() <= 3e-6 * top


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_an_odd_number_of_inputs(kind: str) -> None:
    m, x = matrix(kind, 20, 33), torch.randn(5, 33, generator=torch.Generator().manual_seed(0))
    assert isinstance(m, Tensor)
    want = rounded(x, kind) @ m.float().T
    assert torch.allclose(product(m, x), want, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_company_changes_no_bit(kind: str) -> None:
    m, x = matrix(kind, 48, 576), torch.randn(29, 576, generator=torch.Generator().manual_seed(1))
    together = product(m, x)
    for n in (1, 2, 5, 12):
        assert torch.equal(product(m, x[:n]), together[:n])
        assert torch.equal(product(m, x[-n:]), together[-n:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_no_number_stays_none(kind: str, wrong: float) -> None:
    m, x = matrix(kind, 16, 64), torch.ones(1, 64)
    x[0, 40] = wrong
    assert not product(m, x).isfinite().any()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_zeros_and_extremes(kind: str) -> None:
    m = matrix(kind, 16, 64)
    assert torch.equal(product(m, torch.zeros(2, 64)), torch.zeros(2, 16))
    x = torch.full((1, 64), 3.0)
    x[0, ::2] = -3.0
    dense = m.dense()  # type: ignore[union-attr]
    assert torch.allclose(product(m, x), x @ dense.T, atol=1e-4)
