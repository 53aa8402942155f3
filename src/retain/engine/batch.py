"""One step as flat tensors: the fresh tokens of all requests, one behind the other.

What is not known here: why these requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from retain.engine.scheduler import Share
from retain.kernels import Observe, Tables
from retain.kv.budget import Floats, Watch
from retain.kv.cache import Cache


@dataclass(frozen=True)
class Batch:
    """T fresh tokens of B requests."""

    ids: Tensor  # int64 [T]; this and all but `slots` on the host, for it is little
    pos: Tensor  # int32 [T]
    rows: Tensor  # int32 [B]
    starts: Tensor  # int32 [B + 1]
    slots: Tensor  # int32 [L, G, T], where the pool is
    wanted: Tensor  # int64 [N]: fresh tokens whose logits are
    split: list[int]  # [B]: how many of them each request has
    observe: Observe | None = None
    tables: Tables | None = None  # what they look at, if not at everything that their rows own
    before: Callable[[int, Tensor], None] | None = None  # told of every layer, with its queries, before it looks
    after: Callable[[int], None] | None = None  # and when it has looked


def collect(shares: Sequence[Share], cache: Cache) -> Batch:
    """The batch of these shares; their pages must be owned already (the scheduler sees to it)."""
    batch = flat(
        cache,
        [s.request.row for s in shares],
        [s.request.position for s in shares],
        [s.request.fresh(s.n) for s in shares],
        [s.request.wanted(s.n) for s in shares],
    )
    rows = batch.rows.tolist()
    before = cache.reuse.awaited(rows, batch.starts.tolist()) if cache.reuse else None
    return replace(
        batch, observe=observe(shares), before=before, after=cache.lend(rows, [s.request.witness for s in shares])
    )


def flat(
    cache: Cache,
    rows: Sequence[int | None],
    first: Sequence[int],
    fresh: Sequence[Sequence[int]],
    split: list[int],
) -> Batch:
    """Fresh tokens of these rows, from their first places in the text on; logits of the last `split` of each."""
    counts = np.array([len(f) for f in fresh], np.int32)
    starts = np.concatenate(([0], counts.cumsum(dtype=np.int32))).astype(np.int32)  # [B + 1]
    mine = np.array(rows, np.int32)  # [B]
    begins = np.array(first, np.int32) - starts[:-1]
    places = np.arange(starts[-1], dtype=np.int32) + np.repeat(begins, counts)  # [T], in their texts
    wanted = [np.arange(end - n, end) for end, n in zip(starts[1:].tolist(), split, strict=True)]
    return Batch(
        ids=torch.tensor([t for f in fresh for t in f]),
        pos=torch.from_numpy(places - np.repeat(cache.shift[mine], counts)),
        rows=torch.from_numpy(mine),
        starts=torch.from_numpy(starts),
        slots=cache.place(np.repeat(mine, counts), places),
        wanted=torch.from_numpy(np.concatenate(wanted)),
        split=split,
    )


def observe(shares: Sequence[Share]) -> Observe | None:
    """What the policies of these requests want fresh queries to leave; None where none wants anything."""
    certain = [s.n - len(s.request.drafts) for s in shares]  # drafts may be rejected: they leave nothing
    begins = [s.request.position for s in shares]
    places = [np.arange(b, b + n, dtype=np.int32) for b, n in zip(begins, certain, strict=True)]
    asked = [s.request.watch(p) for s, p in zip(shares, places, strict=True)]
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
