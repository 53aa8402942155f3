"""Steps that the triton backend records as CUDA graphs: what padding requests leave behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from retain.kernels import triton
from retain.kernels.triton import graphs
from tests.helpers.engines import make_engine, make_request, run_to_completion

pytestmark = pytest.mark.skipif(not triton.is_interpreted(), reason="memory that is not written is random on a GPU")
PROMPTS = [list(range(11, 11 + n)) for n in (17, 7, 20)]


def test_rows_of_padding_requests_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was never written is NaN here. Three requests are padded to four, in two layers of attention."""
    monkeypatch.setattr(graphs, "CAPTURE_AFTER", 1)

    def run() -> tuple[list[list[int]], Tensor]:
        engine = make_engine("llama", backend="triton", num_pages=64)
        answers = run_to_completion(engine, [make_request(prompt, 4) for prompt in PROMPTS])
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
