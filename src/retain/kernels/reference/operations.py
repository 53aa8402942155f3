"""What each operation computes, in torch: the definition that every backend equals.

A function takes an operation and returns how a step computes the new rows of its `out`. It writes nothing in place, so
a step can be differentiated. Rows have the program's dtype; a quantized weight is multiplied in float32. What is
returned holds no matrix of a file, so that it can be freed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from math import nan
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from retain.kernels import ops
from retain.kernels.api import CPU, GroupInputs
from retain.kernels.attention_params import AttentionParams
from retain.kernels.reference.experts import mix_experts
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
from retain.kernels.weights.quantized import QuantizedWeight
from retain.kernels.weights.weight import ConvertedWeights, Weight, split_kinds, unpack

# (cache, q [T, H, D], k [T, G, D], v [T, G, v_dim], params) -> o [T, H, v_dim]; q and k are rotated, k has lost its
# offset. k and v have no heads where the layer attends to a cache that an earlier one has written.
AttendToCache = Callable[[int, Tensor, Tensor, Tensor, AttentionParams], Tensor]
WriteToCache = Callable[[int, Tensor, Tensor], None]  # of cache, k and v, as above


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step as the operations of a program see it."""

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # [T]
    logits_indices: Tensor  # int64 [N]
    hidden_states: Tensor | None = None  # [B, E]; see Batch
    first_tokens: Tensor | None = None  # int64 [B]: the first fresh token of each request
    adapters: Tensor | None = None  # [T]; see Batch
    buffers: dict[int, Tensor] = field(default_factory=dict)  # the rows [T, width] of each buffer written until now


@dataclass(frozen=True, kw_only=True)
class ReferenceStep(Step):
    """A step, and how its tokens attend."""

    attend: AttendToCache
    write: WriteToCache
    use_cache: Callable[[int], GroupInputs]  # of a layer without attention
    angles: dict[Rope, Angles] = field(default_factory=dict)  # of `positions`; all layers share them


T = TypeVar("T")
Compute = Callable[[Any], Tensor]  # from a step to the new rows of a buffer


class Operands:
    """What the operations of a program are converted to: numbers of buffers, and weights in the program's own form."""

    def __init__(self, dtype: torch.dtype, device: torch.device = CPU, others: Operands | None = None):
        """`others` are those of a program whose converted weights this one may use."""
        self.dtype = dtype
        self.device = device
        self.buffers = ops.BufferNumbers(lambda buffer: next(self._numbers))
        self._numbers = count()
        self.weights: ConvertedWeights[Tensor | QuantizedWeight] = ConvertedWeights(
            self.convert, others.weights if others else None
        )
        self.weight_bytes = 0

    def convert(self, weight: Weight) -> Tensor | QuantizedWeight:
        """Return a weight as operations read it. Called once for each."""
        matrix = unpack(weight)
        matrix = matrix.to(self.device, self.dtype) if isinstance(matrix, Tensor) else matrix
        tensors = [matrix] if isinstance(matrix, Tensor) else vars(matrix).values()
        self.weight_bytes += sum(x.nbytes for x in tensors)
        return matrix

    def to_dtype(self, x: Tensor | None) -> Tensor | None:
        """Return a tensor of the program's dtype and device."""
        return None if x is None else x.to(self.device, self.dtype)


def embed(o: Operands, op: ops.Embed) -> Compute:
    """Look up rows by token id. Of a quantized table only the rows of the given ids are dequantized."""
    return find_rows(op, o.weights(op.table), lambda index, table: look_up(index, table, o.dtype))


def find_rows(op: ops.Embed, table: T, find: Callable[[Tensor, T], Tensor]) -> Compute:
    """Return how `find` looks up the rows of a step's tokens: of those that the table does not have, zeros."""
    factor = op.factor
    first = op.first
    end = op.table.shape[0]

    def compute(s: Step) -> Tensor:
        if first is None:
            rows = find(s.input_ids, table)
            return rows if factor == 1 else rows * factor
        index = s.input_ids - first
        is_absent = (index < 0) | (index >= end)
        rows = find(index.masked_fill(is_absent, 0), table) * factor
        return rows.masked_fill(is_absent[:, None], 0)

    return compute


