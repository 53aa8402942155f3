"""Passes yield what they do not change, in order, and hold no matrix while the next layer is read."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import ref

import pytest
import torch

from retain import models
from retain.kernels import ops
from retain.kernels.ops import Buffer, Operation
from retain.models.passes.balance import balance
from retain.models.passes.headless import headless
from retain.models.passes.tap import tap
from retain.models.weights import Weights
from tests.helpers.tiny_models import tiny_checkpoint

X, LAST, H, LOGITS = Buffer("x", 16), Buffer("last", 16), Buffer("h", 8), Buffer(ops.LOGITS, 32)


def test_a_head_of_several_operations_is_left_out() -> None:
    begin: list[Operation] = [
        ops.Embed(X, torch.ones(32, 16)),
        ops.GatherRows(X, LAST),
        ops.Norm(LAST, LAST, torch.ones(16), None, 1e-5, subtract_mean=False),
    ]
    head = [
        ops.MatMul(LAST, H, torch.ones(8, 16)),
        ops.MatMul(H, LAST, torch.ones(16, 8)),
        ops.MatMul(LAST, LOGITS, torch.ones(32, 16)),
        ops.Softcap(LOGITS, 30.0),
    ]
    *kept, identity = headless([*begin, *head], 16, 32, torch.float32)
    assert kept == begin
    assert isinstance(identity, ops.MatMul) and (identity.x, identity.out) == (LAST, Buffer(ops.LOGITS, 16))
    assert torch.equal(torch.as_tensor(identity.weight), torch.eye(16))


def test_what_a_head_of_several_operations_reads_is_copied() -> None:
    norm = ops.Norm(LAST, LAST, torch.ones(16), None, 1e-5, subtract_mean=False)
    begin: list[Operation] = [ops.Embed(X, torch.ones(32, 16)), ops.GatherRows(X, LAST), norm]
    head = [
        ops.MatMul(LAST, H, torch.ones(8, 16)),
        ops.MatMul(H, LAST, torch.ones(16, 8)),
        ops.MatMul(LAST, LOGITS, torch.ones(32, 16)),
    ]
    *first, copy, a, b, c = tap([*begin, *head])
    assert first == begin and [a, b, c] == head
    assert isinstance(copy, ops.CopyColumns) and (copy.x, copy.out) == (LAST, Buffer(ops.HIDDEN_STATES, 16))


def test_a_model_with_fewer_tokens_than_numbers_is_refused_before_it_is_loaded() -> None:
    with pytest.raises(ValueError, match="cannot embed"):
        headless(iter(()), 33, 32, torch.float32)


@pytest.mark.parametrize("family", models.list_families())
def test_balance_only_adds_factors_and_changes_attention(family: str) -> None:
    decoder = models.load_family(family).build(Weights(tiny_checkpoint(family), torch.float32))
    operations = list(decoder.emit())
    balanced = list(balance(iter(operations), decoder.spec.kv_cache, {}))
    added = [op for op in balanced if op not in operations]
    assert [op for op in balanced if op in operations] == [
        op for op in operations if not isinstance(op, ops.Attend) or op in balanced
    ]
    assert {type(op) for op in added} <= {ops.Scale, ops.Attend}


def test_balance_holds_no_matrix_of_an_earlier_layer() -> None:
    decoder = models.load_family("llama").build(Weights(tiny_checkpoint("llama"), torch.float32))
    alive: list[ref[torch.Tensor]] = []

    def layer() -> Iterator[Operation]:
        qkv, o, wide = Buffer("qkv", 32), Buffer("o", 16), Buffer("wide", 24)
        for x, out, add in ((X, qkv, False), (o, X, True), (X, wide, False), (wide, X, True)):
            weight = torch.rand(out.width, x.width)
            alive.append(ref(weight))
            yield ops.MatMul(x, out, weight, add=add)
            del weight
            if out is qkv:
                yield ops.Attend(qkv, o, 0, (2, 1, 8), decoder.spec.attention)

    def emit() -> Iterator[Operation]:
        for _ in range(3):
            yield from layer()
            assert not [weight for weight in alive if weight() is not None], "the next layer is read now"

    for op in balance(emit(), decoder.spec.kv_cache, {}):
        del op
