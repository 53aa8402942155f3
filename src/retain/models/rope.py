"""Rotary position embeddings (RoPE): rotate pairs of a head's elements by position (RoFormer, arXiv 2104.09864).

Families differ in two ways. One is which elements form a pair: i and i + n/2 as in Llama, or (`interleaved`) neighbours
as in GPT-J. The other is how frequencies are scaled for texts longer than those in training.
Keys are rotated before they are cached, so a slot's key contains its position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from retain.files import quote

Angles = tuple[Tensor, Tensor]  # cos and sin, [T, 1, n] each


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotate the first n = 2 * len(freqs) elements of every head. `freqs` float32 [n / 2], radians per position."""

    freqs: Tensor
    interleaved: bool = False
    attention_factor: float = 1.0  # factor on cos and sin, used by YaRN

    def angles(self, pos: Tensor, dtype: torch.dtype) -> Angles:
        """Return cos and signed sin of positions [T], computed in float32. All layers of a step share them."""
        angle = pos[:, None, None].float() * self.freqs.to(pos.device)  # [T, 1, n/2]
        cos, sin = (angle.cos() * self.attention_factor).to(dtype), (angle.sin() * self.attention_factor).to(dtype)
        if self.interleaved:
            return cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)  # [T, 1, n] both
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)  # [T, 1, n] both

    def apply(self, x: Tensor, angles: Angles) -> Tensor:
        """Rotate heads x [T, H, D]: each pair (a, b) becomes (a cos - b sin, b cos + a sin)."""
        cos, sin = angles
        n = cos.shape[-1]
        y = x[..., :n]
        # Each element's partner. roll and addcmul take half the time of two separate halves.
        partner = y.view(*y.shape[:-1], -1, 2).flip(-1).flatten(-2) if self.interleaved else y.roll(n // 2, -1)
        rotated = torch.addcmul(y * cos, partner, sin)
        return rotated if n == x.shape[-1] else torch.cat((rotated, x[..., n:]), -1)

    def shift(self, keys: Tensor, offsets: Tensor) -> Tensor:
        """Rotate keys [n, D] further, by `offsets` positions [n]."""
        return self.apply(keys[:, None], replace(self, attention_factor=1.0).angles(offsets, keys.dtype))[:, 0]


def get_rope_parameters(
    config: dict[str, Any], layer_type: str | None = None, default_theta: float = 10000.0
) -> dict[str, Any]:
    """Return a config's RoPE parameters: `rope_theta`, `rope_type` and the options of that type.

    Reads both styles. `rope_parameters` is that of transformers 5, where some families have one for each `layer_type`.
    The older style has `rope_theta` and `partial_rotary_factor` beside `rope_scaling`, whose type may be named `type`.
    """
    old = {k: config[k] for k in ("rope_theta", "partial_rotary_factor") if config.get(k) is not None}
    new = config.get("rope_parameters") or {}
    p = {"rope_theta": default_theta, **old, **(config.get("rope_scaling") or {}), **(new.get(layer_type, new) or {})}
    p["rope_type"] = p.get("rope_type") or p.get("type") or "default"
    original = "original_max_position_embeddings"
    p[original] = config.get(original) or p.get(original) or config.get("max_position_embeddings")
    return p


def get_rope(dim: int, params: dict[str, Any], interleaved: bool = False) -> Rope:
    """Return the Rope of the first `dim` elements of a head (see get_rope_parameters).

    Raises ValueError for an unknown `rope_type`.
    """
    theta, rope_type = params["rope_theta"], params["rope_type"]
    freqs = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # [n/2]
    if rope_type == "default":
        return Rope(freqs, interleaved)
    if rope_type == "linear":
        return Rope(freqs / params["factor"], interleaved)
    if rope_type == "llama3":
        return Rope(_llama3_freqs(freqs, params), interleaved)
    if rope_type == "yarn":
        return Rope(_yarn_freqs(freqs, dim, params), interleaved, _yarn_attention_factor(params))
    raise ValueError(f"rope type {quote(rope_type)} is not supported: one of default, linear, llama3, yarn")


def _llama3_freqs(freqs: Tensor, params: dict[str, Any]) -> Tensor:
    """Scale as Llama 3.1: divide low frequencies by the factor, keep high ones, blend those between."""
    turns = params["original_max_position_embeddings"] * freqs / (2 * math.pi)  # turns over the original context
    lo, hi = params["low_freq_factor"], params["high_freq_factor"]
    keep = ((turns - lo) / (hi - lo)).clamp(0, 1)
    return keep * freqs + (1 - keep) * freqs / params["factor"]


def _yarn_freqs(freqs: Tensor, dim: int, params: dict[str, Any]) -> Tensor:
    """Scale as YaRN (arXiv 2309.00071): a blend as in Llama 3, but linear in the dimension."""

    def dimension(turns: float) -> float:
        """Return the fractional dimension that makes `turns` turns over the original context."""
        wavelength = params["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(params["rope_theta"]))

    lo, hi = dimension(params.get("beta_fast") or 32), dimension(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        lo, hi = math.floor(lo), math.ceil(hi)
    lo, hi = max(lo, 0), min(hi, dim - 1)
    ramp = ((torch.arange(len(freqs)) - lo) / (hi - lo if hi != lo else 1e-3)).clamp(0, 1)
    return (1 - ramp) * freqs + ramp * freqs / params["factor"]


def _yarn_attention_factor(params: dict[str, Any]) -> float:
    """Return YaRN's factor on cos and sin; its square sharpens the softmax over q.k."""

    def gain(m: float) -> float:
        return 0.1 * m * math.log(params["factor"]) + 1.0 if params["factor"] > 1 else 1.0

    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    m, all_dim = params.get("mscale"), params.get("mscale_all_dim")
    return gain(m) / gain(all_dim) if m and all_dim else gain(1.0)