def all_gather(o: Operands, op: ops.AllGather) -> Compute:
    """Put the rows of all ranks side by side."""
    x = o.buffers[op.x]
    group = op.group
    return lambda s: group.all_gather(s.buffers[x]).transpose(0, 1).flatten(1)


def all_reduce(o: Operands, op: ops.AllReduce) -> Compute:
    """Add up the rows of all ranks, one rank after the other."""
    x = o.buffers[op.x]
    group = op.group
    return replace_or_add(o, op, lambda s: add_in_order(group.all_gather(s.buffers[x])), op.add)


def add_in_order(parts: Tensor) -> Tensor:
    """Return parts[0] + parts[1] + ..., in this order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def embed_position(o: Operands, op: ops.EmbedPosition) -> Compute:
    """Look up rows by position."""
    weight = o.weights(op.table)
    offset = op.offset
    return replace_or_add(o, op, lambda s: look_up((s.positions + offset).clamp(min=0), weight, o.dtype))


def norm(o: Operands, op: ops.Norm) -> Compute:
    """Normalize rows: by LayerNorm in the program's dtype, or by RMSNorm in float32."""
    x = o.buffers[op.x]
    out = o.buffers[op.out]
    n = op.weight.shape[-1]
    w = op.weight.to(o.dtype) if op.subtract_mean else op.weight.float()
    b = o.to_dtype(op.bias)
    columns = slice(op.first, op.first + op.heads * n)

    def compute(s: Step) -> Tensor:
        rows = split_heads(s.buffers[x][:, columns], op.heads) if op.is_by_head else s.buffers[x]
        y = F.layer_norm(rows, (n,), w, b, op.eps) if op.subtract_mean else rms_norm(rows, w, op.eps)
        y = s.buffers[out][:, columns] + y.flatten(1) if op.add else y.flatten(1)
        return replace_columns(s.buffers[out], y, op.first) if op.is_by_head else y

    return compute


def multiply_matrix(o: Operands, op: ops.MatMul) -> Compute:
    """Multiply rows with each matrix of a stack."""
    x = o.buffers[op.x]
    parts = [(o.weights(w), o.to_dtype(b)) for w, _, b in split_kinds(op.weight, op.bias)]
    return replace_or_add(o, op, lambda s: join_columns([linear(s.buffers[x], w, b) for w, b in parts]), op.add)


def add_low_rank(o: Operands, op: ops.LowRank) -> Compute:
    """Multiply the rows of each adapter's tokens with its matrices."""
    x = o.buffers[op.x]
    out = o.buffers[op.out]
    columns = slice(op.first, op.first + op.b.shape[2])
    a = op.a
    b = op.b
    ranks = op.ranks

    def compute(s: Step) -> Tensor:
        if s.adapters is None:
            return s.buffers[out]
        rows = s.buffers[out].clone()
        for i in set(s.adapters.tolist()) - {-1}:
            own = s.adapters == i
            r = int(ranks[i])
            low = linear(s.buffers[x][own], a[i, :r], None)
            rows[own, columns] += linear(low, b[i, :r].T, None)
        return rows

    return compute


def multiply_heads(o: Operands, op: ops.HeadMatMul) -> Compute:
    """Multiply the columns of each head with its matrix."""
    weight = o.weights(op.weight)
    return map_columns(o, op, lambda heads: linear_by_head(heads, weight))


def copy_columns(o: Operands, op: ops.CopyColumns) -> Compute:
    """Copy the columns of each head."""
    return map_columns(o, op, lambda heads: heads)


def compute_activation(o: Operands, op: ops.Activate) -> Compute:
    """Return a function that applies an activation, and multiplies by the gate where there is one."""
    x = o.buffers[op.x]
    return lambda s: activate(s.buffers[x], op.act, op.out.width, op.gated)


