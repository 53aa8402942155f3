"""Programs in torch. ReferenceProgram is the definition of a whole model, which every other program must equal.

An operation takes rows to new rows and writes nothing in place, so a step can be differentiated. Rows have the
program's dtype; a quantized weight is multiplied in float32.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import nan
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from retain.kernels.api import CPU, KV, Batch, GroupInputs
from retain.kernels.attention_params import AttentionParams
from retain.kernels.experts import Experts
from retain.kernels.head_columns import HeadColumns
from retain.kernels.linear_attention import LinearAttention
from retain.kernels.reference.experts import ExpertWeights, mix_experts
from retain.kernels.reference.linear_attention import attend_linearly, convolve
from retain.kernels.reference.rows import (
    activate,
    join_columns,
    linear,
    linear_by_head,
    replace_columns,
    rms_norm,
    select_indices,
    split_heads,
)
from retain.kernels.rope import Angles, Rope
from retain.kernels.shape_checks import LOGITS_BUFFER, BufferShapes, check_batch, numel_or_none
from retain.kernels.weight import ConvertedWeights, UnpackedWeight, Weight, row_energies, split_stack, unpack

# (layer, q [T, H, D], k [T, G, D], v [T, G, v_dim], params) -> o [T, H, v_dim]; q and k are rotated, k has lost its
# offset. k and v have no heads where the layer attends to the cache of another one.
Attend = Callable[[int, Tensor, Tensor, Tensor, AttentionParams], Tensor]
Write = Callable[[KV, Tensor, Tensor, Tensor, Tensor], None]  # Backend.write
AttendToSlots = Callable[..., Tensor]  # Backend.attend


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step as the operations of a program see it."""

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # [T]
    logits_indices: Tensor  # int64 [N]
    buffers: dict[int, Tensor] = field(default_factory=dict)  # the rows [T, width] of each buffer written until now


@dataclass(frozen=True, kw_only=True)
class ReferenceStep(Step):
    """A step, and how its tokens attend."""

    attend: Attend
    use_cache: Callable[[int], GroupInputs]  # of a layer without attention
    angles: dict[Rope, Angles] = field(default_factory=dict)  # of `positions`; all layers share them


S = TypeVar("S", bound=Step)


