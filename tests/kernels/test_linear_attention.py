"""Short convolutions and linear attention: every backend against the reference, and cuts of a text against none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from retain.kernels import cpu, ops, reference, triton
from retain.kernels.api import CPU, Backend
from retain.kernels.linear_attention import GatedDeltaRule, LinearAttention, Mamba2Rule
from retain.kernels.ops import Buffer, Operation
from retain.kernels.slots.kv_cache_spec import ConvolutionSpec, LinearStateSpec, LinearTokensSpec
from tests.helpers.attention_case import torch_threads
from tests.helpers.backend_variants import FAST_VARIANTS, VARIANTS, use_variant
from tests.helpers.marks import slow
from tests.helpers.state_caches import Chunk, StateCaches

WITH_STATES = ("cpu", "triton")  # the backends that have the operations
BACKENDS = [v for v in VARIANTS if v.startswith(WITH_STATES)]
each_backend = pytest.mark.parametrize("variant", [v for v in BACKENDS if v in FAST_VARIANTS])
TOLERANCE = 1e-5  # of the largest output: the order of float32 sums
LENGTH = 100  # tokens of a text

# Three texts side by side: whole pages, cuts inside of pages, chunks longer than a ring, and drafts that are rejected.
SCHEDULE = (
    (Chunk(0, 1), Chunk(2, 37)),
    (Chunk(1, 70, 2), Chunk(0, 14)),
    (Chunk(2, 1, 3), Chunk(0, 1, 2), Chunk(1, 1)),
    (Chunk(0, 1), Chunk(1, 9, 5), Chunk(2, 9, 4)),
    (Chunk(0, 16), Chunk(2, 1), Chunk(1, 1)),
    (Chunk(0, 51), Chunk(2, 1, 1), Chunk(1, 0, 3)),
    (Chunk(1, 3), Chunk(0, 1)),
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Convolution:
    """The sizes of a short convolution."""

    heads: int = 2
    k_dim: int = 24
    v_dim: int = 40
    window: int = 4
    has_bias: bool = False
    page_size: int = 16
    in_place: bool = False

    def build(self, backend: Backend, device: torch.device = CPU) -> StateCaches:
        C = self.heads * (self.k_dim + self.v_dim)
        weight = random(C, self.window, seed=1)
        bias = random(C, seed=2) if self.has_bias else None

        def emit(x: Buffer, out: Buffer) -> Iterator[Operation]:
            yield ops.Convolve(x, x if self.in_place else out, 0, weight, bias)
            if self.in_place:
                yield ops.MatMul(x, out, torch.eye(C))

        spec = ConvolutionSpec(self.heads, self.k_dim, self.v_dim, self.window)
        table = random(3, LENGTH, C)
        return StateCaches(backend, [spec], emit, table, C, page_size=self.page_size, device=device)


@dataclass(frozen=True)
class Linear:
    """The sizes of a layer of linear attention."""

    key_heads: int = 2
    value_heads: int = 4
    k_dim: int = 24
    v_dim: int = 40
    page_size: int = 16
    decay: float = -0.3
    rule: Literal["gated_delta", "mamba2"] = "gated_delta"

    @property
    def params(self) -> LinearAttention:
        H = self.value_heads
        decay = self.decay * torch.linspace(0.2, 1.0, H)
        rule = Mamba2Rule(random(H, seed=5), (0.3, 1.5)) if self.rule == "mamba2" else GatedDeltaRule()
        return LinearAttention(self.key_heads, H, self.k_dim, self.v_dim, decay, random(H, seed=3), rule)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Rows [q | k | v] of three texts, and rows of gates. Keys have length 1, about, as the delta rule needs."""
        table = random(3, LENGTH, self.params.qkv_width)
        table[..., : 2 * self.key_heads * self.k_dim] *= self.k_dim**-0.5
        return table, random(2 * len(table) * LENGTH, self.params.gates_width, seed=4)

    def build(self, backend: Backend, device: torch.device = CPU) -> StateCaches:
        H = self.value_heads
        params = self.params
        table, gate_table = self.tables

        def emit(x: Buffer, out: Buffer) -> Iterator[Operation]:
            gates = Buffer("gates", params.gates_width)
            yield ops.Embed(gates, gate_table)
            yield ops.AttendLinearly(x, gates, out, (0, 1), params)

        specs = [
            LinearTokensSpec(H, self.k_dim, self.v_dim, self.page_size),
            LinearStateSpec(H, self.k_dim, self.v_dim, self.page_size),
        ]
        width = H * self.v_dim
        return StateCaches(backend, specs, emit, table, width, page_size=self.page_size, device=device)


Case = Convolution | Linear