def compute_experts(o: Operands, op: ops.MixExperts) -> Compute:
    """Add up the experts that the router chooses."""
    x = o.buffers[op.x]
    scores = o.buffers[op.scores]
    e = op.experts
    mixture = replace(
        e,
        router=e.router.map_tensors(lambda x: x.to(o.device, torch.float32)),
        gate_up=o.weights(e.gate_up),
        down=o.weights(e.down),
        gate_up_bias=o.to_dtype(e.gate_up_bias),
        down_bias=o.to_dtype(e.down_bias),
    )
    return replace_or_add(o, op, lambda s: mix_experts(s.buffers[x], s.buffers[scores], mixture), op.add)


def clip(o: Operands, op: ops.Clip) -> Compute:
    """Return a function that limits the values of rows to [-limit, limit]."""
    out = o.buffers[op.out]
    return lambda s: s.buffers[out].clamp(-op.limit, op.limit)


def softcap(o: Operands, op: ops.Softcap) -> Compute:
    """Return a function that bounds the values of rows smoothly, by limit * tanh(x / limit)."""
    out = o.buffers[op.out]
    return lambda s: op.limit * torch.tanh(s.buffers[out] / op.limit)


def multiply(o: Operands, op: ops.Multiply) -> Compute:
    """Multiply rows with columns of others."""
    out = o.buffers[op.out]
    by = o.buffers[op.by]
    columns = slice(op.first, op.first + op.out.width)
    return lambda s: s.buffers[out] * s.buffers[by][:, columns]


def scale(o: Operands, op: ops.Scale) -> Compute:
    """Multiply the first columns with factors."""
    out = o.buffers[op.out]
    n = len(op.factors)
    factors = op.factors.to(o.device, o.dtype)
    return lambda s: replace_columns(s.buffers[out], s.buffers[out][:, :n] * factors)


def scale_by_position(o: Operands, op: ops.ScaleByPosition) -> Compute:
    """Multiply the first columns with a factor of the position."""
    out = o.buffers[op.out]

    def compute(s: Step) -> Tensor:
        periods = s.positions.clamp(min=0) // op.period
        factors = (1 + op.beta * torch.log1p(periods.float())).to(o.dtype)
        return replace_columns(s.buffers[out], s.buffers[out][:, : op.n] * factors[:, None])

    return compute


def load_hidden_states(o: Operands, op: ops.LoadHiddenStates) -> Compute:
    """Shift rows by one token. The computation raises ValueError where the step has no states of this width."""
    width = op.out.width
    x = None if op.x is None else o.buffers[op.x]

    def compute(s: Step) -> Tensor:
        if s.hidden_states is None or s.first_tokens is None or s.hidden_states.shape[1] != width:
            raise ValueError(f"the program needs {width} hidden numbers of each request")
        states = s.hidden_states.to(o.device, o.dtype)
        if x is not None:
            return s.buffers[x].roll(1, 0).index_copy(0, s.first_tokens, states)
        if len(states) != len(s.positions):
            raise ValueError("the program needs one fresh token of each request")
        return states

    return compute


def gather_rows(o: Operands, op: ops.GatherRows) -> Compute:
    """Select the rows whose logits the caller needs."""
    x = o.buffers[op.x]
    return lambda s: select_indices(s.buffers[x], s.logits_indices)


def attend(o: Operands, op: ops.Attend) -> Compute:
    """Rotate q and k, and attend as the step says."""
    qkv = o.buffers[op.qkv]
    H, G, _ = op.heads
    sizes = H, G if op.has_kv else 0, op.v_dim
    rope = op.rope
    params = op.params
    cache = op.cache

    def compute(s: ReferenceStep) -> Tensor:
        q, k, v = split_qkv(s, s.buffers[qkv], sizes, rope)
        if params.key_offset is not None:
            k = (k.float() - params.key_offset).to(k.dtype)
        return s.attend(cache, q, k, v, params).flatten(1)

    return compute


def write_cache(o: Operands, op: ops.WriteCache) -> Compute:
    """Rotate k, and write as the step says."""
    rows = o.buffers[op.out]
    H, G, _ = op.heads
    sizes = H, G, op.v_dim
    rope = op.rope
    cache = op.cache

    def compute(s: ReferenceStep) -> Tensor:
        _, k, v = split_qkv(s, s.buffers[rows], sizes, rope)
        s.write(cache, k, v)
        return s.buffers[rows]

    return compute


