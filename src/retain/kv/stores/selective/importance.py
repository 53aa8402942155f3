"""Which tokens of an offloaded prefix are important to the tokens that follow it (IMPRESS, FAST'25).

A few probe heads, the first kv heads of every layer, decide for all heads. Their keys are stored a second time as
sketches, which are read before anything else. The newest queries attend to the sketches; the tokens with the most
attention are important. If the probe heads agree no more than chance would have it, the whole layer is loaded. The
paper's test for that compares the mean Jaccard index of their top sets with j^0.6, where j is the index of random sets.

The sketch of a page of keys holds, for every channel, the mean, the mean deviation and one bit per token: above or
below the mean. It takes a tenth of the bytes of the keys and finds 98 % of the attention that the keys themselves
would find (docs/log/prefixes.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.types import Bytes, Floats, Ints

NUM_PROBE_HEADS = 3  # or all heads of a model that has fewer
NUM_QUERIES = 8  # the last of the fresh queries, which are the question
PREFETCH_FRACTION = 0.75  # of the tokens to load: read by past attention, before the queries are known
# For each byte, the signs (1 or -1) that its eight bits stand for.
SIGN_TABLE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float32) * 2 - 1


def sketch_keys(k: Tensor) -> Bytes:
    """Return the sketches of pages of keys [..., S, D], float32: [..., S D / 8 + 4 D] bytes.

    A sketch is the sign bits, then the means, then the deviations (float16).
    """
    mean = k.mean(-2, keepdim=True)
    deviation = (k - mean).abs().mean(-2, keepdim=True)
    signs = np.packbits((k > mean).flatten(-2).numpy(), axis=-1)
    numbers = torch.cat((mean, deviation), -1).squeeze(-2).half().numpy().view(np.uint8)
    return np.concatenate((signs, numbers), -1)


def reconstruct_keys(sketch: Bytes, page_size: int, head_dim: int, out: Floats) -> Floats:
    """Return approximate keys [..., S, D] from sketches, in the memory of `out`, since fresh memory costs more."""
    S = page_size
    D = head_dim
    shape = sketch.shape[:-1]
    numbers = np.ascontiguousarray(sketch[..., S * D // 8 :]).view(np.float16).astype(np.float32)
    mean = numbers[..., None, :D]
    deviation = numbers[..., None, D:]
    keys = out[: int(np.prod(shape)) * S * D]
    np.take(SIGN_TABLE, sketch[..., : S * D // 8], axis=0, out=keys.reshape(*shape, -1, 8), mode="clip")
    keys = keys.reshape(*shape, S, D)
    keys *= deviation
    keys += mean
    return keys


def attention_mass(q: Tensor, k: Tensor, scale: float, kv_heads: int) -> Tensor:
    """Return the attention that keys [P, N, D] of the first P kv heads get from queries [T, H, D]: [P, N].

    It is the mean over the newest queries and each kv head's query heads, with a softmax over these keys only.
    """
    P = len(k)
    T = min(len(q), NUM_QUERIES)
    probes = q[-T:].reshape(T, kv_heads, -1, q.shape[-1])[:, :P].float()  # [T, P, R, D]
    scores = scale * probes.permute(1, 0, 2, 3).flatten(1, 2) @ k.mT  # [P, T R, N]
    return torch.softmax(scores, -1).mean(1)


def jaccard(mass: Floats, num_top_tokens: int) -> tuple[float, float]:
    """Return how similar the heads' sets of most important tokens are, and the least that counts as agreement.

    `mass` is [P, N]. The first number is the mean Jaccard index over pairs of heads (1 for a single head).
    """
    P, N = mass.shape
    top = mass >= np.partition(mass, N - num_top_tokens, axis=1)[:, N - num_top_tokens, None]
    indices = [float((top[a] & top[b]).sum() / (top[a] | top[b]).sum()) for a, b in combinations(range(P), 2)]
    ratio = num_top_tokens / N
    return (sum(indices) / len(indices) if indices else 1.0), (ratio / (2 - ratio)) ** 0.6


def heads_agree(mass: Floats, ratio: float) -> bool:
    """Whether heads agree, more than by chance, on the share `ratio` of tokens with the most attention mass [P, N]."""
    similarity, threshold = jaccard(mass, max(int(ratio * mass.shape[1]), 1))
    return similarity >= threshold


def select_blocks(mass: Floats, page_size: int, ratio: float, prefetched: Ints) -> Ints:
    """Return the blocks to load, by the mass [P, N] of their tokens: the prefetched ones, then the others."""
    blocks = mass.sum(0).reshape(-1, page_size).sum(-1)
    others: Ints = np.delete(np.arange(len(blocks), dtype=np.int32), prefetched)
    if heads_agree(mass, ratio):
        n = max(round(ratio * len(blocks)), 1) - len(prefetched)
        others = np.sort(others[np.argsort(-blocks[others], kind="stable")[:n]])
    return np.concatenate((prefetched, others))


def block_mass(mass: Floats, token_order: NDArray[np.uint16], page_size: int) -> Floats:
    """Return the mass of each block of a layer [n], by the mass of its tokens in text order [n S] and their order."""
    blocks: Floats = mass[token_order].reshape(-1, page_size).sum(-1)
    return blocks


@dataclass
class SpanMetadata:
    """What says which tokens of a stored span matter: M layers, n blocks of S tokens, P probe heads."""

    sketches: Bytes  # [M, n, P, bytes], in the order of the blocks
    token_order: NDArray[np.uint16]  # [M, n S]: the token, counted from the span's start, in each place
    mass: Floats  # [M, n S]: mean attention on each token, in text order

    def attention_shares(self, page_size: int) -> Floats:
        """Return the attention on each block [M, n], relative to its layer's average; 1 before any was measured."""
        mass = np.take_along_axis(self.mass, self.token_order.astype(np.int64), 1)
        mass = mass.reshape(len(mass), -1, page_size).sum(-1)
        mean = mass.mean(1, keepdims=True)
        shares: Floats = np.divide(mass, mean, out=np.ones_like(mass), where=mean > 0)
        return shares

    @property
    def serialized(self) -> Bytes:
        """The bytes behind the layers of a span."""
        parts: Sequence[NDArray[np.generic]] = (self.sketches, self.token_order, self.mass)
        return np.concatenate([np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in parts])


def metadata_size(num_layers: int, num_blocks: int, num_probe_heads: int, page_size: int, head_dim: int) -> int:
    """Return the size of serialized metadata in bytes."""
    return num_layers * num_blocks * (num_probe_heads * (page_size * head_dim // 8 + 4 * head_dim) + 6 * page_size)


def parse_metadata(data: Bytes, num_layers: int, num_blocks: int, num_probe_heads: int, page_size: int) -> SpanMetadata:
    """Return metadata from its bytes."""
    num_tokens = num_layers * num_blocks * page_size
    sketches, order, mass = np.split(data.copy(), [len(data) - 6 * num_tokens, len(data) - 4 * num_tokens])
    return SpanMetadata(
        sketches.reshape(num_layers, num_blocks, num_probe_heads, -1),
        order.view(np.uint16).reshape(num_layers, -1),
        mass.view(np.float32).reshape(num_layers, -1),
    )