CASES: list[Case] = [
    Convolution(),
    Convolution(heads=1, k_dim=72, v_dim=8, window=3, has_bias=True, page_size=32),
    Convolution(in_place=True),
    Linear(),
    Linear(key_heads=1, value_heads=1, k_dim=40, v_dim=16),
    Linear(key_heads=2, value_heads=2, k_dim=80, v_dim=64),  # a state of three pages
    Linear(key_heads=1, value_heads=3, k_dim=72, v_dim=24, page_size=32, decay=-4.0),
    Linear(rule="mamba2"),
    Linear(key_heads=1, value_heads=3, k_dim=72, v_dim=24, page_size=32, decay=-4.0, rule="mamba2"),
]
MORE_CASES: list[Case] = [
    Convolution(heads=3, k_dim=128, v_dim=128, window=2),
    Convolution(heads=2, k_dim=8, v_dim=8, window=17, has_bias=True),
    Linear(key_heads=1, value_heads=2, k_dim=128, v_dim=128),
    Linear(key_heads=1, value_heads=1, k_dim=256, v_dim=8),
    Linear(key_heads=2, value_heads=4, k_dim=128, v_dim=64, rule="mamba2"),
    Linear(key_heads=1, value_heads=1, k_dim=256, v_dim=8, rule="mamba2"),
]
each_case = pytest.mark.parametrize("case", [*CASES, *slow(*MORE_CASES)], ids=str)


def pairs() -> list[Any]:
    """The backends with their cases: of a slow one all but two are slow."""
    found = []
    for variant in BACKENDS:
        quick = CASES if variant in FAST_VARIANTS else [CASES[1], CASES[3], CASES[-1]]
        for case in [*CASES, *MORE_CASES]:
            marks = () if case in quick else (pytest.mark.slow,)
            found.append(pytest.param(variant, case, marks=marks, id=f"{variant}-{case}"))
    return found


each_pair = pytest.mark.parametrize(("variant", "case"), pairs())


@contextmanager
def use_caches(variant: str, case: Case) -> Iterator[StateCaches]:
    """The caches of a case in a backend, on the device that it computes on."""
    with use_variant(variant) as backend:
        if variant != "triton":
            yield case.build(backend)
        else:
            yield case.build(triton, CPU if triton.is_interpreted() else torch.device("cuda"))


def run_schedule(caches: StateCaches) -> tuple[list[Tensor], list[Tensor]]:
    """The rows of the three texts, and the positions of all slots in the end."""
    rows: list[list[Tensor]] = [[], [], []]
    for chunks in SCHEDULE:
        for chunk, y in zip(chunks, caches.run(*chunks), strict=True):
            rows[chunk.request].append(y)
    return [torch.cat(r) for r in rows], caches.positions()


@lru_cache(None)
def run_reference(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    return run_schedule(case.build(reference))


@lru_cache(None)
def run_backend(variant: str, case: Case) -> tuple[list[Tensor], list[Tensor]]:
    with use_caches(variant, case) as caches:
        return run_schedule(caches)


@each_case
def test_reference_rows_do_not_depend_on_cuts(case: Case) -> None:
    """But for the last bit of functions of torch, which rounds rows of a matrix in several ways."""
    whole = case.build(reference)
    for request, found in enumerate(run_reference(case)[0]):
        (expected,) = whole.run(Chunk(request, len(found)))
        torch.testing.assert_close(found, expected, atol=1e-6 * float(expected.abs().max()), rtol=0)


@each_pair
def test_a_backend_equals_the_reference(variant: str, case: Case) -> None:
    expected_rows, expected_positions = run_reference(case)
    rows, positions = run_backend(variant, case)
    for found, expected in zip(positions, expected_positions, strict=True):
        assert torch.equal(found, expected)
    for y, z in zip(rows, expected_rows, strict=True):
        torch.testing.assert_close(y, z, atol=TOLERANCE * float(z.abs().max()), rtol=0)


@each_pair
def test_bits_depend_neither_on_cuts_nor_on_company(variant: str, case: Case) -> None:
    for request, found in enumerate(run_backend(variant, case)[0]):
        with use_caches(variant, case) as alone:
            (expected,) = alone.run(Chunk(request, len(found)))
        assert torch.equal(found, expected), f"text {request}"


@each_backend
@given(
    st.sampled_from([Convolution(), Linear(value_heads=2), Linear(value_heads=2, rule="mamba2")]),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5))),
)
def test_any_cuts_give_the_same_bits(variant: str, case: Case, chunks: list[tuple[int, int]]) -> None:
    """A text in chunks of any lengths, with rejected drafts, has the bits of one chunk."""
    with use_caches(variant, case) as caches:
        (expected,) = caches.run(Chunk(1, 80))
    rows: list[Tensor] = []
    with use_caches(variant, case) as caches:
        for num_tokens, num_drafts in [*chunks, (80, 0)]:
            num_left = 80 - caches.computed[1]
            if min(num_tokens, num_left) + num_drafts:
                rows += caches.run(Chunk(1, min(num_tokens, num_left), num_drafts))
    assert torch.equal(torch.cat(rows), expected)


