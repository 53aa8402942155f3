"""A program whose values have another size than its keys computes what `write` and `attend` of the reference do."""

from __future__ import annotations

import pytest
import torch

from retain.kernels import cpu, ops, reference, triton
from retain.kernels.api import NO_WINDOW, Backend, Batch, GroupInputs, Tables
from retain.kernels.attention_params import AttentionParams
from retain.kernels.ops import Buffer
from tests.helpers.attention_case import assert_close
from tests.helpers.device_adapter import triton_backend
from tests.helpers.programs import load_program

H, G, D, V, T = 4, 2, 24, 16, 20


@pytest.mark.parametrize("name", ["cpu", "triton"])
def test_a_program_attends_to_values_of_another_size(name: str) -> None:
    backend: Backend = {"cpu": cpu, "triton": triton_backend()}[name]
    if reason := backend.unavailable_reason():
        pytest.skip(reason)
    if name == "triton" and not triton.is_interpreted():
        pytest.skip("its tensors would lie on the GPU")
    rng = torch.Generator().manual_seed(0)
    rows = torch.randn(T, (H + G) * D + G * V, generator=rng)
    params = AttentionParams(0.3, sink_logits=torch.randn(H, generator=rng), alibi_slopes=torch.rand(H, generator=rng))
    zero, starts = torch.zeros(1, dtype=torch.int32), torch.tensor([0, T], dtype=torch.int32)
    pages = torch.arange(1, 1 + 2 * G, dtype=torch.int32).view(1, G, 2)
    pos = torch.arange(T, dtype=torch.int32)
    slots = (pages[0][:, pos // 16] * 16 + pos % 16).int()  # [G, T]
    tables = Tables(pages, zero.expand(1, G) + 2, zero + NO_WINDOW, zero, starts)

    kv = reference.allocate(1 + 2 * G, 16, D, torch.float32, v_dim=V)
    kv.pos.fill_(-1)
    q, k, v = rows.split([H * D, G * D, G * V], 1)
    reference.write(kv, slots, k.unflatten(1, (G, D)), v.unflatten(1, (G, V)), pos)
    expected = reference.attend(q.unflatten(1, (H, D)), kv, tables, pos, params).flatten(1)

    qkv, o = Buffer("qkv", rows.shape[1]), Buffer("o", H * V)
    program = load_program(backend, [ops.Embed(qkv, rows), ops.Attend(qkv, o, 0, (H, G, D), params)], o)
    ours = backend.allocate(1 + 2 * G, 16, D, torch.float32, v_dim=V)
    ours.pos.fill_(-1)
    all_layers = Tables(pages[None], tables.counts[None].contiguous(), tables.windows[None], zero, starts)
    group = GroupInputs(ours, all_layers, slots[None].contiguous())
    batch = Batch([group], [(0, 0)], pos.long(), pos, logits_indices=pos.long())
    assert_close(program.run(batch), expected)
    with pytest.raises(ValueError, match="q, k and v has width"):
        program.load([ops.Attend(qkv, Buffer("wide", H * D), 0, (H, G, D), params)])
