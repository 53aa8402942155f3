"""The definition of a look: which of the slots that a token sees it attends to, and what stands for the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from retain.kernels.api import KV
from retain.kernels.attention_params import AttentionParams
from retain.kernels.reference.slots import read_slots
from retain.kernels.reference.softmax import adjust_scores, softmax
from retain.kernels.slots.pool_dtypes import INT4, LARGEST_VALUE
from retain.kernels.slots.quantized_slots import from_bytes, rotate, to_bytes
from retain.kernels.slots.reinterpret import SKETCH_GROUP


@dataclass(frozen=True)
class Sketches:
    """The sketches of S slots: rotated keys [S, D], means of values [S / 16, V], and deviations [S], in float32."""

    keys: Tensor
    means: Tensor
    deviations: Tensor


@dataclass(frozen=True)
class Look:
    """What t tokens of a request attend to in one kv head: slots, bool [t, S], and means [S / 16, V] for the others.

    `scores` [R, t, S / 16] are the logs of the sums of their weights, of each query head.
    """

    attended: Tensor
    scores: Tensor
    means: Tensor

    def add_means(self, scores: Tensor, values: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """Return scores [t, S] of a query head, and values [S, V], with those of the means behind them."""
        return torch.cat((scores, self.scores[head]), -1), torch.cat((values, self.means))


def look(
    q: Tensor,
    sketches: Sketches,
    pos: Tensor,
    q_pos: Tensor,
    visible: Tensor,
    counts: Tensor,
    params: AttentionParams,
    heads: slice,
) -> Look:
    """Choose slots for the t tokens of a request in one kv head.

    q [t, R, D] are the queries of its query heads `heads`, pos [1, S] and q_pos [t, 1] positions, visible [t, S] what
    tokens see, and counts int32 [t] how many slots they choose; 0: all.
    """
    t, S = visible.shape
    x = params.scale * torch.einsum("trd,sd->rts", rotate(q), sketches.keys)
    x = adjust_scores(x, pos - q_pos, params, heads).masked_fill(~visible, -torch.inf)
    sinks = None if params.sink_logits is None else params.sink_logits[heads, None, None]
    is_whole = visible.view(t, S // SKETCH_GROUP, SKETCH_GROUP).all(-1).repeat_interleave(SKETCH_GROUP, -1)  # [t, S]
    priority = (softmax(x, sinks).mean(0) * sketches.deviations).masked_fill(~is_whole, -1.0)
    by_age = pos[0].argsort(descending=True, stable=True)  # of equal priorities the newest is first
    order = by_age[priority[:, by_age].argsort(dim=-1, descending=True, stable=True)]
    is_chosen = order.argsort(-1) < counts[:, None]
    attended = visible & (is_chosen | ~is_whole | (counts[:, None] == 0))
    others = x.masked_fill(attended, -torch.inf).view(len(x), t, S // SKETCH_GROUP, SKETCH_GROUP)
    return Look(attended, others.logsumexp(-1), sketches.means)


def sketch_slots(kv: KV, slots: Tensor) -> None:
    """Compute the sketches of slots int64 [n] from what they hold."""
    keys, means, deviations = _split(kv)
    S = kv.page_size
    if keys is not None:
        keys[slots // S, slots % S] = to_bytes(rotate(read_slots(kv, slots)[0]), torch.uint8)
    groups = torch.unique(slots // SKETCH_GROUP)
    page = groups * SKETCH_GROUP // S
    places = groups[:, None] * SKETCH_GROUP % S + torch.arange(SKETCH_GROUP)  # [n, 16]
    values = read_slots(kv, page[:, None] * S + places)[1]  # [n, 16, V]
    mean = values.mean(1).bfloat16()
    means[page, places[:, 0] // SKETCH_GROUP] = mean
    distances = (values - mean.float()[:, None]).norm(dim=-1)
    deviations[page[:, None], places] = distances.clamp(max=LARGEST_VALUE).bfloat16()


def read_sketches(kv: KV, pages: Tensor) -> Sketches:
    """Return the sketches of the slots of pages int64 [n]. Raises ValueError where the pool has none."""
    if kv.sketches is None:
        raise ValueError("tables.looks: the pool has no sketches")
    keys, means, deviations = _split(kv)
    copies = from_bytes(kv.k[pages] if keys is None else keys[pages], kv.k_dim)
    return Sketches(copies.flatten(0, 1), means[pages].float().flatten(0, 1), deviations[pages].float().flatten())


def _split(kv: KV) -> tuple[Tensor | None, Tensor, Tensor]:
    """View sketches as keys uint8 [P, S, n], if there are some, means [P, S / 16, V] and deviations [P, S]."""
    assert kv.sketches is not None
    P, size = kv.sketches.shape
    S = kv.page_size
    values = 2 * (S // SKETCH_GROUP * kv.v_dim)
    begin = size - values - 2 * S
    keys = None if kv.dtype == INT4 else kv.sketches[:, :begin].view(P, S, -1)
    means = kv.sketches[:, begin : begin + values].view(torch.bfloat16).view(P, -1, kv.v_dim)
    return keys, means, kv.sketches[:, begin + values :].view(torch.bfloat16)
