"""Mamba-2 (arXiv 2405.21060) as a layer: a short convolution, and linear attention with Mamba-2's rule behind it.

Letters: T fresh tokens, E hidden size, C channels of the convolution, W its window, H heads of V numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from retain.files import quote
from retain.kernels import ops
from retain.kernels.linear_attention import LinearAttention, Mamba2Rule
from retain.kernels.ops import Buffer, Operation, WidthError
from retain.kernels.slots.kv_cache_spec import LayerCacheSpec
from retain.models.layers import RMSNorm, load_linear, resolve_activation
from retain.models.linear_attention import (
    ConvolvedAttention,
    GatedLinearAttention,
    linear_attention_specs,
    load_convolution_weight,
)
from retain.models.weights import Weights


class Mamba2Mixer(GatedLinearAttention):
    """Compute out_proj(norm(attention * silu(z))). Rows of qkv are [C | B | x]; `norm` is one of each group."""

    def emit_gate(self, y: Buffer, gate: Buffer) -> Iterator[Operation]:
        """Emit the product of the attention y with the gate, silu(z), and the norm."""
        yield ops.Multiply(y, gate)
        yield from self.norm.emit(y, y)


@dataclass(frozen=True)
class Mamba2Config:
    """What a config says about layers of Mamba-2. Families have other names for it."""

    num_groups: int
    num_heads: int
    state_size: int
    head_dim: int
    window: int  # of the convolution
    act: str
    eps: float
    conv_bias: bool
    proj_bias: bool
    time_step_limits: tuple[float, float]

    @property
    def specs(self) -> tuple[LayerCacheSpec, ...]:
        """The caches of a layer, in the order of their use. Raises ValueError for sizes that slots cannot have."""
        if self.num_heads % self.num_groups:
            raise ValueError(f"{self.num_heads} heads of Mamba-2 cannot share {self.num_groups} groups")
        return linear_attention_specs(self.num_groups, self.num_heads, self.state_size, self.head_dim, self.window)


def load_mamba2(w: Weights, cache: int, c: Mamba2Config) -> Mamba2Mixer:
    """Load a layer of Mamba-2; `cache` is the number of its first cache.

    The rows of in_proj are z, x, B, C, dt, and the channels of the convolution x, B, C. Ours are C, B, x.
    """
    n = c.num_heads * c.head_dim
    keys = c.num_groups * c.state_size
    channels = n + 2 * keys
    in_proj = load_linear(w, "in_proj", bias=c.proj_bias)
    bias = w["conv1d.bias"] if c.conv_bias else None
    weight = load_convolution_weight(w, "conv1d.weight", channels, c.window)
    norm_weight = w["norm.weight"]
    found = in_proj.weight.shape[0], norm_weight.numel(), channels if bias is None else bias.numel()
    if found != (n + channels + c.num_heads, n, channels):
        expected = [n + channels + c.num_heads, n, channels]
        raise WidthError(f"in_proj, norm and conv1d of Mamba-2 have {list(found)} rows, but {expected} are expected")
    z, x, b, c_rows, dt = torch.split(torch.arange(found[0]), [n, n, keys, keys, c.num_heads])
    qkv = torch.cat((c_rows, b, x))
    attention = ConvolvedAttention(
        cache=cache,
        params=LinearAttention(
            num_key_heads=c.num_groups,
            num_value_heads=c.num_heads,
            k_dim=c.state_size,
            v_dim=c.head_dim,
            decay=-w["A_log"].float().exp(),
            time_bias=w["dt_bias"].float(),
            rule=Mamba2Rule(w["D"].float(), c.time_step_limits),
        ),
        qkv_proj=in_proj.select(qkv),
        gates_proj=in_proj.select(dt),
        weight=weight[qkv - n],
        act=resolve_activation(c.act),
        bias=None if bias is None else bias[qkv - n],
    )
    norm = RMSNorm(norm_weight.view(c.num_groups, -1), c.eps)
    return Mamba2Mixer(attention, in_proj.select(z), norm, load_linear(w, "out_proj", bias=c.proj_bias))


def read_time_step_limits(value: Any) -> tuple[float, float]:
    """Return the limits of a config, [0, infinity] for null. Raises ValueError.

    Infinity is a number in files of older versions of transformers, and {"__float__": "Infinity"} in newer ones.
    """
    if value is None:
        return 0.0, math.inf
    parts = value if isinstance(value, list | tuple) else ()
    limits = [math.inf if x == {"__float__": "Infinity"} else x for x in parts if not isinstance(x, bool)]
    are_numbers = len(limits) == 2 and all(isinstance(x, int | float) for x in limits)
    if not are_numbers or not 0 <= limits[0] <= limits[1] or limits[0] == math.inf:
        raise ValueError(f"time_step_limit is {quote(value)}, not two numbers from 0 on, the smaller one first")
    return float(limits[0]), float(limits[1])
