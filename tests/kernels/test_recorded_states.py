"""Steps over cached states that the triton backend records as CUDA graphs, and waits of the host for the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from retain.kernels import ops, reference, triton
from retain.kernels.api import CPU, Backend, Batch, Tables
from retain.kernels.attention_params import AttentionParams
from retain.kernels.linear_attention import LinearAttention
from retain.kernels.ops import Buffer, Operation
from retain.kernels.slots.kv_cache_spec import ConvolutionSpec, LinearStateSpec, LinearTokensSpec, SlidingWindowSpec
from tests.helpers.state_caches import Chunk, StateCaches

pytestmark = pytest.mark.skipif(not triton.is_interpreted(), reason="the fake device runs the interpreter")
D, V, H, LENGTH = 24, 16, 2, 40
PARAMS = LinearAttention(1, H, D, V, -torch.linspace(0.1, 0.4, H), torch.linspace(-1, 1, H))


class FixedTables(StateCaches):
    """Caches whose tables stay where they are, as those of an engine do: recorded steps hold their addresses."""

    def _tables(self, pages: Tensor, rows: Tensor, query_start_loc: Tensor) -> Tables:
        if not hasattr(self, "known"):
            self.known: dict[int, Tables] = {}
        if id(pages) not in self.known:
            self.known[id(pages)] = super()._tables(pages, rows, query_start_loc)
        return replace(self.known[id(pages)], rows=rows, query_start_loc=query_start_loc)


def build(backend: Backend, device: torch.device = CPU) -> FixedTables:
    """Attention with a window, a convolution and linear attention. The states have more heads than attention has."""
    rng = torch.Generator().manual_seed(1)
    projection = torch.randn(PARAMS.qkv_width, 3 * V, generator=rng) / 20
    weight = torch.randn(PARAMS.qkv_width, 4, generator=rng) / 4
    table = torch.randn(3, LENGTH, PARAMS.qkv_width, generator=rng)
    table[..., : 2 * D] *= D**-0.5
    gate_table = torch.randn(2 * 3 * LENGTH, 2 * H, generator=rng)

    def emit(x: Buffer, out: Buffer) -> Iterator[Operation]:
        gates, convolved = Buffer("gates", 2 * H), Buffer("convolved", PARAMS.qkv_width)
        qkv, attended = Buffer("qkv", PARAMS.qkv_width), Buffer("attended", 3 * V)
        yield ops.Embed(gates, gate_table)
        yield ops.MatMul(x, qkv, torch.eye(PARAMS.qkv_width))
        yield ops.Attend(qkv, attended, 0, (3, 1, V), AttentionParams(0.25))
        yield ops.MatMul(attended, x, projection, add=True)
        yield ops.Convolve(x, convolved, 1, weight)
        yield ops.AttendLinearly(convolved, gates, out, (2, 3), PARAMS)

    size = PARAMS.qkv_width // 10
    attention = SlidingWindowSpec(1, V, V, 17)
    specs = [attention, ConvolutionSpec(5, size, size, 4), LinearTokensSpec(H, D, V), LinearStateSpec(H, D, V)]
    return FixedTables(backend, specs, emit, table, H * V, device=device)


def decode(caches: StateCaches) -> list[Tensor]:
    """The rows of steps that are alike, over the end of a page: three requests, padded to four."""
    caches.run(Chunk(0, 14), Chunk(1, 3), Chunk(2, 15))
    rows = [torch.cat(caches.run(*(Chunk(i, 1) for i in range(3)))) for _ in range(4)]
    return rows + [torch.cat(caches.run(*(Chunk(i, 1, 1) for i in range(3)))) for _ in range(3)]


@pytest.mark.slow
def test_recorded_steps_equal_the_reference() -> None:
    caches, expected = build(triton), build(reference)
    for found, rows in zip(decode(caches), decode(expected), strict=True):
        torch.testing.assert_close(found, rows, atol=1e-5, rtol=0)
    assert len(caches.program._graphs.graphs) == 2, "steps of one token, and of two"  # type: ignore[attr-defined]
    for positions, own in zip(caches.positions(), expected.positions(), strict=True):
        assert torch.equal(positions, own), "padding requests write nothing"


@pytest.mark.slow
def test_the_host_does_not_wait_for_the_device() -> None:
    from tests.helpers.fake_device import DEVICE, FakeDevice

    with FakeDevice() as device:
        with device.allow_syncs():
            caches = build(triton, DEVICE)
        decode(caches)
    assert not [wait for wait in device.host_syncs if "/tests/" not in wait]


def record_calls(caches: FixedTables) -> list[tuple[int, ...]]:
    """What a program calls in a step: a layer with the sizes of its queries."""
    calls: list[tuple[int, ...]] = []
    run = caches.program.run

    def run_with_calls(batch: Batch) -> Tensor:
        before = lambda layer, q: calls.append((layer, *q.shape))  # noqa: E731
        return run(replace(batch, before_attention=before))

    caches.program.run = run_with_calls  # type: ignore[method-assign]
    caches.run(Chunk(0, 3))
    return calls


def test_each_cache_of_a_layer_is_announced() -> None:
    found = record_calls(build(triton))
    assert found == record_calls(build(reference))
    assert [call[0] for call in found] == [0, 1, 2, 3]