@each_backend
@pytest.mark.parametrize("case", [Convolution(), Linear()], ids=str)
def test_a_hook_changes_no_bits_and_sees_each_cache(variant: str, case: Case) -> None:
    calls: dict[str, list[int]] = {}
    for name in (variant, "reference"):
        seen: list[int] = []

        def before(layer: int, q: Tensor, seen: list[int] = seen) -> None:
            assert q.shape == (20, 0, 0)
            seen.append(layer)

        with use_caches(name, case) as caches:
            (expected,) = caches.run(Chunk(0, 20))
        with use_caches(name, case) as caches:
            (found,) = caches.run(Chunk(0, 20), before_attention=before)
        assert torch.equal(found, expected)
        calls[name] = seen
    assert calls[variant] == calls["reference"]


@each_backend
@pytest.mark.parametrize("case", [Convolution(heads=4, k_dim=128, v_dim=128), Linear()], ids=str)
def test_bits_do_not_depend_on_threads(variant: str, case: Case) -> None:
    with use_caches(variant, case) as caches:
        expected = caches.run(Chunk(0, 40), Chunk(1, 3))
    with torch_threads(3), use_caches(variant, case) as caches:
        found = caches.run(Chunk(0, 40), Chunk(1, 3))
    assert all(torch.equal(y, z) for y, z in zip(found, expected, strict=True))


needs_cpu = pytest.mark.skipif(cpu.unavailable_reason() is not None, reason="the extension is not built")


@pytest.mark.parametrize("cache", [0, 1])
@pytest.mark.parametrize("backend", [reference, pytest.param(cpu, marks=needs_cpu)])
def test_what_a_failed_load_left_out_is_no_error(backend: Backend, cache: int) -> None:
    """The request starts again, and others of the step are not affected."""
    caches = Linear().build(backend)
    caches.run(Chunk(0, 20), Chunk(1, 20))
    caches.kvs[cache].pos[caches.pages[cache][0].long()] = -1
    lost, other = caches.run(Chunk(0, 5), Chunk(1, 5))
    assert torch.isfinite(lost).all()
    whole = Linear().build(backend)
    whole.run(Chunk(1, 20))
    (expected,) = whole.run(Chunk(1, 5))
    torch.testing.assert_close(other, expected, rtol=0, atol=TOLERANCE)


@needs_cpu
@pytest.mark.parametrize("case", [Convolution(), Linear()], ids=str)
def test_steps_that_do_not_fit_change_nothing(case: Case) -> None:
    caches = case.build(cpu)
    before = caches.positions()
    for kvs, message in (
        ([replace(kv, v_dim=kv.v_dim + 8) for kv in caches.kvs], "other sizes"),
        ([replace(kv, k=kv.k.bfloat16(), v=kv.v.bfloat16()) for kv in caches.kvs], "float32"),
        ([replace(kv, pos=kv.pos[:2]) for kv in caches.kvs], "outside the pool"),
    ):
        broken = case.build(cpu)
        broken.kvs = kvs
        with pytest.raises(ValueError, match=message):
            broken.run(Chunk(0, 5))
    caches.computed[1] = -3
    with pytest.raises(ValueError, match="ascend by 1"):
        caches.run(Chunk(1, 5))
    assert all(torch.equal(x, y) for x, y in zip(caches.positions(), before, strict=True))


def recurrence(table: Tensor, gates: Tensor, case: Linear, h: int) -> Tensor:
    """The outputs of one head in float64, with a state for each token: arXiv 2412.06464 and 2405.21060."""
    p = case.params
    key = h // (case.value_heads // case.key_heads)
    q, k, v = table.double().split([case.key_heads * case.k_dim] * 2 + [case.value_heads * case.v_dim], dim=1)
    q, k = (x[:, key * case.k_dim : (key + 1) * case.k_dim] for x in (q, k))
    v = v[:, h * case.v_dim : (h + 1) * case.v_dim]
    steps = torch.nn.functional.softplus(gates[:, h].double() + p.time_bias[h])
    if isinstance(p.rule, Mamba2Rule):
        steps = steps.clamp(*p.rule.time_step_limits)
    state = torch.zeros(case.k_dim, case.v_dim, dtype=torch.float64)
    out = []
    for t, step in enumerate(steps):
        state = state * torch.exp(p.decay[h] * step)
        if isinstance(p.rule, Mamba2Rule):
            state = state + step * torch.outer(k[t], v[t])
            out.append(q[t] @ state + p.rule.skip[h] * v[t])
        else:
            beta = gates[t, case.value_heads + h].double().sigmoid()
            state = state + torch.outer(k[t], beta * (v[t] - k[t] @ state))
            out.append(q[t] @ state)
    return torch.stack(out)


@pytest.mark.parametrize("case", [Linear(), Linear(rule="mamba2")], ids=str)
def test_the_reference_is_a_recurrence(case: Linear) -> None:
    """Folding at page ends changes nothing but rounding."""
    table, gates = case.tables
    (found,) = case.build(reference).run(Chunk(0, LENGTH))
    for h in range(case.value_heads):
        expected = recurrence(table[0], gates[:LENGTH], case, h).float()
        torch.testing.assert_close(found[:, h * case.v_dim : (h + 1) * case.v_dim], expected, atol=1e-4, rtol=1e-4)
