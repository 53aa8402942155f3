"""A program that stops before every layer computes what it computes at once, and shows its queries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from retain.engine.batch import build_batch
from retain.engine.engine import Engine
from tests.helpers.engines import make_engine, make_request


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "gptj"])
@pytest.mark.parametrize("after", [False, True])
def test_layer_hooks_change_no_logits_and_see_reference_queries(family: str, after: bool) -> None:
    def forward(engine: Engine, stops: bool) -> tuple[torch.Tensor, list[torch.Tensor], list[int]]:
        engine.add(make_request(list(range(3, 40))), make_request([5, 6, 7]))
        batch, seen, told = build_batch(engine.scheduler.schedule(), engine.cache), [], list[int]()
        if stops:
            batch = replace(
                batch,
                before_attention=lambda layer, q: seen.append(q.clone()),
                after_attention=told.append if after else None,
            )
        return engine.runner.forward(batch).clone(), seen, told

    whole, _, _ = forward(make_engine(family, backend="cpu"), False)
    logits, queries, told = forward(make_engine(family, backend="cpu"), True)
    assert torch.equal(logits, whole) and told == (list(range(len(queries))) if after else [])
    _, defined, _ = forward(make_engine(family, backend="reference"), True)
    assert len(queries) == len(defined)
    for mine, theirs in zip(queries, defined, strict=True):
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-4, atol=1e-4)
