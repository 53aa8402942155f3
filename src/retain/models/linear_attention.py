"""Layers without attention: short convolutions, and linear attention behind them (gated delta rule).

They cache what `KVCacheSpec` says for them, so a layer names its caches by number, as attention does.
Letters: T fresh tokens, E hidden size, C channels of a convolution, W its window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from retain.kernels.api import Program
from retain.kernels.kv_cache_spec import LayerCacheSpec, LinearStateSpec, LinearTokensSpec, convolution_spec
from retain.kernels.linear_attention import LinearAttention
from retain.kernels.shape_checks import WidthError
from retain.models.decoder import emit_residual_branch
from retain.models.layers import Layer, Linear, RMSNorm
from retain.models.weights import Weights

QK_NORM_EPS = 1e-6  # beside a sum of squares, in all models


@dataclass(frozen=True, eq=False)
class StateLayer:
    """Compute x += mixer(norm1(x)), then x += mlp(norm2(x)), where the mixer is a layer of this file."""

    hidden_size: int
    norm1: Layer
    mixer: Layer
    norm2: Layer
    mlp: Layer
    attention: None = None

    def emit(self, program: Program, x: int) -> None:
        """Write the layer into a program; it updates buffer `x` in place."""
        for norm, branch in ((self.norm1, self.mixer), (self.norm2, self.mlp)):
            emit_residual_branch(program, x, self.hidden_size, norm, branch)


@dataclass(frozen=True, eq=False)
class ShortConvolution:
    """Compute out_proj(c * convolve(b * z)), where b, c and z are linear in x (LFM2, arXiv 2511.23404)."""

    cache: int  # the number of a ConvolutionSpec
    gates_proj: Linear  # [T, E] -> [b | c], [T, 2 C]
    in_proj: Linear  # [T, E] -> z, [T, C]
    weight: Tensor  # [C, W]
    bias: Tensor | None  # [C]
    out_proj: Linear

    def emit(self, program: Program, x: int, out: int, add: bool = False) -> None:
        """See Layer."""
        n = len(self.weight)
        gates = program.buffer(f"convolution gates {2 * n}", 2 * n)
        z = program.buffer(f"convolution input {n}", n)
        y = program.buffer(f"convolution {n}", n)
        self.gates_proj.emit(program, x, gates)
        self.in_proj.emit(program, x, z)
        program.multiply(z, gates)
        program.convolve(z, y, self.cache, self.weight, self.bias)
        program.multiply(y, gates, first=n)
        self.out_proj.emit(program, y, out, add)


@dataclass(frozen=True, eq=False)
class ConvolvedAttention:
    """Compute attend(act(convolve(qkv)), gates): linear attention behind a short convolution. Both are linear in x."""

    cache: int  # the number of its ConvolutionSpec; those of tokens and states follow
    params: LinearAttention
    qkv_proj: Linear  # [T, E] -> [T, C]
    gates_proj: Linear  # [T, E] -> a row of gates; see LinearAttention
    weight: Tensor  # [C, W], of the convolution
    act: str
    bias: Tensor | None = None  # [C], of the convolution
    qk_norm: Layer | None = None  # applied to the heads of q and k

    @property
    def width(self) -> int:
        """Return the numbers of all value heads, H V."""
        return self.params.num_value_heads * self.params.v_dim

    def emit(self, program: Program, x: int, out: int) -> None:
        """Write the operations into a program; they fill buffer `out` [T, H V]."""
        p = self.params
        C = p.qkv_width
        inputs = program.buffer(f"linear attention inputs {C}", C)
        qkv = program.buffer(f"linear attention qkv {C}", C)
        gates = program.buffer(f"linear attention gates {p.gates_width}", p.gates_width)
        self.qkv_proj.emit(program, x, inputs)
        program.convolve(inputs, qkv, self.cache, self.weight, self.bias)
        program.activation(qkv, qkv, self.act, C)
        if self.qk_norm:
            self.qk_norm.emit(program, qkv, qkv)
        self.gates_proj.emit(program, x, gates)
        program.linear_attention(qkv, gates, out, (self.cache + 1, self.cache + 2), p)


@dataclass(frozen=True, eq=False)
class GatedLinearAttention:
    """Compute out_proj of what `emit_gate` makes of linear attention and of z, which is linear in x."""

    attention: ConvolvedAttention
    z_proj: Linear  # [T, E] -> [T, H V]
    norm: Layer
    out_proj: Linear

    def emit(self, program: Program, x: int, out: int, add: bool = False) -> None:
        """See Layer."""
        n = self.attention.width
        z = program.buffer(f"linear attention z {n}", n)
        y = program.buffer(f"linear attention {n}", n)
        self.attention.emit(program, x, y)
        self.z_proj.emit(program, x, z)
        program.activation(z, z, "silu", n)
        self.emit_gate(program, y, z)
        self.out_proj.emit(program, y, out, add)

    def emit_gate(self, program: Program, y: int, gate: int) -> None:
        """Emit the product of the attention y with the gate, silu(z), and the norm."""
        raise NotImplementedError


class GatedDeltaNet(GatedLinearAttention):
    """Compute out_proj(norm(attention) * silu(z)). `norm` is one of each value head."""

    def emit_gate(self, program: Program, y: int, gate: int) -> None:
        """See GatedLinearAttention."""
        self.norm.emit(program, y, y)
        program.multiply(y, gate)


def make_qk_norm(p: LinearAttention) -> RMSNorm:
    """Return what gives heads of q and k length 1, as the gated delta rule needs (arXiv 2412.06464).

    It divides heads by (sum of squares + eps)^(1/2), and those of q by the root of their size too.
    """
    D = p.k_dim
    weight = torch.full((2 * p.num_key_heads, D), D**-0.5)
    weight[: p.num_key_heads] *= D**-0.5
    return RMSNorm(weight, QK_NORM_EPS / D)


def linear_attention_specs(
    num_key_heads: int, num_value_heads: int, k_dim: int, v_dim: int, window: int
) -> tuple[LayerCacheSpec, ...]:
    """Return the caches of a ConvolvedAttention with a convolution of this window, in the order of their use.

    Raises ValueError for sizes that slots cannot have.
    """
    for size in (k_dim, v_dim):
        if size % 8:
            raise ValueError(f"linear attention with heads of {size} numbers is not supported: only multiples of 8")
    channels = 2 * num_key_heads * k_dim + num_value_heads * v_dim
    tokens = LinearTokensSpec(num_value_heads, k_dim, v_dim)
    return convolution_spec(channels, window), tokens, LinearStateSpec(num_value_heads, k_dim, v_dim)


def load_convolution_weight(w: Weights, name: str, channels: int, window: int) -> Tensor:
    """Load the weight [C, W] of a convolution, [C, 1, W] in the file. Raises WidthError for another shape."""
    weight = w[name]
    if weight.shape != (channels, 1, window):
        expected = [channels, 1, window]
        raise WidthError(f"a convolution has a weight {list(weight.shape)}, but {expected} is expected")
    return weight.squeeze(1)


def split_short_convolution(in_proj: Linear) -> tuple[Linear, Linear]:
    """Return the layers of [b | c] and of z, given one whose output is [b | c | z]."""
    rows = torch.arange(in_proj.weight.shape[0])
    n = len(rows) // 3
    return in_proj.select(rows[: 2 * n]), in_proj.select(rows[2 * n :])
