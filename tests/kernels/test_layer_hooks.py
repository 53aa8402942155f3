"""A program that stops at every layer computes the same bits as without stops, and shows the layer's queries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from retain.engine.batch_builder import build_batch
from tests.helpers.engines import make_engine, make_request
from tests.helpers.marks import slow


def compute_logits(family: str, backend: str) -> Tensor:
    """The logits of two prompts, without hooks."""
    return compute_with_hooks(family, backend, before=False, after=False)[0]


def compute_with_hooks(
    family: str, backend: str, before: bool = True, after: bool = True
) -> tuple[Tensor, list[Tensor], list[int]]:
    """The logits, each layer's queries, and the layers whose attention was done, in the order of the calls."""
    engine, queries, done = make_engine(family, backend=backend), list[Tensor](), list[int]()
    engine.add(make_request(list(range(3, 40))), make_request([5, 6, 7]))
    batch = replace(
        build_batch(engine.scheduler.schedule(), engine.cache),
        before_attention=(lambda layer, q: queries.append(q.clone())) if before else None,
        after_attention=done.append if after else None,
    )
    return engine.runner.forward(batch).clone(), queries, done


@pytest.mark.parametrize("family", ["gemma3_text", *slow("llama", "gpt2", "gptj")])
@pytest.mark.parametrize("after", [False, True])
def test_layer_hooks_change_no_logits_and_see_reference_queries(family: str, after: bool) -> None:
    logits, queries, done = compute_with_hooks(family, "cpu", after=after)
    assert torch.equal(logits, compute_logits(family, "cpu"))
    assert done == (list(range(len(queries))) if after else [])
    _, expected_queries, _ = compute_with_hooks(family, "reference", after=after)
    for q, expected in zip(queries, expected_queries, strict=True):
        torch.testing.assert_close(q, expected.float(), rtol=1e-4, atol=1e-4)
