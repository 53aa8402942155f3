"""Rotary positions: the angle by which each pair of a head's numbers is turned (Su et al., RoFormer, arXiv 2104.09864).

Two things vary between families: which numbers form a pair (halves: i with i + n/2, as in Llama; `pairs`: neighbours,
as in GPT-J), and how the frequencies are stretched for texts longer than those of the training.
What is not known here: layers and the cache. Keys are turned before they are cached, so a slot's position is baked in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Angles = tuple[Tensor, Tensor]  # cos and sin, [T, 1, n] each


@dataclass(frozen=True, eq=False)
class Rope:
    """Turns the first n = 2 * len(freqs) numbers of every head. `freqs` float32 [n / 2], radians per position."""

    freqs: Tensor
    interleaved: bool = False
    attention_factor: float = 1.0  # yarn multiplies cos and sin by it

    def angles(self, pos: Tensor, dtype: torch.dtype) -> Angles:
        """cos and signed sin for positions [T]: made once a step, in float32, and used by every layer."""
        a = pos[:, None, None].float() * self.freqs.to(pos.device)  # [T, 1, n/2]
        cos, sin = (a.cos() * self.attention_factor).to(dtype), (a.sin() * self.attention_factor).to(dtype)
        if self.interleaved:
            return cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)  # [T, 1, n] both
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)  # [T, 1, n] both

    def apply(self, x: Tensor, angles: Angles) -> Tensor:
        """Heads x [T, H, D], each pair (a, b) now (a cos - b sin, b cos + a sin), by the angles of their tokens."""
        cos, sin = angles
        n = cos.shape[-1]
        y = x[..., :n]
        # The other of the pair; roll and addcmul take half the time of computing the two halves one by one.
        other = y.view(*y.shape[:-1], -1, 2).flip(-1).flatten(-2) if self.interleaved else y.roll(n // 2, -1)
        turned = torch.addcmul(y * cos, other, sin)
        return turned if n == x.shape[-1] else torch.cat((turned, x[..., n:]), -1)

    def shift(self, keys: Tensor, offsets: Tensor) -> Tensor:
        """Keys [n, D] that were turned already, so many positions [n] further on."""
        return self.apply(keys[:, None], replace(self, attention_factor=1.0).angles(offsets, keys.dtype))[:, 0]


def get_rope_parameters(
    config: dict[str, Any], layer_type: str | None = None, default_theta: float = 10000.0
) -> dict[str, Any]:
    """What a config says of its rotary positions: `rope_theta`, `rope_type` and what that type needs.

    Reads both styles: `rope_parameters` (transformers 5; in some families one for each `kind` of layer), and the older
    `rope_theta` and `partial_rotary_factor` beside `rope_scaling`, whose type was called `type`. `theta` is a default.
    """
    old = {k: config[k] for k in ("rope_theta", "partial_rotary_factor") if config.get(k) is not None}
    new = config.get("rope_parameters") or {}
    p = {"rope_theta": default_theta, **old, **(config.get("rope_scaling") or {}), **(new.get(layer_type, new) or {})}
    p["rope_type"] = p.get("rope_type") or p.get("type") or "default"
    original = "original_max_position_embeddings"
    p[original] = config.get(original) or p.get(original) or config.get("max_position_embeddings")
    return p


def get_rope(dim: int, params: dict[str, Any], interleaved: bool = False) -> Rope:
    """The rotation of `dim` numbers a head as `parameters` describes it.

    Raises ValueError for a kind of stretching that is not known here.
    """
    theta, kind = params["rope_theta"], params["rope_type"]
    freqs = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # [n/2]
    if kind == "default":
        return Rope(freqs, interleaved)
    if kind == "linear":
        return Rope(freqs / params["factor"], interleaved)
    if kind == "llama3":
        return Rope(_llama3_freqs(freqs, params), interleaved)
    if kind == "yarn":
        return Rope(_yarn_freqs(freqs, dim, params), interleaved, _yarn_attention_factor(params))
    raise ValueError(f"rope type {kind!r} is not supported: one of default, linear, llama3, yarn")


def _llama3_freqs(freqs: Tensor, params: dict[str, Any]) -> Tensor:
    """Llama 3.1: slow frequencies are divided by the factor, fast ones kept, those between blended."""
    turns = params["original_max_position_embeddings"] * freqs / (2 * math.pi)  # in the original context
    lo, hi = params["low_freq_factor"], params["high_freq_factor"]
    keep = ((turns - lo) / (hi - lo)).clamp(0, 1)
    return keep * freqs + (1 - keep) * freqs / params["factor"]


def _yarn_freqs(freqs: Tensor, dim: int, params: dict[str, Any]) -> Tensor:
    """YaRN (arXiv 2309.00071): like Llama 3's blend, but linear in the dimension."""

    def dimension(turns: float) -> float:  # the one that turns so often in the original context
        turn = params["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return dim * math.log(turn) / (2 * math.log(params["rope_theta"]))

    lo, hi = dimension(params.get("beta_fast") or 32), dimension(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        lo, hi = math.floor(lo), math.ceil(hi)
    lo, hi = max(lo, 0), min(hi, dim - 1)
    stretch = ((torch.arange(len(freqs)) - lo) / (hi - lo if hi != lo else 1e-3)).clamp(0, 1)
    return (1 - stretch) * freqs + stretch * freqs / params["factor"]


def _yarn_attention_factor(params: dict[str, Any]) -> float:
    """YaRN's sharper softmax: the factor on cos and sin, so its square on q.k."""

    def gain(m: float) -> float:
        return 0.1 * m * math.log(params["factor"]) + 1.0 if params["factor"] > 1 else 1.0

    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    m, all_dim = params.get("mscale"), params.get("mscale_all_dim")
    return gain(m) / gain(all_dim) if m and all_dim else gain(1.0)
