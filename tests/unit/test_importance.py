"""What is important: sketches of keys, heads that agree, rows that are chosen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from retain.kv.offload.selective import importance
from retain.kv.offload.selective.importance import SpanMetadata

S, D = 16, 8


def left(k: torch.Tensor) -> np.ndarray:
    sketch = importance.sketch_keys(k)
    assert sketch.nbytes == k.shape[:-2].numel() * (S * D // 8 + 4 * D)
    return importance.reconstruct_keys(sketch, S, D, np.empty(k.numel(), np.float32))


def test_a_sketch_of_keys_that_have_two_values_is_the_keys() -> None:
    g = torch.Generator().manual_seed(0)
    signs = torch.stack([torch.randperm(S, generator=g) % 2 * 2 - 1 for _ in range(2 * 3 * D)]).view(2, 3, D, S).mT
    k = torch.randint(-8, 8, (2, 3, 1, D), generator=g) / 4 + signs * torch.randint(1, 8, (2, 3, 1, D), generator=g) / 4
    assert (left(k) == k.numpy()).all()


def test_a_sketch_is_near_and_finds_what_is_looked_at() -> None:
    g = torch.Generator().manual_seed(1)
    k = torch.randn(12, 2, S, D, generator=g) + 2 * torch.randn(12, 2, 1, D, generator=g)
    found = torch.from_numpy(left(k))
    assert (found - k).square().mean() < 0.5 * k.var(-2, correction=0).mean()  # a bit says more than half
    q = torch.randn(3, 4, D, generator=g)
    true, seen = (importance.attention_mass(q, x.swapaxes(0, 1).reshape(2, -1, D), 0.5, 2) for x in (k, found))
    assert torch.allclose(true.sum(-1), torch.ones(2)) and torch.allclose(seen.sum(-1), torch.ones(2))
    best = seen.topk(48).indices
    assert true.gather(1, best).sum() > 0.8 * true.topk(48).values.sum()


def test_masses_are_those_of_attention() -> None:
    """Of the probe heads, from the last queries, for every query head of a kv head alike."""
    g = torch.Generator().manual_seed(2)
    q, k = torch.randn(20, 6, D, generator=g), torch.randn(2, 40, D, generator=g)  # 3 kv heads, 2 are asked
    found = importance.attention_mass(q, k, 0.3, 3)
    for p in range(2):
        w = torch.softmax(0.3 * q[-importance.NUM_QUERIES :, 2 * p : 2 * p + 2].reshape(-1, D) @ k[p].T, -1).mean(0)
        assert torch.allclose(found[p], w, atol=1e-6)


def test_heads_that_agree_and_heads_that_do_not() -> None:
    rng = np.random.default_rng(0)
    one = rng.random(1600, np.float32)
    assert importance.jaccard(np.stack([one] * 3), 400) == (1.0, (0.25 / 1.75) ** 0.6)
    found, least = importance.jaccard(rng.random((3, 1600), np.float32), 400)
    assert abs(found - 0.25 / 1.75) < 0.03 < least - found  # random sets are as alike as chance says
    assert importance.jaccard(one[None], 400)[0] == 1.0  # one head has nobody to disagree with


def test_rows_are_chosen_by_what_is_looked_at() -> None:
    mass = np.full((3, 10 * S), 1e-3, np.float32)
    mass[:, 3 * S + 2], mass[:, 7 * S], mass[:, 5 * S] = 1.0, 0.9, 0.8
    none = np.zeros(0, np.int32)
    assert importance.select_blocks(mass, S, 0.2, none).tolist() == [3, 7]
    assert importance.select_blocks(mass, S, 0.2, np.array([9], np.int32)).tolist() == [9, 3]
    assert importance.select_blocks(mass, S, 1.0, none).tolist() == list(range(10))
    rng = np.random.default_rng(0)
    apart = np.kron(np.eye(3, dtype=np.float32), np.ones((1, 50), np.float32)) + 1e-3 * rng.random((3, 150), np.float32)
    assert importance.select_blocks(apart[:, :144].copy(), S, 0.2, np.array([4], np.int32)).tolist() == [
        4,
        0,
        1,
        2,
        3,
        5,
        6,
        7,
        8,
    ]


def test_notes_come_back_as_they_were() -> None:
    rng = np.random.default_rng(0)
    M, n, P = 3, 5, 2
    sketch = rng.integers(0, 256, (M, n, P, S * D // 8 + 4 * D), np.uint8)
    order = np.stack([rng.permutation(n * S) for _ in range(M)]).astype(np.uint16)
    notes = SpanMetadata(sketch, order, rng.random((M, n * S), np.float32))
    data = notes.serialized
    assert len(data) == importance.metadata_size(M, n, P, S, D)
    again = importance.parse_metadata(data, M, n, P, S, D)
    for x, y in ((again.sketches, sketch), (again.token_order, order), (again.mass, notes.mass)):
        assert (x == y).all()


@pytest.mark.parametrize("text", ["selective:ratio=0", "selective:ratio=2", "selective:size=3", "selective:ratio=x"])
def test_bad_options(text: str) -> None:
    from retain.kv.prefix.cache import parse_prefix_config

    with pytest.raises(ValueError, match="selective"):
        parse_prefix_config(text)
