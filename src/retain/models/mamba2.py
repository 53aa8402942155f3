"""Mamba-2 (arXiv 2405.21060) as a layer: a short convolution, and linear attention with Mamba-2's rule behind it.

Letters: T fresh tokens, E hidden size, C channels of the convolution, W its window, H heads of V numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retain.files import quote
from retain.kernels.api import Program
from retain.kernels.kv_cache_spec import LayerCacheSpec
from retain.kernels.linear_attention import LinearAttention, Mamba2Rule
from retain.kernels.shape_checks import WidthError
from retain.models.layers import Layer, Linear, RMSNorm, load_linear, resolve_activation
from retain.models.linear_attention import linear_attention_specs, load_convolution_weight
from retain.models.weights import Weights


@dataclass(frozen=True, eq=False)
class Mamba2Mixer:
    """Compute out_proj(norm(attend(act(convolve(qkv))) * silu(z))), where z, qkv and gates are linear in x.

    The norm is one of each group of heads.
    """

    cache: int  # the number of its ConvolutionSpec; those of tokens and states follow
    params: LinearAttention
    qkv_proj: Linear  # [T, E] -> [C | B | x] of Mamba-2, [T, C]
    gates_proj: Linear  # [T, E] -> [T, H]
    z_proj: Linear  # [T, E] -> [T, H V]
    weight: Tensor  # [C, W], of the convolution
    bias: Tensor | None  # [C]
    act: str
    norm: Layer
    out_proj: Linear

    def emit(self, program: Program, x: int, out: int, add: bool = False) -> None:
        """See Layer."""
        p = self.params
        C = p.qkv_width
        n = p.num_value_heads * p.v_dim
        inputs = program.buffer(f"linear attention inputs {C}", C)
        qkv = program.buffer(f"linear attention qkv {C}", C)
        gates = program.buffer(f"linear attention gates {p.gates_width}", p.gates_width)
        z = program.buffer(f"linear attention z {n}", n)
        y = program.buffer(f"linear attention {n}", n)
        self.qkv_proj.emit(program, x, inputs)
        program.convolve(inputs, qkv, self.cache, self.weight, self.bias)
        program.activation(qkv, qkv, self.act, C)
        self.gates_proj.emit(program, x, gates)
        self.z_proj.emit(program, x, z)
        program.linear_attention(qkv, gates, y, (self.cache + 1, self.cache + 2), p)
        program.activation(z, z, "silu", n)
        program.multiply(y, z)
        self.norm.emit(program, y, y)
        self.out_proj.emit(program, y, out, add)


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
    norm = w["norm.weight"]
    found = in_proj.weight.shape[0], norm.numel(), channels if bias is None else bias.numel()
    if found != (n + channels + c.num_heads, n, channels):
        expected = [n + channels + c.num_heads, n, channels]
        raise WidthError(f"in_proj, norm and conv1d of Mamba-2 have {list(found)} rows, but {expected} are expected")
    z, x, b, c_rows, dt = torch.split(torch.arange(found[0]), [n, n, keys, keys, c.num_heads])
    qkv = torch.cat((c_rows, b, x))
    return Mamba2Mixer(
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
        z_proj=in_proj.select(z),
        weight=weight[qkv - n],
        bias=None if bias is None else bias[qkv - n],
        act=resolve_activation(c.act),
        norm=RMSNorm(norm.view(c.num_groups, -1), c.eps),
        out_proj=load_linear(w, "out_proj", bias=c.proj_bias),
    )


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