class TorchProgram(Generic[S]):
    """The operations of a program as functions in torch, but for attention. See `Program` for what they compute."""

    def __init__(self, dtype: torch.dtype, device: torch.device = CPU):
        self.dtype = dtype
        self.device = device
        self._shapes = BufferShapes()
        self._ops: list[tuple[int, Callable[[S], Tensor]]] = []  # the buffer that is written, and its new rows
        self._weights = ConvertedWeights(self._convert_weight)
        self._weight_bytes = 0

    def buffer(self, name: str, width: int) -> int:
        """Return the buffer of that name; create it at the first call."""
        buffer_id = self._shapes.find(name, width)
        return self._shapes.register(name, len(self._shapes.buffer_ids), width) if buffer_id is None else buffer_id

    def logits_buffer(self, width: int) -> int:
        """Create the buffer of the logits."""
        return self._shapes.register("logits", LOGITS_BUFFER, width)

    def embedding(self, out: int, table: Weight, factor: float = 1.0) -> None:
        """Emit a lookup by token id. Of a quantized table only the rows of the given ids are dequantized."""
        self._shapes.check_embedding(out, table.shape[1])
        weight = self._weights.get(table)
        if factor == 1:
            self._emit(out, lambda s: self._look_up(s.input_ids, weight))
        else:
            self._emit(out, lambda s: self._look_up(s.input_ids, weight) * factor)

    def position_embedding(self, out: int, table: Weight, offset: int = 0) -> None:
        """Emit a lookup by position, added to `out`. Padding tokens have position -1."""
        self._shapes.check_embedding(out, table.shape[1])
        weight = self._weights.get(table)
        self._emit(out, lambda s: self._look_up((s.positions + offset).clamp(min=0), weight), add=True)

    def norm(
        self,
        x: int,
        out: int,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        subtract_mean: bool,
        add: bool = False,
        first: int = 0,
    ) -> None:
        """Emit a LayerNorm, in the program's dtype, or an RMSNorm, in float32."""
        heads, n = self._shapes.check_norm(x, out, weight.shape, numel_or_none(bias), first)
        w = weight.to(self.dtype) if subtract_mean else weight.float()
        b = self._to_dtype(bias)
        columns = slice(first, first + heads * n)
        is_by_head = weight.dim() == 2

        def compute(s: S) -> Tensor:
            rows = split_heads(s.buffers[x][:, columns], heads) if is_by_head else s.buffers[x]
            y = F.layer_norm(rows, (n,), w, b, eps) if subtract_mean else rms_norm(rows, w, eps)
            y = s.buffers[out][:, columns] + y.flatten(1) if add else y.flatten(1)
            return replace_columns(s.buffers[out], y, first) if is_by_head else y

        self._emit(out, compute)

    def linear(self, x: int, out: int, weight: Weight, bias: Tensor | None = None, add: bool = False) -> None:
        """Emit a matrix product."""
        self._shapes.check_linear(x, out, weight.shape, numel_or_none(bias))
        parts = [(self._weights.get(w), self._to_dtype(b)) for w, _, b in split_stack(weight, bias)]
        self._emit(out, lambda s: join_columns([linear(s.buffers[x], w, b) for w, b in parts]), add)

    def head_linear(self, x: int, out: int, weight: Weight, source: HeadColumns, target: HeadColumns) -> None:
        """Emit a matrix product of each head."""
        self._shapes.check_head_linear(x, out, weight.shape, source, target)
        w = self._weights.get(weight)
        self._emit_columns(x, out, source, target, lambda heads: self._multiply_heads(heads, w))

    def copy_columns(self, x: int, out: int, source: HeadColumns, target: HeadColumns) -> None:
        """Emit a copy of the columns of heads."""
        self._shapes.check_copy_columns(x, out, source, target)
        self._emit_columns(x, out, source, target, lambda heads: heads)

    def activation(self, x: int, out: int, act: str, n: int, gated: bool = False) -> None:
        """Emit an activation function, gated or not."""
        self._shapes.check_activation(x, out, act, n, gated)
        self._emit(out, lambda s: activate(s.buffers[x], act, n, gated))

    def experts(self, x: int, scores: int, out: int, experts: Experts, add: bool = False) -> None:
        """Emit a mixture of experts."""
        self._shapes.check_experts(x, scores, out, experts)
        gate_up = self._weights.get(experts.gate_up)
        down = self._weights.get(experts.down)
        gate_up_bias = self._to_dtype(experts.gate_up_bias)
        down_bias = self._to_dtype(experts.down_bias)
        router = experts.router.map_tensors(lambda x: x.to(self.device, torch.float32))
        mixture = ExpertWeights(replace(experts, router=router), gate_up, down, gate_up_bias, down_bias)
        self._emit(out, lambda s: mix_experts(s.buffers[x], s.buffers[scores], mixture), add)

    def clip(self, x: int, limit: float) -> None:
        """Emit a clamp."""
        self._emit(x, lambda s: s.buffers[x].clamp(-limit, limit))

    def softcap(self, x: int, limit: float) -> None:
        """Emit a bound that bends."""
        self._emit(x, lambda s: limit * torch.tanh(s.buffers[x] / limit))

    def multiply(self, x: int, by: int, first: int = 0) -> None:
        """Emit a product of two buffers."""
        self._shapes.check_multiply(x, by, first)
        end = first + self._shapes.widths[x]
        self._emit(x, lambda s: s.buffers[x] * s.buffers[by][:, first:end])

    def scale(self, x: int, factors: Tensor) -> None:
        """Emit a product with factors."""
        n = len(factors)
        self._shapes.check_scale(x, n)
        factors = factors.to(self.device, self.dtype)
        self._emit(x, lambda s: replace_columns(s.buffers[x], s.buffers[x][:, :n] * factors))

    def scale_by_position(self, x: int, n: int, beta: float, period: int) -> None:
        """Emit a product with factors that grow with the position. Padding tokens have position -1."""
        self._shapes.check_scale_by_position(x, n, period)

        def compute(s: S) -> Tensor:
            periods = s.positions.clamp(min=0) // period
            factors = (1 + beta * torch.log1p(periods.float())).to(self.dtype)
            return replace_columns(s.buffers[x], s.buffers[x][:, :n] * factors[:, None])

        self._emit(x, compute)

    def row_energies(self, weight: Weight, factors: Tensor) -> Tensor:
        """Compute the energies of rows."""
        return row_energies(weight, factors)

    def gather_rows(self, x: int, out: int) -> None:
        """Emit the selection of the rows whose logits the caller needs."""
        self._shapes.check_gather_rows(x, out)
        self._emit(out, lambda s: select_indices(s.buffers[x], s.logits_indices))

    def finalize(self) -> None:
        """Forget which weights were converted; the operations keep what they use."""
        self._weights.clear()

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights, as they are stored."""
        return self._weight_bytes

    @property
    def vector_dtype(self) -> torch.dtype:
        """Return the program's dtype: torch wants biases and norms in that of the rows."""
        return self.dtype

    @abstractmethod
    def attend(
        self,
        qkv: int,
        out: int,
        layer: int,
        heads: tuple[int, int, int],
        params: AttentionParams,
        rope: Rope | None = None,
    ) -> None:
        """Emit a layer's rotation, write and attention."""

    def compile_ahead(self, compute: Callable[[], None]) -> None:
        """See Program.compile_ahead: there is nothing to compile."""

    @abstractmethod
    def run(self, batch: Batch) -> Tensor:
        """Compute one step."""

    def _emit(self, out: int, compute: Callable[[S], Tensor], add: bool = False) -> None:
        """Append an operation: what it computes replaces the rows of `out`, or is added to them."""
        self._ops.append((out, (lambda s: s.buffers[out] + compute(s)) if add else compute))

    def _emit_columns(
        self, x: int, out: int, source: HeadColumns, target: HeadColumns, compute: Callable[[Tensor], Tensor]
    ) -> None:
        """Append an operation from the columns of heads [T, H, n] to those of another buffer."""
        width = self._shapes.widths[out]

        def replace_heads(s: S) -> Tensor:
            rows = s.buffers[x]
            earlier = s.buffers[out] if out in s.buffers else rows.new_full((len(rows), width), nan)
            return target.replace(earlier, compute(source.view(rows)))

        self._emit(out, replace_heads)

    def _run_ops(self, s: S) -> Tensor:
        for out, compute in self._ops:
            s.buffers[out] = compute(s)
        return s.buffers[LOGITS_BUFFER].float()

    def _multiply_heads(self, heads: Tensor, weight: UnpackedWeight) -> Tensor:
        return linear_by_head(heads, weight)

    def _look_up(self, index: Tensor, weight: UnpackedWeight) -> Tensor:
        if isinstance(weight, Tensor):
            return F.embedding(index, weight)
        return weight.select_rows(index).dequantize(self.dtype)

    def _convert_weight(self, weight: Weight) -> UnpackedWeight:
        """Return a weight as operations read it. Called once for each."""
        matrix = unpack(weight)
        matrix = matrix.to(self.device, self.dtype) if isinstance(matrix, Tensor) else matrix
        tensors = [matrix] if isinstance(matrix, Tensor) else vars(matrix).values()
        self._weight_bytes += sum(x.nbytes for x in tensors)
        return matrix

    def _to_dtype(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(self.device, self.dtype)


class ReferenceProgram(TorchProgram[ReferenceStep]):
    """A program whose attention is that of a backend in torch, or any that a caller gives to `compute`."""

    def __init__(self, dtype: torch.dtype, write: Write, attend: AttendToSlots):
        """`write` and `attend` are the backend's own functions."""
        super().__init__(dtype)
        self._write = write
        self._attend = attend

    def attend(
        self,
        qkv: int,
        out: int,
        layer: int,
        heads: tuple[int, int, int],
        params: AttentionParams,
        rope: Rope | None = None,
    ) -> None:
        """Emit a layer's rotation and attention."""
        H, G, D = heads
        v_dim, has_kv = self._shapes.check_attention(qkv, out, heads, params, rope)
        num_written = G if has_kv else 0

        def compute(s: ReferenceStep) -> Tensor:
            qk, v = torch.split(s.buffers[qkv], [(H + num_written) * D, num_written * v_dim], dim=1)
            qk = split_heads(qk, H + num_written)
            if rope:
                if rope not in s.angles:
                    s.angles[rope] = rope.angles(s.positions, qk.dtype)
                qk = rope.apply(qk, s.angles[rope])
            q, k = torch.split(qk, [H, num_written], dim=1)
            if params.key_offset is not None:
                k = (k.float() - params.key_offset).to(k.dtype)
            v = v.view(len(v), num_written, v_dim)
            return s.attend(layer, q, k, v, params).flatten(1)

        self._emit(out, compute)

    def convolve(self, x: int, out: int, layer: int, weight: Tensor, bias: Tensor | None = None) -> None:
        """Emit a short convolution."""
        self._shapes.check_convolve(x, out, weight.shape, numel_or_none(bias))
        w = weight.float()
        b = None if bias is None else bias.float()

        def compute(s: ReferenceStep) -> Tensor:
            return convolve(s.buffers[x], s.use_cache(layer), s.positions, w, b)

        self._emit(out, compute)

    def linear_attention(
        self, qkv: int, gates: int, out: int, layers: tuple[int, int], params: LinearAttention
    ) -> None:
        """Emit linear attention."""
        self._shapes.check_linear_attention(qkv, gates, out, params)
        params = params.map_tensors(Tensor.float)

        def compute(s: ReferenceStep) -> Tensor:
            tokens, states = map(s.use_cache, layers)
            return attend_linearly(s.buffers[qkv], s.buffers[gates], tokens, states, s.positions, params)

        self._emit(out, compute)

    def compute(self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor, attend: Attend) -> Tensor:
        """Compute logits float32 [N, V] with an attention of the caller's, differentiably.

        See `Batch` for the tensors. `attend` is called for one layer after the other. Raises ValueError for a model
        with layers that cache states.
        """
        step = ReferenceStep(
            input_ids=input_ids,
            positions=positions,
            logits_indices=logits_indices,
            attend=attend,
            use_cache=_refuse_states,
        )
        return self._run_ops(step)

    @torch.no_grad()
    def run(self, batch: Batch) -> Tensor:
        """Compute one step."""
        check_batch(batch)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
            if batch.before_attention:
                batch.before_attention(layer, q)
            inputs = batch.layer(layer)
            has_kv = k.shape[1] > 0
            if has_kv:
                self._write(inputs.kv, inputs.slot_mapping, k, v, batch.positions)
            scoring = batch.scoring if has_kv else None
            return self._attend(q, inputs.kv, inputs.tables, batch.positions, params, scoring=scoring, layer=layer)

        def use_cache(layer: int) -> GroupInputs:
            if batch.before_attention:
                batch.before_attention(layer, torch.zeros(len(batch.input_ids), 0, 0))
            return batch.layer(layer)

        step = ReferenceStep(
            input_ids=batch.token_ids(),
            positions=batch.positions,
            logits_indices=batch.logits_indices,
            attend=attend,
            use_cache=use_cache,
        )
        return self._run_ops(step)


def _refuse_states(layer: int) -> GroupInputs:
    raise ValueError("a model with convolutions or linear attention cannot be computed without a cache")