def split_qkv(
    s: ReferenceStep, rows: Tensor, sizes: tuple[int, int, int], rope: Rope | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split rows [q | k | v] into q [T, H, D] and k [T, G, D], rotated, and v [T, G, V]; `sizes` are H, G and V."""
    H, G, V = sizes
    qk, v = rows.tensor_split([rows.shape[1] - G * V], dim=1)
    qk = split_heads(qk, H + G)
    if rope:
        if rope not in s.angles:
            s.angles[rope] = rope.angles(s.positions, qk.dtype)
        qk = rope.apply(qk, s.angles[rope])
    q, k = torch.split(qk, [H, G], dim=1)
    return q, k, v.view(len(v), G, V)


def compute_convolution(o: Operands, op: ops.Convolve) -> Compute:
    """Convolve rows with those of earlier tokens."""
    x = o.buffers[op.x]
    w = op.weight.float()
    b = None if op.bias is None else op.bias.float()

    def compute(s: ReferenceStep) -> Tensor:
        return convolve(s.buffers[x], s.use_cache(op.cache), s.positions, w, b)

    return compute


def compute_linear_attention(o: Operands, op: ops.AttendLinearly) -> Compute:
    """Attend linearly, by slots and states."""
    qkv = o.buffers[op.qkv]
    gates = o.buffers[op.gates]
    params = op.params.map_tensors(Tensor.float)

    def compute(s: ReferenceStep) -> Tensor:
        tokens, states = map(s.use_cache, op.caches)
        return attend_linearly(s.buffers[qkv], s.buffers[gates], tokens, states, s.positions, params)

    return compute


def replace_or_add(o: Operands, op: ops.Operation, compute: Compute, add: bool = True) -> Compute:
    """Return how to add rows to those of `out`; without `add` they replace them."""
    out = o.buffers[op.out]
    return (lambda s: s.buffers[out] + compute(s)) if add else compute


def map_columns(o: Operands, op: ops.HeadMatMul | ops.CopyColumns, function: Callable[[Tensor], Tensor]) -> Compute:
    """Return how to put a function of the source columns [T, H, n] into the target columns."""
    x = o.buffers[op.x]
    out = o.buffers[op.out]
    width = op.out.width
    source = op.source
    target = op.target

    def compute(s: Step) -> Tensor:
        rows = s.buffers[x]
        earlier = s.buffers[out] if out in s.buffers else rows.new_full((len(rows), width), nan)
        return target.replace(earlier, function(source.view(rows)))

    return compute


def look_up(index: Tensor, weight: Tensor | QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Return the rows of a table."""
    return F.embedding(index, weight) if isinstance(weight, Tensor) else weight[index].dequantize(dtype)


Lowerings = Mapping[type[ops.Operation], Callable[[Any, Any], Compute]]
# Of operations that touch no cache: Triton begins with these.
WITHOUT_CACHES: Lowerings = {
    ops.Embed: embed,
    ops.EmbedPosition: embed_position,
    ops.Norm: norm,
    ops.MatMul: multiply_matrix,
    ops.LowRank: add_low_rank,
    ops.HeadMatMul: multiply_heads,
    ops.CopyColumns: copy_columns,
    ops.Activate: compute_activation,
    ops.MixExperts: compute_experts,
    ops.Clip: clip,
    ops.Softcap: softcap,
    ops.Multiply: multiply,
    ops.Scale: scale,
    ops.ScaleByPosition: scale_by_position,
    ops.LoadHiddenStates: load_hidden_states,
    ops.GatherRows: gather_rows,
    ops.AllGather: all_gather,
    ops.AllReduce: all_reduce,
}
OPERATIONS: Lowerings = {
    **WITHOUT_CACHES,
    ops.Attend: attend,
    ops.WriteCache: write_cache,
    ops.Convolve: compute_convolution,
    ops.AttendLinearly: compute_linear_attention,
}
