"""Steps that the triton backend records as CUDA graphs: what they get, and what padding requests leave behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retain.kernels import transfers, triton
from retain.kernels.pending_tokens import PendingTokens
from retain.kernels.triton import graphs
from retain.kernels.triton.step_inputs import insert_pending_tokens
from tests.helpers.engines import make_engine, make_request, run_to_completion
from tests.helpers.fake_device import DEVICE, FakeDevice, to_plain_tensor

pytestmark = pytest.mark.skipif(not triton.is_interpreted(), reason="memory that is not written is random on a GPU")
LOOK = "look:slots=5,min=1"
PROMPTS = [list(range(11, 11 + n)) for n in (17, 7, 20)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", LOOK])
def test_rows_of_padding_requests_are_finite(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was never written is NaN here. Three requests are padded to four, in two layers of attention."""
    monkeypatch.setattr(graphs, "CAPTURE_AFTER", 1)

    def run() -> tuple[list[list[int]], Tensor]:
        engine = make_engine("llama", backend="triton", num_pages=64, looks=policy == LOOK)
        answers = run_to_completion(engine, [make_request(prompt, 4, policy) for prompt in PROMPTS])
        return answers, torch.stack([engine.cache.kv.k, engine.cache.kv.v])

    expected, _ = run()
    empty = torch.empty

    def empty_of_nan(*shape: Any, **options: Any) -> Tensor:
        x = empty(*shape, **options)
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", empty_of_nan)
    answers, slots = run()
    assert answers == expected
    assert slots.isfinite().all()


@settings(max_examples=20, derandomize=True)
@given(data=st.data())
def test_pending_tokens_are_inserted_as_they_are_defined(data: st.DataObject) -> None:
    T = data.draw(st.integers(1, 300))
    n = data.draw(st.integers(1, 40))
    rng = torch.Generator().manual_seed(T)
    sources = torch.randint(-1, n, (T,), generator=rng, dtype=torch.int32)
    sampled = torch.randint(-1, 9, (n,), generator=rng)
    input_ids = torch.randint(0, 9, (T,), generator=rng)
    expected = PendingTokens(sampled, sources).insert(input_ids)
    insert_pending_tokens(input_ids, sources, sampled)
    assert torch.equal(input_ids, expected)


@settings(max_examples=20, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from([torch.int64, torch.int32, torch.uint8]), st.integers(0, 9)), min_size=1))
def test_tensors_arrive_together(tensors: list[tuple[torch.dtype, int]]) -> None:
    sent = [torch.arange(n, dtype=dtype)[:, None] for dtype, n in tensors]
    with FakeDevice() as device:
        found = transfers.upload(sent, DEVICE)
        assert {x.device for x in found} == {DEVICE}
        assert not device.host_syncs
    for x, y in zip(sent, found, strict=True):
        assert torch.equal(to_plain_tensor(y), x) and y.dtype == x.dtype


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "h2o:budget=12,interval=8", LOOK])
def test_a_recorded_step_copies_once_to_the_device(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pending step, too. Others have changed tables, or are not recorded; of 12 tokens each."""
    monkeypatch.setattr(graphs, "CAPTURE_AFTER", 1)
    with FakeDevice() as device:
        with device.allow_syncs():
            engine = make_engine("llama", backend="triton", device=DEVICE, looks=policy == LOOK)
        engine.depth = 2
        engine.add(*(make_request(prompt, 12, policy) for prompt in PROMPTS))
        num_copies = []
        while engine.has_unfinished_requests:
            before = device.num_uploads
            if len(engine.pending_steps) < 2 and engine.launch():
                num_copies.append(device.num_uploads - before)
            else:
                engine.collect()
    assert 0 not in num_copies and num_copies.count(1) > 6, num_copies
