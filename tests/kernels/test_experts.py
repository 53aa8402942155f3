"""Experts: the router against its definition in words, and every backend against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from retain.kernels import cpu, ops, reference
from retain.kernels.api import Backend
from retain.kernels.experts import Experts, Router
from retain.kernels.ops import Buffer, WidthError
from retain.kernels.reference.experts import mix_experts, route
from retain.kernels.weights.quantized import Int6, quantize_int4, quantize_int8
from retain.kernels.weights.weight import Weight
from tests.helpers.backend_variants import ISAS, use_isa
from tests.helpers.layerless_batch import make_layerless_batch
from tests.helpers.programs import load_program

E, I, N = 64, 32, 12
ROUTERS = {
    "softmax": Router(3, normalize=False),
    "normalized": Router(4),
    "one": Router(1, scale=2.5),
    "all": Router(N),
    "sigmoid": Router(3, is_sigmoid=True, scale=1.8, bias=torch.linspace(-0.5, 0.5, N)),
    "groups": Router(3, is_sigmoid=True, bias=torch.linspace(0.4, -0.4, N), num_groups=4, top_groups=2),
    "groups by one": Router(4, normalize=False, num_groups=3, top_groups=2, group_best=1),
    "expert scale": Router(4, scale=0.5, expert_scale=torch.linspace(0.2, 2.0, N)),
    "groups of one": Router(2, num_groups=N, top_groups=5),
    "epsilon": Router(3, is_sigmoid=True, sum_epsilon=0.5),
}
each_router = pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def to_int6(x: Tensor) -> Int6:
    groups = x.unflatten(-1, (-1, 16))
    scale = (groups.abs().amax(-1) / 31).half()
    return Int6((groups / scale[..., None]).round().to(torch.int8).flatten(-2), scale)


def make_experts(
    router: Router, kind: str = "float32", biases: bool = False, act: str = "silu", is_gated: bool = True
) -> Experts:
    convert: dict[str, Any] = {
        "float32": torch.Tensor.float, "bfloat16": torch.Tensor.bfloat16, "int8": quantize_int8, "int4": quantize_int4,
        "int6": to_int6,
    }  # fmt: skip
    rows = N * 2 * I if is_gated else N * I
    gate_up: Weight = convert[kind](random(rows, E, seed=1) / E**0.5)
    down: Weight = convert[kind](random(N * E, I, seed=2) / I**0.5)
    experts = Experts(N, gate_up, down, router, act, is_gated=is_gated)
    if not biases:
        return experts
    return replace(experts, gate_up_bias=random(rows, seed=3), down_bias=random(N * E, seed=4))


def words(scores: list[float], router: Router) -> dict[int, float]:
    """The chosen experts and their weights by Router's docstring, one number at a time, in float64."""
    x = torch.tensor(scores, dtype=torch.float64)
    p = (x.sigmoid() if router.is_sigmoid else x.softmax(0)).tolist()
    bias = [0.0] * len(p) if router.bias is None else router.bias.tolist()
    chosen_by = [a + b for a, b in zip(p, bias, strict=True)]
    size = len(p) // router.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(router.num_groups)]
    groups.sort(key=lambda g: -sum(sorted((chosen_by[e] for e in g), reverse=True)[: router.group_best]))
    usable = [e for g in groups[: router.top_groups] for e in g]
    best = sorted(usable, key=lambda e: -chosen_by[e])[: router.top_k]
    total = sum(p[e] for e in best) + router.sum_epsilon if router.normalize else 1.0
    own = [1.0] * len(p) if router.expert_scale is None else router.expert_scale.tolist()
    return {e: own[e] * router.scale * p[e] / total for e in best}


