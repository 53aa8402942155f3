"""Rotary position embeddings (RoPE): rotate pairs of a head's elements by position (RoFormer, arXiv 2104.09864).

One record goes from a family to the kernels (models/rope.py makes it from a config). Its methods are the definition.
Keys are rotated before they are cached, so a slot's key contains its position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

MEAN_POSITIONS = 4096
Angles = tuple[Tensor, Tensor]  # cos and sin, [T, 1, n] each


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotate the first n = 2 * len(freqs) elements of every head. `freqs` float32 [n / 2], radians per position.

    A pair is i and i + n/2 as in Llama, or (`interleaved`) neighbours as in GPT-J.
    """

    freqs: Tensor
    interleaved: bool = False
    attention_factor: float = 1.0  # factor on cos and sin, used by YaRN

    def angles(self, pos: Tensor, dtype: torch.dtype) -> Angles:
        """Return cos and signed sin of positions [T], computed in float32. All layers of a step share them."""
        angle = pos[:, None, None].float() * self.freqs.to(pos.device)  # [T, 1, n/2]
        cos = (angle.cos() * self.attention_factor).to(dtype)
        sin = (angle.sin() * self.attention_factor).to(dtype)
        if self.interleaved:
            return cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)  # [T, 1, n] both
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)  # [T, 1, n] both

    @cached_property
    def mean_angles(self) -> Angles:
        """Return the means over the first positions, [1, 1, n]. Rotation by them gives the mean of rotated numbers."""
        cos, sin = self.angles(torch.arange(MEAN_POSITIONS), torch.float32)
        return cos.mean(0, keepdim=True), sin.mean(0, keepdim=True)

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
