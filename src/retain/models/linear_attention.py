"""Layers of linear attention behind a short convolution (gated delta rule).

They cache what `KVCacheSpec` says for them, so a layer names its caches by number, as attention does.
Letters: T fresh tokens, E hidden size, C channels of a convolution, W its window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from retain.kernels import ops
from retain.kernels.linear_attention import LinearAttention
from retain.kernels.ops import Buffer, Operation, WidthError
from retain.kernels.slots.kv_cache_spec import LayerCacheSpec, LinearStateSpec, LinearTokensSpec, convolution_spec
from retain.models.layers import Layer, Linear, RMSNorm
from retain.models.weights import Weights

QK_NORM_EPS = 1e-6  # beside a sum of squares, in all models


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

    def emit(self, x: Buffer, out: Buffer) -> Iterator[Operation]:
        """Yield the operations of the layer, which fills buffer `out` [T, H V]."""
        p = self.params
        C = p.qkv_width
        inputs = Buffer(f"linear attention inputs {C}", C)
        qkv = Buffer(f"linear attention qkv {C}", C)
        gates = Buffer(f"linear attention gates {p.gates_width}", p.gates_width)
        yield from self.qkv_proj.emit(x, inputs)
        yield ops.Convolve(inputs, qkv, self.cache, self.weight, self.bias)
        yield ops.Activate(qkv, qkv, self.act)
        if self.qk_norm:
            yield from self.qk_norm.emit(qkv, qkv)
        yield from self.gates_proj.emit(x, gates)
        yield ops.AttendLinearly(qkv, gates, out, (self.cache + 1, self.cache + 2), p)


@dataclass(frozen=True, eq=False)
class GatedLinearAttention:
    """Compute out_proj of what `emit_gate` makes of linear attention and of z, which is linear in x."""

    attention: ConvolvedAttention
    z_proj: Linear  # [T, E] -> [T, H V]
    norm: Layer
    out_proj: Linear

    def emit(self, x: Buffer, out: Buffer, add: bool = False) -> Iterator[Operation]:
        """Yield the operations of the layer, which reads buffer `x` and writes `out`, or adds to it."""
        n = self.attention.width
        z = Buffer(f"linear attention z {n}", n)
        y = Buffer(f"linear attention {n}", n)
        yield from self.attention.emit(x, y)
        yield from self.z_proj.emit(x, z)
        yield ops.Activate(z, z, "silu")
        yield from self.emit_gate(y, z)
        yield from self.out_proj.emit(y, out, add)

    def emit_gate(self, y: Buffer, gate: Buffer) -> Iterator[Operation]:
        """Emit the product of the attention y with the gate, silu(z), and the norm."""
        raise NotImplementedError


class GatedDeltaNet(GatedLinearAttention):
    """Compute out_proj(norm(attention) * silu(z)). `norm` is one of each value head."""

    def emit_gate(self, y: Buffer, gate: Buffer) -> Iterator[Operation]:
        """Emit the product of the attention y with the gate, silu(z), and the norm."""
        yield from self.norm.emit(y, y)
        yield ops.Multiply(y, gate)


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
