"""What a press of kvpress is called with: the keys, values and queries of a prompt's layer, in the place of a module.

A press scores `keys` by the attention module that made them and by its input. Presses put the input through projections
and use it for nothing else, so the input here is each token's projections side by side, and a projection selects its
part.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from retain.files import shorten
from retain.kernels.ranks import ALL_HEADS, KVHeads
from retain.kernels.rope import Rope
from retain.kv.eviction.view import CacheView

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModuleConfig:
    """What presses read of a module's configuration."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_size: int


class AttentionModule:
    """Stand for the attention module of one layer: projections, sizes and rotary embedding under their usual names."""

    def __init__(self, config: ModuleConfig, layer_idx: int, scaling: float, v_dim: int, rope: Rope | None):
        self.config = config
        self.layer_idx = layer_idx
        self.scaling = scaling
        self.head_dim = config.head_dim
        self.num_key_value_heads = config.num_key_value_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self._widths = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self._v_width = config.num_key_value_heads * v_dim
        self._rope = rope

    def q_proj(self, hidden_states: Tensor) -> Tensor:
        """Return queries before they were rotated, [1, n, H D]."""
        return self._split(hidden_states)[0]

    def k_proj(self, hidden_states: Tensor) -> Tensor:
        """Return keys before they were rotated, [1, n, G D]."""
        return self._split(hidden_states)[1]

    def v_proj(self, hidden_states: Tensor) -> Tensor:
        """Return values, [1, n, G V]."""
        return self._split(hidden_states)[2]

    def rotary_emb(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of positions [1, n], [1, n, D] each, in the dtype of x."""
        D = self.head_dim
        freqs = self._rope.freqs.to(x.device) if self._rope else torch.zeros(0, device=x.device)
        angles = position_ids[..., None] * torch.cat((freqs, freqs.new_zeros(D // 2 - len(freqs))))
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def _split(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        return torch.split(hidden_states, [*self._widths, self._v_width], -1)


def half_split_order(rope: Rope | None, head_dim: int) -> Tensor:
    """Return the order of a head's numbers in which i and i + D / 2 are a pair, as in Llama; int64 [D].

    Those that are not rotated are paired anyhow: their angle is 0.
    """
    n = 2 * len(rope.freqs) if rope else 0
    order = torch.arange(head_dim)
    rotated = order[:n]
    rest = order[n:]
    if rope and rope.interleaved:
        first = rotated[0::2]
        second = rotated[1::2]
    else:
        first = rotated[: n // 2]
        second = rotated[n // 2 :]
    middle = len(rest) // 2
    return torch.cat((first, rest[:middle], second, rest[middle:]))


@lru_cache(maxsize=64)
def warn_once(message: str) -> None:
    """Log a warning, unless it is one of the last that were logged: each layer of a model has the same."""
    log.warning(message)


def call_press(press: Any, view: CacheView, compression_ratio: float, heads: KVHeads = ALL_HEADS) -> Tensor:
    """Return the scores of a press for the slots of a layer, [G, S], as of its `score`; those of holes are 0.

    The view has the queries of the whole prompt, of this rank's `heads`; the press scores those of all ranks together.
    Where it fails, a warning is logged, and all scores are 0: the oldest tokens go.
    """
    assert view.queries
    queries = view.queries
    rope = queries.rope
    G, R, n, D = queries.rotated.shape
    order = half_split_order(rope, D).to(view.pos.device)
    pos = view.pos[0].long()
    places = torch.zeros(G, n + 1, dtype=torch.long, device=pos.device)
    places.scatter_(1, torch.where(pos < 0, n, pos), torch.arange(pos.shape[1], device=pos.device).expand(G, -1))
    places = places[:, :n, None]  # [G, n, 1]: the slot of each token
    k = view.keys[0].gather(1, places.expand(-1, -1, D))
    v = view.values[0].gather(1, places.expand(-1, -1, view.values.shape[-1]))
    if (offset := queries.params.key_offset) is not None:
        offset = offset[:, None].to(k.device)
        k = k + (offset if view.key_factors is None else offset / view.key_factors[0])
    unrotated = k if rope is None else rope.shift(k.flatten(0, 1), -queries.pos.repeat(G)).view_as(k)
    q, k, unrotated, v = (heads.gather(x, 0) for x in (queries.unrotated, k, unrotated, v))
    G = len(k)
    by_token = q[..., order].flatten(0, 1), unrotated[..., order], v
    hidden_states = torch.cat([x.transpose(0, 1).flatten(1) for x in by_token], 1)[None]
    config = ModuleConfig(G * R, G, D, hidden_states.shape[-1])
    module = AttentionModule(config, queries.layer, queries.params.scale, v.shape[-1], rope)
    kwargs = {"position_embeddings": module.rotary_emb(k, queries.pos[None])}
    try:
        # Some presses draw numbers: equal prompts get equal ones, and no other request gets other ones for it.
        with torch.random.fork_rng([] if k.device.type == "cpu" else [k.device]):
            torch.manual_seed(0)
            press.compression_ratio = compression_ratio
            scores = press.score(module, hidden_states, k[None][..., order], v[None], None, kwargs)
        if scores.shape != (1, G, n) or not scores.isfinite().all():
            raise ValueError(f"scores {tuple(scores.shape)} are not {(1, G, n)}, or not finite")
    except Exception as error:  # a press is a user's code, and other requests are computed in the same step
        warn_once(f"{type(press).__name__} cannot score a prompt of {n} tokens: {shorten(error)}")
        return torch.zeros_like(pos, dtype=torch.float32)
    scores = heads.select(scores[0], 0).float()
    return torch.cat((scores, scores.new_zeros(len(pos), 1)), 1).gather(1, torch.where(pos < 0, n, pos))
