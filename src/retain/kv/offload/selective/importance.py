"""Which tokens of a prefix that sleeps are important to those that come: IMPRESS (FAST'25).

A few probe heads, the first ones of every layer, say it for all: their keys are kept once more, as sketches, and read
before anything else. The newest queries look at them; what they look at most is important. Where the probe heads do not
agree more than chance would, a layer is loaded whole (the paper's test: mean Jaccard of their sets against j^0.6).

A sketch of a page of keys is, for every channel, the mean, the mean deviation, and a bit a token: above or below. That
is a tenth of the keys, and finds 98 % of the attention that whole keys would find (docs/log.md). What is not known
here: spans, files, tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.types import Bytes, Ints

NUM_PROBE_HEADS = 3  # heads, or all where there are fewer
NUM_QUERIES = 8  # of the fresh ones, the last: the question
PREFETCH_FRACTION = 0.75  # of what is loaded: what was looked at most until now, read ahead of the queries
SIGN_TABLE = (
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float32) * 2 - 1
)  # of a byte's bits


def sketch_keys(k: Tensor) -> Bytes:
    """Of keys [..., S, D], float32: [..., S D / 8 + 4 D]: signs, means, deviations (float16)."""
    mean = k.mean(-2, keepdim=True)
    dev = (k - mean).abs().mean(-2, keepdim=True)
    signs = np.packbits((k > mean).flatten(-2).numpy(), axis=-1)
    numbers = torch.cat((mean, dev), -1).squeeze(-2).half().numpy().view(np.uint8)
    return np.concatenate((signs, numbers), -1)


def reconstruct_keys(sketch: Bytes, page_size: int, head_dim: int, out: NDArray[np.float32]) -> NDArray[np.float32]:
    """What is left of the keys, [..., S, D]; in `out`, which has room for as many numbers: fresh memory costs more."""
    S, D = page_size, head_dim
    shape = sketch.shape[:-1]
    numbers = np.ascontiguousarray(sketch[..., S * D // 8 :]).view(np.float16).astype(np.float32)
    mean, dev = numbers[..., None, :D], numbers[..., None, D:]
    found = out[: int(np.prod(shape)) * S * D]
    np.take(SIGN_TABLE, sketch[..., : S * D // 8], axis=0, out=found.reshape(*shape, -1, 8), mode="clip")
    found = found.reshape(*shape, S, D)
    found *= dev
    found += mean
    return found


def attention_mass(q: Tensor, k: Tensor, scale: float, kv_heads: int) -> Tensor:
    """Attention that keys [P, N, D] of the first kv heads, of `heads`, get from queries [T, H, D]: [P, N].

    On average, from the newest queries only, among these keys only.
    """
    P, T = len(k), min(len(q), NUM_QUERIES)
    mine = q[-T:].reshape(T, kv_heads, -1, q.shape[-1])[:, :P].float()  # [T, P, R, D]
    x = scale * mine.permute(1, 0, 2, 3).flatten(1, 2) @ k.mT  # [P, T R, N]
    return torch.softmax(x, -1).mean(1)


def jaccard(mass: NDArray[np.float32], num_top_tokens: int) -> tuple[float, float]:
    """How alike the heads' n most important tokens are, masses [P, N]: mean Jaccard of pairs; and what it should be."""
    P, N = mass.shape
    sets = mass >= np.partition(mass, N - num_top_tokens, axis=1)[:, N - num_top_tokens, None]
    both = [float((sets[a] & sets[b]).sum() / (sets[a] | sets[b]).sum()) for a, b in combinations(range(P), 2)]
    ratio = num_top_tokens / N
    return (sum(both) / len(both) if both else 1.0), (ratio / (2 - ratio)) ** 0.6


def heads_agree(mass: NDArray[np.float32], ratio: float) -> bool:
    """Whether the heads agree on what is important, more than chance would, masses [P, N]."""
    found, least = jaccard(mass, max(int(ratio * mass.shape[1]), 1))
    return found >= least


def select_blocks(mass: NDArray[np.float32], page_size: int, ratio: float, prefetched: Ints) -> Ints:
    """Rows of a page of tokens each that are to be loaded, by masses [P, N]: those that were `sure`, then others."""
    rows = mass.sum(0).reshape(-1, page_size).sum(-1)
    others: Ints = np.delete(np.arange(len(rows), dtype=np.int32), prefetched)
    if heads_agree(mass, ratio):
        n = max(round(ratio * len(rows)), 1) - len(prefetched)
        others = np.sort(others[np.argsort(-rows[others], kind="stable")[:n]])
    return np.concatenate((prefetched, others))


def block_mass(mass: NDArray[np.float32], token_order: NDArray[np.uint16], page_size: int) -> NDArray[np.float32]:
    """What a span's rows were looked at on average, by masses [n S] of its tokens and where they lie: [n]."""
    found: NDArray[np.float32] = mass[token_order].reshape(-1, page_size).sum(-1)
    return found


@dataclass
class SpanMetadata:
    """What lies behind the layers of a span: of M layers of n rows of S tokens the sketches of P heads, which token of
    the span lies where, and the average mass of each, in the order of the text.
    """

    sketches: Bytes  # [M, n, P, bytes]
    token_order: NDArray[np.uint16]  # [M, n S]
    mass: NDArray[np.float32]  # [M, n S]

    def attention_shares(self, page_size: int) -> NDArray[np.float32]:
        """Of what was looked at in a layer that every row has, beside the average, [M, n]; all alike before."""
        rows = np.take_along_axis(self.mass, self.token_order.astype(np.int64), 1)
        rows = rows.reshape(len(rows), -1, page_size).sum(-1)
        mean = rows.mean(1, keepdims=True)
        found: NDArray[np.float32] = np.divide(rows, mean, out=np.ones_like(rows), where=mean > 0)
        return found

    @property
    def serialized(self) -> Bytes:
        """As they are kept."""
        parts: Sequence[NDArray[np.generic]] = (self.sketches, self.token_order, self.mass)
        return np.concatenate([np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in parts])


def metadata_size(num_layers: int, num_blocks: int, num_probe_heads: int, page_size: int, head_dim: int) -> int:
    """Of notes, in bytes."""
    return num_layers * num_blocks * (num_probe_heads * (page_size * head_dim // 8 + 4 * head_dim) + 6 * page_size)


def parse_metadata(
    data: Bytes, num_layers: int, num_blocks: int, num_probe_heads: int, page_size: int, head_dim: int
) -> SpanMetadata:
    """Notes from their bytes."""
    n = num_layers * num_blocks
    ends = np.cumsum([n * num_probe_heads * (page_size * head_dim // 8 + 4 * head_dim), n * page_size * 2])
    a, b, c = np.split(data.copy(), ends)
    order, mass = b.view(np.uint16).reshape(num_layers, -1), c.view(np.float32).reshape(num_layers, -1)
    return SpanMetadata(a.reshape(num_layers, num_blocks, num_probe_heads, -1), order, mass)
