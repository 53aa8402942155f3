"""One step as flat tensors: the fresh tokens of all requests, one behind the other.

What is not known here: why these requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.engine.scheduler import Share
from retain.kernels import Observe, Tables
from retain.kv.budget import Floats, Watch
from retain.kv.cache import Cache


@dataclass(frozen=True)
class Batch:
    """T fresh tokens of B requests."""

    ids: Tensor  # int64 [T]
    pos: Tensor  # int32 [T]
    rows: Tensor  # int32 [B]
    starts: Tensor  # int32 [B + 1]
    slots: Tensor  # int32 [L, G, T]
    wanted: Tensor  # int64 [N]: fresh tokens whose logits are
    split: list[int]  # [B]: how many of them each request has
    observe: Observe | None = None
    tables: Tables | None = None  # what they look at, if not at everything that their rows own
    after: Callable[[int], None] | None = None  # told of every layer when it has looked


def collect(shares: Sequence[Share], cache: Cache) -> Batch:
    """The batch of these shares; their pages must be owned already (the scheduler sees to it)."""
    ids = [t for s in shares for t in s.request.fresh(s.n)]
    counts = np.array([s.n for s in shares], np.int32)
    starts = np.concatenate(([0], counts.cumsum(dtype=np.int32))).astype(np.int32)  # [B + 1]
    rows = np.array([s.request.row for s in shares], np.int32)  # [B]
    first = np.array([s.request.position for s in shares], np.int32)
    places = np.arange(len(ids), dtype=np.int32) + np.repeat(first - starts[:-1], counts)  # [T], in their texts
    split = [s.request.wanted(s.n) for s in shares]
    wanted = [np.arange(end - n, end) for end, n in zip(starts[1:].tolist(), split, strict=True)]
    return Batch(
        ids=torch.tensor(ids),
        pos=torch.from_numpy(places - np.repeat(cache.shift[rows], counts)),
        rows=torch.from_numpy(rows),
        starts=torch.from_numpy(starts),
        slots=torch.from_numpy(cache.place(np.repeat(rows, counts), places)),
        wanted=torch.from_numpy(np.concatenate(wanted)),
        split=split,
        observe=observe(shares, places, starts),
        after=cache.lend(rows.tolist()),
    )


def observe(shares: Sequence[Share], places: NDArray[np.int32], starts: NDArray[np.int32]) -> Observe | None:
    """What the policies of these requests want fresh queries to leave; None where none wants anything."""
    certain = [s.n - len(s.request.drafts) for s in shares]  # drafts may be rejected: they leave nothing
    asked = [s.request.watch(places[starts[b] : starts[b] + certain[b]]) for b, s in enumerate(shares)]
    if not any(asked):
        return None
    each = [w or Watch(np.zeros(n, np.float32)) for w, n in zip(asked, certain, strict=True)]
    guessed = [np.zeros(len(s.request.drafts), np.float32) for s in shares]
    taus = [np.ones(len(w.weights), np.float32) if w.tau is None else w.tau for w in each]
    return Observe(
        weights=torch.from_numpy(_alternate([w.weights for w in each], guessed)),
        tau=torch.from_numpy(_alternate(taus, [1 + x for x in guessed])),
        decay=torch.tensor([w.decay for w in each]),
        noise=torch.tensor([w.noise for w in each], dtype=torch.int32),
        seed=torch.tensor([s.request.noise_seed for s in shares], dtype=torch.int32),
        anew=torch.tensor([int(w.anew) for w in each], dtype=torch.int32),
    )


def _alternate(a: Sequence[Floats], b: Sequence[Floats]) -> Floats:
    """a[0], b[0], a[1], b[1], ... as one."""
    return np.concatenate([x for pair in zip(a, b, strict=True) for x in pair])
