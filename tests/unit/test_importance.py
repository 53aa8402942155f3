"""Importance of tokens: sketches of keys, agreement of heads, selection of blocks."""

from __future__ import annotations

import numpy as np
import torch

from retain.kv.stores.selective import importance
from retain.kv.stores.selective.importance import SpanMetadata

S, D = 16, 8
NO_BLOCKS = np.zeros(0, np.int32)


def reconstruct(k: torch.Tensor) -> np.ndarray:
    """Sketch keys, and return the keys that the sketch stands for."""
    sketch = importance.sketch_keys(k)
    assert sketch.nbytes == k.shape[:-2].numel() * (S * D // 8 + 4 * D)
    return importance.reconstruct_keys(sketch, S, D, np.empty(k.numel(), np.float32))


def test_keys_of_two_values_are_their_own_sketch() -> None:
    g = torch.Generator().manual_seed(0)
    signs = torch.stack([torch.randperm(S, generator=g) % 2 * 2 - 1 for _ in range(2 * 3 * D)]).view(2, 3, D, S).mT
    k = torch.randint(-8, 8, (2, 3, 1, D), generator=g) / 4 + signs * torch.randint(1, 8, (2, 3, 1, D), generator=g) / 4
    assert (reconstruct(k) == k.numpy()).all()


def test_sketch_is_near_the_keys_and_finds_their_attention() -> None:
    g = torch.Generator().manual_seed(1)
    k = torch.randn(12, 2, S, D, generator=g) + 2 * torch.randn(12, 2, 1, D, generator=g)
    approximate = torch.from_numpy(reconstruct(k))
    assert (approximate - k).square().mean() < 0.5 * k.var(-2, correction=0).mean()  # a bit says more than half
    q = torch.randn(3, 4, D, generator=g)
    true, found = (importance.attention_mass(q, x.swapaxes(0, 1).reshape(2, -1, D), 0.5, 2) for x in (k, approximate))
    assert torch.allclose(true.sum(-1), torch.ones(2)) and torch.allclose(found.sum(-1), torch.ones(2))
    best = found.topk(48).indices
    assert true.gather(1, best).sum() > 0.8 * true.topk(48).values.sum()


def test_mass_is_the_attention_of_the_last_queries_to_the_probe_heads() -> None:
    """The mean over all query heads of a kv head."""
    g = torch.Generator().manual_seed(2)
    q, k = torch.randn(20, 6, D, generator=g), torch.randn(2, 40, D, generator=g)  # 2 of 3 kv heads are probes
    found = importance.attention_mass(q, k, 0.3, 3)
    for p in range(2):
        w = torch.softmax(0.3 * q[-importance.NUM_QUERIES :, 2 * p : 2 * p + 2].reshape(-1, D) @ k[p].T, -1).mean(0)
        assert torch.allclose(found[p], w, atol=1e-6)


def test_jaccard_index_of_equal_random_and_single_heads() -> None:
    rng = np.random.default_rng(0)
    mass = rng.random(1600, np.float32)
    assert importance.jaccard(np.stack([mass] * 3), 400) == (1.0, (0.25 / 1.75) ** 0.6)
    similarity, threshold = importance.jaccard(rng.random((3, 1600), np.float32), 400)
    assert abs(similarity - 0.25 / 1.75) < 0.03 < threshold - similarity  # random sets are as similar as by chance
    assert importance.jaccard(mass[None], 400)[0] == 1.0  # a single head always agrees


def test_blocks_are_selected_by_the_mass_of_their_tokens() -> None:
    mass = np.full((3, 10 * S), 1e-3, np.float32)
    mass[:, 3 * S + 2], mass[:, 7 * S], mass[:, 5 * S] = 1.0, 0.9, 0.8
    assert importance.select_blocks(mass, S, 0.2, NO_BLOCKS).tolist() == [3, 7]
    assert importance.select_blocks(mass, S, 0.2, np.array([9], np.int32)).tolist() == [9, 3]
    assert importance.select_blocks(mass, S, 1.0, NO_BLOCKS).tolist() == list(range(10))


def test_all_blocks_are_selected_when_heads_disagree() -> None:
    rng = np.random.default_rng(0)
    apart = np.kron(np.eye(3, dtype=np.float32), np.ones((1, 50), np.float32)) + 1e-3 * rng.random((3, 150), np.float32)
    selected = importance.select_blocks(apart[:, :144].copy(), S, 0.2, np.array([4], np.int32))
    assert selected.tolist() == [4, 0, 1, 2, 3, 5, 6, 7, 8]


def test_metadata_survives_serialization() -> None:
    rng = np.random.default_rng(0)
    M, n, P = 3, 5, 2
    sketches = rng.integers(0, 256, (M, n, P, S * D // 8 + 4 * D), np.uint8)
    order = np.stack([rng.permutation(n * S) for _ in range(M)]).astype(np.uint16)
    metadata = SpanMetadata(sketches, order, rng.random((M, n * S), np.float32))
    data = metadata.serialized
    assert len(data) == importance.metadata_size(M, n, P, S, D)
    parsed = importance.parse_metadata(data, M, n, P, S)
    for x, y in ((parsed.sketches, sketches), (parsed.token_order, order), (parsed.mass, metadata.mass)):
        assert (x == y).all()