@each_router
@given(st.lists(st.integers(-40, 40), min_size=N, max_size=N, unique=True))
def test_the_router_does_what_its_description_says(router: Router, tenths: list[int]) -> None:
    scores = [x / 10 for x in tenths]
    experts, weights = route(torch.tensor([scores]), router)
    found = dict(zip(experts[0].tolist(), weights[0].tolist(), strict=True))
    assert found == pytest.approx(words(scores, router), abs=1e-5)


def test_of_equal_experts_the_first_are_chosen() -> None:
    experts, _ = route(torch.zeros(1, N), Router(3))
    assert experts.tolist() == [[0, 1, 2]]


class MixtureProgram:
    """A program of one mixture: embeds token ids, mixes experts by random scores, and returns rows as logits."""

    def __init__(self, backend: Backend, experts: Experts, num_tokens: int):
        self.backend = backend
        x, scores, y = Buffer("x", E), Buffer("scores", N), Buffer("y", E)
        operations = [
            ops.Embed(x, random(num_tokens, E, seed=5)),
            ops.Embed(y, random(num_tokens, E, seed=6)),
            ops.MatMul(x, scores, random(N, E, seed=7)),
            ops.MixExperts(x, scores, y, experts, add=True),
        ]
        self.program = load_program(backend, operations, y)

    def run(self, ids: Tensor) -> Tensor:
        """The rows [T, E] of one request; no layer attends."""
        batch = make_layerless_batch(self.backend, ids, torch.arange(len(ids)))
        return self.program.run(batch).clone()


@each_router
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4", "int6"])
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_cpu_equals_the_reference(router: Router, kind: str, num_tokens: int) -> None:
    act = {4: "swiglu_oai", 1: "relu2"}.get(router.top_k, "silu")
    experts = make_experts(router, kind, biases=num_tokens == 5, act=act, is_gated=act != "relu2")
    ids = torch.arange(num_tokens)
    expected = MixtureProgram(reference, experts, num_tokens).run(ids)
    tolerance = 1e-5 if kind == "float32" else 0.06  # activations are rounded, too
    for isa in ISAS:
        with use_isa(isa):
            program = MixtureProgram(cpu, experts, num_tokens)
            found = program.run(ids)
            torch.testing.assert_close(found, expected, atol=tolerance * float(expected.std()), rtol=0)
            alone = torch.cat([program.run(ids[i : i + 1]) for i in range(0, num_tokens, 7)])
            assert torch.equal(alone, found[::7]), f"{isa}: a token's bits depend on its company"


@pytest.mark.parametrize("act", ["silu", "relu2"])
def test_a_mixture_is_the_sum_of_its_experts(act: str) -> None:
    """Each expert by itself, without a router. Those of squared ReLU have no gates."""
    experts = make_experts(ROUTERS["normalized"], biases=True, act=act, is_gated=act != "relu2")
    assert isinstance(experts.gate_up, Tensor) and isinstance(experts.down, Tensor)
    x, scores = random(6, E, seed=8), random(6, N, seed=9)
    found = mix_experts(x, scores, experts)
    assert experts.gate_up_bias is not None and experts.down_bias is not None
    for t in range(len(x)):
        expected = torch.zeros(E)
        for e, share in words(scores[t].tolist(), experts.router).items():
            gate_up = experts.gate_up.view(N, -1, E)[e] @ x[t] + experts.gate_up_bias.view(N, -1)[e]
            if act == "relu2":
                hidden = gate_up.clamp(min=0) ** 2
            else:
                hidden = torch.nn.functional.silu(gate_up[:I]) * gate_up[I:]
            expected += share * (experts.down.view(N, E, I)[e] @ hidden + experts.down_bias.view(N, -1)[e])
        torch.testing.assert_close(found[t], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "router", [Router(0), Router(N + 1), Router(1, num_groups=5), Router(4, num_groups=6, top_groups=1)]
)
def test_impossible_routers_are_refused(router: Router) -> None:
    with pytest.raises(WidthError, match=r"a router that takes \d+ of \d+ experts is not possible"):
        MixtureProgram(reference, make_experts(router), 1)
