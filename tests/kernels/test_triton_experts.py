"""Experts on a GPU, or in Triton's interpreter, with dense and with packed weights: the sums of the reference."""

from __future__ import annotations

from dataclasses import replace
from weakref import ref

import pytest
import torch
from torch import Tensor

from retain.kernels import ops, triton
from retain.kernels.experts import Experts, Router
from retain.kernels.ops import Buffer
from retain.kernels.reference.experts import mix_experts as mix_in_torch
from retain.kernels.weights.quantized import QuantizedWeight
from tests.kernels.test_triton_weights import BITS, DEVICE, KINDS, random

pytestmark = pytest.mark.skipif(triton.unavailable_reason() is not None, reason=str(triton.unavailable_reason()))
if not triton.unavailable_reason():
    from retain.kernels.triton import experts as triton_experts
    from retain.kernels.triton.experts import DeviceExperts, mix_experts
    from retain.kernels.triton.packed_weight import pack_weight

N, E, I = 5, 544, 96  # rows of an expert fill no whole tiles; inputs of the first product are two splits or three
MANY = 70  # tokens: more than go in splits side by side


def scaled(kind: str, rows: int, width: int, seed: int) -> Tensor | QuantizedWeight:
    dense = random(rows, width, seed=seed)
    if kind == "dense":
        return dense / width**0.5
    weight = KINDS[kind](dense)
    return weight.scale_rows(torch.full((rows,), 1 / float(weight.dequantize().norm(dim=1).mean())))


def make_experts(kind: str, biases: bool = True, act: str = "silu") -> Experts:
    inner = 2 * I if act != "relu2" else I
    gate_up, down = scaled(kind, N * inner, E, 1), scaled(kind, N * E, I, 2)
    experts = Experts(N, gate_up, down, Router(2), act, is_gated=act != "relu2")
    if not biases:
        return experts
    return replace(experts, gate_up_bias=random(N * inner, seed=3), down_bias=random(N * E, seed=4))


def on_device(e: Experts, dtype: torch.dtype = torch.float32) -> DeviceExperts:
    gate_up, down = (pack_weight(w, dtype, DEVICE, N) for w in (e.gate_up, e.down))
    biases = [None if b is None else b.to(DEVICE, dtype) for b in (e.gate_up_bias, e.down_bias)]
    return DeviceExperts(N, I, e.router, e.act, e.is_gated, gate_up, down, *biases)


def rows_and_scores(T: int) -> tuple[Tensor, Tensor]:
    """Rows of which most choose the first expert, and none the last one."""
    scores = random(T, N, seed=6)
    scores[:, 0] += 2
    scores[:, -1] = -9
    return random(T, E, seed=5), scores


def expected(x: Tensor, scores: Tensor, e: Experts) -> Tensor:
    gate_up, down = (w if isinstance(w, Tensor) else w.dequantize() for w in (e.gate_up, e.down))
    return mix_in_torch(x, scores, replace(e, gate_up=gate_up, down=down))


@pytest.mark.parametrize("kind", ["dense", *KINDS])
@pytest.mark.parametrize("T", [0, 1, 3, 40, MANY])
def test_sums_are_those_of_the_reference(kind: str, T: int) -> None:
    e = make_experts(kind, biases=T != 3, act={3: "relu2", 40: "swiglu_oai"}.get(T, "silu"))
    x, scores = rows_and_scores(T)
    found = mix_experts(x.to(DEVICE), scores.to(DEVICE), on_device(e)).cpu()
    torch.testing.assert_close(found, expected(x, scores, e), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["dense", *KINDS])
def test_other_tokens_change_no_bit(kind: str) -> None:
    """Alone, beside few, where splits are added by another kernel, and beside many, in blocks of other sizes."""
    x, scores = (rows.to(DEVICE) for rows in rows_and_scores(MANY))
    e = on_device(make_experts(kind))
    together = mix_experts(x, scores, e)
    for first, T in ((0, 1), (7, 3), (20, 40)):
        alone = mix_experts(x[first : first + T], scores[first : first + T], e)
        assert torch.equal(alone, together[first : first + T])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_16_bits(dtype: torch.dtype) -> None:
    e = make_experts("mxfp4")
    x, scores = rows_and_scores(9)
    found = mix_experts(x.to(DEVICE, dtype), scores.to(DEVICE), on_device(e, dtype)).cpu()
    assert found.dtype == dtype
    exact = expected(x.to(dtype).float(), scores, e)
    assert (found.float() - exact).norm() < 0.02 * exact.norm()  # the interpreter rounds bfloat16 to 0


def test_the_splits_of_a_layer_do_not_follow_from_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the law above compares: sums of several splits, in one kernel and in two."""
    calls: list[tuple[int, ...]] = []
    add_splits = triton_experts.add_splits

    def record(partial: Tensor, bias: Tensor | None, out: Tensor) -> None:
        calls.append(tuple(partial.shape[:2]))
        add_splits(partial, bias, out)

    monkeypatch.setattr(triton_experts, "add_splits", record)
    e = on_device(make_experts("int4"))
    for T in (1, 3, MANY):
        mix_experts(*(rows.to(DEVICE) for rows in rows_and_scores(T)), e)
    assert calls == [(3, 2), (3, 6)]


@pytest.mark.parametrize("kind", KINDS)
def test_programs_count_and_keep_packed_bits(kind: str) -> None:
    """What the host has of the weights is freed once they are on the device."""
    e = replace(make_experts(kind), router=Router(2))
    program = triton.program(torch.bfloat16, DEVICE)
    x, scores = Buffer("x", E), Buffer("scores", N)
    program.load([ops.MixExperts(x, scores, x, e)])
    assert program.weight_bytes == N * (256 * 576 + 640 * 128) * BITS[kind] / 8  # in whole tiles of 128 x 64
    q = ref(e.gate_up.q)
    del e
    assert q() is None
