"""Layers without attention: short convolutions, and linear attention behind them (gated delta rule).

They cache what `KVCacheSpec` says for them, so a layer names its caches by number, as attention does.
Letters: T fresh tokens, E hidden size, C channels of a convolution, W its window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from retain.kernels.api import Program
from retain.kernels.shape_checks import WidthError
from retain.models.decoder import emit_residual_branch
from retain.models.layers import Layer, Linear
from retain.models.weights import Weights


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
