"""A program that stops at every layer computes the same bits as without stops, and shows the layer's queries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from retain.engine.batch_builder import list_tokens
from tests.helpers.engines import make_engine, make_request
from tests.helpers.marks import slow


def compute_logits(family: str, backend: str) -> Tensor:
    """The logits of two prompts, without hooks."""
    return compute_with_hook(family, backend, has_hook=False)[0]


def compute_with_hook(family: str, backend: str, has_hook: bool = True) -> tuple[Tensor, list[Tensor], list[int]]:
    """The logits, each layer's queries, and the layers, in the order of the calls."""
    engine, queries, layers = make_engine(family, backend=backend), list[Tensor](), list[int]()
    engine.add(make_request(list(range(3, 40))), make_request([5, 6, 7]))

    def before_attention(layer: int, q: Tensor) -> None:
        layers.append(layer)
        queries.append(q.clone())

    batch = list_tokens(engine.scheduler.schedule(), engine.cache).build_step(engine.cache)
    batch = replace(batch, before_attention=before_attention if has_hook else None)
    return engine.runner.forward(batch).clone(), queries, layers


@pytest.mark.parametrize("family", ["gemma3_text", *slow("llama", "gpt2", "gptj")])
def test_a_layer_hook_changes_no_logits_and_sees_reference_queries(family: str) -> None:
    logits, queries, layers = compute_with_hook(family, "cpu")
    assert torch.equal(logits, compute_logits(family, "cpu"))
    assert layers == list(range(len(queries))) and layers
    _, expected_queries, _ = compute_with_hook(family, "reference")
    for q, expected in zip(queries, expected_queries, strict=True):
        torch.testing.assert_close(q, expected.float(), rtol=1e-4, atol=1e-4)
